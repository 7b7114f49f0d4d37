"""Stacks of Transformer blocks: attention and feed-forward networks (Vaswani et al.
2017, Figure 1).

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H head
width · L layers. The parameters of all layers of a stack are stored in one array each,
with axis L first.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.models import layers
from transformer_jax.models.attention import MultiHeadAttention
from transformer_jax.models.caches import KeyValue, Past, SelfAttentionCache, SharedPast
from transformer_jax.models.checks import check_vectors
from transformer_jax.models.kernels.choose import (
    IMPLEMENTATIONS,
    Needs,
    shares_past,
    unsupported,
)
from transformer_jax.models.kernels.loop import (
    REMAT,
    as_layers,
    over_layers,
    unstack,
)
from transformer_jax.models.layers import (
    NORM_TYPES,
    FeedForward,
    Residual,
    TokenVectors,
)
from transformer_jax.models.masks import Mask, as_mask
from transformer_jax.models.positions import (
    IN_ATTENTION,
    NOWHERE,
    POSITIONS,
    SCALINGS,
    Places,
    RelativeBias,
    Scaling,
    make_places,
)

Array = jax.Array

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Config of `Block`.

    The defaults are those of the base model of Vaswani et al. 2017 (Table 3, first
    row).
    """

    d_model: int = fields.size(512, 16)
    d_ff: int = fields.size(2048, 24)
    num_heads: int = fields.size(8, 8)
    head_dim: int = fields.size(64, 8)  # d_k
    value_dim: int = fields.size(64, 4, like="head_dim")  # d_v
    # key-value heads, shared by query heads; 0: num_heads
    num_kv_heads: int = fields.size(0, 2, like="num_heads")
    activation: str = "relu"
    feed_forward: str = "plain"  # or "gated": see `FeedForward`
    norm: str = "post"  # where norms are: see `Residual`
    norm_type: str = "layer_norm"
    positions: str = "sinusoidal"
    # k of "relative" positions: longer distances are clipped to it
    max_relative_distance: int = 16
    # of "relative_bias" positions: see `buckets_of_distances`
    relative_buckets: int = 32
    max_bucket_distance: int = 128
    rotary_base: float = 10000.0  # θ of "rotary" positions
    # of "rotary" positions for texts longer than in training: see `Scaling`, whose
    # fields are these
    rotary_scaling: str = "none"
    rotary_factor: float = 1.0
    rotary_length: int = 8192
    rotary_slow: float = 1.0
    rotary_fast: float = 4.0
    # on the output of each sub-layer and on the sums of embeddings
    dropout_rate: float = fields.random(0.1, 0.0)
    attention_dropout_rate: float = fields.random(0.0, 0.0)  # on the attention weights
    # on the d_ff hidden units
    feed_forward_dropout_rate: float = fields.random(0.0, 0.0)
    attention_bias: bool = True
    feed_forward_bias: bool = True
    attention_output_bias: bool = True  # of W_O, if there is `attention_bias`
    qk_norm: bool = False  # RMS norms of queries and keys: see `MultiHeadAttention`
    # positions that a query of self-attention sees: itself and those before it (Beltagy
    # et al. 2020; Jiang et al. 2023). 0: all
    attention_window: int = 0
    scale_scores: bool = True  # divide scores by √d_k: see `MultiHeadAttention`
    init: str = "xavier_uniform"  # of the linear maps
    # The initial weights of the maps before residual connections are multiplied by
    # 1/√(number of residual connections in the stack) (Radford et al. 2019, Section
    # 2.3).
    scale_residual_init: bool = False
    norm_epsilon: float = 1e-6
    dtype: str = fields.how("float32")  # of the matrix products
    # of the residual stream: see `Residual`
    residual_dtype: str = fields.how("float32")
    # Layers per iteration of a stack's loop. With all of them, there is no loop, except
    # on CPUs with `remat`. This is faster, because a loop copies what the backward pass
    # needs, but compilation takes longer.
    unroll: int = fields.how(1, 2)
    # see `MultiHeadAttention`
    attention_implementation: str = fields.how("auto", "blocked", "jax")
    # what the backward pass recomputes: see REMAT
    remat: str = fields.how("none", "full", "scores")

    may_be_zero: ClassVar[tuple[str, ...]] = ("num_kv_heads", "attention_window")

    def choices(self) -> dict[str, tuple[str, ...]]:
        """Return the allowed values of each field that has a fixed set of them."""
        return {
            "activation": tuple(layers.ACTIVATIONS),
            "norm": layers.NORMS,
            "norm_type": tuple(layers.NORM_TYPES),
            "feed_forward": layers.FEED_FORWARDS,
            "positions": POSITIONS,
            "rotary_scaling": SCALINGS,
            "init": layers.INITS,
            "dtype": DTYPES,
            "residual_dtype": DTYPES,
            "attention_implementation": IMPLEMENTATIONS,
            "remat": tuple(REMAT),
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in self.may_be_zero else 1
            if type(value) is int and value < least:
                yield name, f"must be at least {least}"
            if name.endswith("dropout_rate") and not 0 <= value < 1:
                yield name, "must be in [0, 1)"
        if not self.norm_epsilon > 0:
            yield "norm_epsilon", "must be positive, e.g. 1e-6"
        if not self.rotary_base > 0:
            yield "rotary_base", "must be positive, e.g. 10000"
        yield from self._problems_of_scaling()
        exact = self.relative_buckets // 2
        if exact < 2:
            yield "relative_buckets", "must be at least 4, e.g. 32"
        if self.max_bucket_distance <= exact:
            yield (
                "max_bucket_distance",
                f"must be above {exact}, half of relative_buckets, e.g. 128",
            )
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            yield (
                "num_kv_heads",
                f"must divide num_heads = {self.num_heads}; 0 stands for num_heads",
            )
        for name, allowed in self.choices().items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"
        implementation = self.attention_implementation
        needs = Needs(
            self.attention_dropout_rate,
            self.positions,
            self.dtype,
            self.head_dim,
            self.value_dim,
        )
        rule = (
            f"is not supported by attention_implementation = {implementation!r}: "
            "set that to 'auto', or this to"
        )
        for name, remedy in unsupported(implementation, needs):
            yield name, f"{rule} {remedy}"
        if self.positions == "rotary" and self.head_dim % 2:
            yield (
                "head_dim",
                (
                    "must be even, because 'rotary' rotates pairs of features: "
                    "change it or model.positions"
                ),
            )

    def _problems_of_scaling(self) -> Iterator[tuple[str, str]]:
        if not self.rotary_factor >= 1:
            yield "rotary_factor", "must be at least 1, e.g. 8"
        if self.rotary_scaling == "dynamic" and self.head_dim < 4:
            yield "head_dim", "must be at least 4 with rotary_scaling = 'dynamic'"
        if not 0 < self.rotary_slow < self.rotary_fast:
            yield (
                "rotary_slow",
                f"must be positive and below rotary_fast = {self.rotary_fast}",
            )

    @property
    def scaling(self) -> Scaling:
        """The change of "rotary" positions beyond the length of the training."""
        return Scaling(
            self.rotary_scaling,
            self.rotary_factor,
            self.rotary_length,
            self.rotary_slow,
            self.rotary_fast,
        )

    def check(self) -> None:
        """Raise ValueError for the first of `problems`, if any.

        Configs made in code go through no other check.
        """
        for field, rule in self.problems():
            raise UserError(
                f"{type(self).__name__}.{field} = {getattr(self, field)!r}: {rule}"
            )

    @property
    def needs_warmup(self) -> bool:
        """True for post-LN, which rarely trains without a learning-rate warm-up.

        Xiong et al. 2020.
        """
        return self.norm == "post"


@dataclasses.dataclass(frozen=True)
class SingleStackConfig(BlockConfig):
    """Config of a model with one stack and one vocabulary.

    The default sizes are common to GPT and BERT base.
    """

    vocab_size: int = fields.size(40478, 304)
    num_layers: int = fields.size(12, 2)
    d_model: int = fields.size(768, 16)
    d_ff: int = fields.size(3072, 24)
    num_heads: int = fields.size(12, 8)
    activation: str = "gelu"
    positions: str = "learned"
    attention_dropout_rate: float = fields.random(0.1, 0.0)
    max_length: int = fields.size(512, 32)
    # of token embeddings and learned positions: see `Embedding`
    embedding_init: str = "normal"
    embedding_scale: bool = False  # token embeddings are multiplied by √d_model
    # the embedding table is padded to a multiple of this many rows
    vocab_multiple: int = 1

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of tokens, of a model whose output layer has its own table."""
        factor = self.d_model**0.5 if self.embedding_scale else 1.0
        return TokenVectors("d_model", self.d_model, factor, is_output=False)

    def choices(self) -> dict[str, tuple[str, ...]]:
        return super().choices() | {"embedding_init": layers.INITS}


class Block(nn.Module):
    """Self-attention, cross-attention if `cross`, and a feed-forward network.

    Each is in a `Residual`. Vaswani et al. 2017, Section 3.1. Self-attention is causal
    if the caller's mask is. In cross-attention, queries come from the block's input;
    keys and values come from the memory. `init_scale` multiplies the initial weights of
    the maps before residual connections.
    """

    config: BlockConfig
    cross: bool = False
    init_scale: float = 1.0

    def setup(self) -> None:
        c = self.config
        c.check()
        self.self_attention = self._attention(True)
        self.self_attention_residual = self._residual()
        if self.cross:
            self.cross_attention = self._attention(False)
            self.cross_attention_residual = self._residual()
        self.feed_forward = FeedForward(
            d_model=c.d_model,
            d_ff=c.d_ff,
            activation=c.activation,
            dropout_rate=c.feed_forward_dropout_rate,
            dtype=c.dtype,
            initializer=c.init,
            kind=c.feed_forward,
            use_bias=c.feed_forward_bias,
            init_scale=self.init_scale,
        )
        self.feed_forward_residual = self._residual()

    def __call__(
        self,
        x: Array,
        mask: Array | Mask | None = None,
        memory: Array | KeyValue | None = None,
        memory_mask: Array | Mask | None = None,
        *,
        places: Places | None = None,
        cache: KeyValue | None = None,
        entry: Array | int = 0,
    ) -> tuple[Array, KeyValue | None]:
        """Return the output (B, T, D) for x (B, T, D), and the cache with x in it.

        `mask` broadcasts to (B, N, T, T), or to (B, N, T, S) with a cache of S entries.
        x is written to the cache from `entry` on. `memory` is (B, S, D) or a cache of
        its projection. It may have fewer rows, which adjacent rows of x then share.

        Raises:
            ValueError: The block has cross-attention, but there is no memory.
        """
        check_vectors("x", x, self.config.d_model)
        h = self.self_attention_residual.before(x)
        if cache is None:
            y = self.self_attention(h, h, mask=mask, places=places)
        else:
            new = self.self_attention.project(h, places or NOWHERE)
            cache = cache.write(new, entry)
            y = self.self_attention(h, cache, mask=mask, places=places)
        x = self.self_attention_residual.after(x, y)
        if self.cross:
            if memory is None:
                raise UserError(
                    "memory = None: a block with cross-attention needs a memory; "
                    "pass one, or cross=False"
                )
            h = self.cross_attention_residual.before(x)
            rows = jax.tree.leaves(memory)[0].shape[0]
            shared = h.reshape(rows, -1, h.shape[-1])
            y = self.cross_attention(shared, memory, mask=memory_mask)
            x = self.cross_attention_residual.after(x, y.reshape(x.shape))
        h = self.feed_forward_residual.before(x)
        return self.feed_forward_residual.after(x, self.feed_forward(h)), cache

    @nn.nowrap
    def _attention(self, to_itself: bool) -> MultiHeadAttention:
        c = self.config
        return MultiHeadAttention(
            num_heads=c.num_heads,
            d_model=c.d_model,
            head_dim=c.head_dim,
            value_dim=c.value_dim,
            use_bias=c.attention_bias,
            dropout_rate=c.attention_dropout_rate,
            dtype=c.dtype,
            positions=(
                c.positions if to_itself and c.positions in IN_ATTENTION else "none"
            ),
            max_relative_distance=c.max_relative_distance,
            implementation=c.attention_implementation,
            initializer=c.init,
            num_kv_heads=c.num_kv_heads,
            rotary_base=c.rotary_base,
            init_scale=self.init_scale,
            scale_scores=c.scale_scores,
            scaling=c.scaling,
            output_bias=c.attention_output_bias,
            norm_epsilon=c.norm_epsilon if c.qk_norm else 0.0,
        )

    @nn.nowrap
    def _residual(self) -> Residual:
        c = self.config
        return Residual(
            c.norm, c.dropout_rate, c.norm_epsilon, c.norm_type, c.residual_dtype
        )


class Stack(nn.Module):
    """A stack of `num_layers` blocks, followed by a norm if it is pre-LN.

    It is causal if the caller's mask is. The last layer of a post-LN stack already ends
    in a norm.
    """

    config: BlockConfig
    num_layers: int
    cross: bool = False

    def setup(self) -> None:
        c = self.config
        residuals = self.num_layers * (3 if self.cross else 2)
        scale = residuals**-0.5 if c.scale_residual_init else 1.0
        self.layers = Block(c, self.cross, scale)
        if c.positions == "relative_bias":
            self.relative_bias = RelativeBias(
                c.num_heads, c.relative_buckets, c.max_bucket_distance, c.d_model
            )
        if c.norm == "pre":
            self.final_norm = NORM_TYPES[c.norm_type](c.norm_epsilon)

    def __call__(
        self,
        x: Array,
        mask: Array | Mask | None = None,
        memory: Array | None = None,
        memory_mask: Array | Mask | None = None,
    ) -> Array:
        """Run x (B, T, D) through all layers.

        `mask` and `memory_mask` broadcast to (B, N, T, T) and (B, N, T, S). For
        "relative_bias" positions, a mask is causal only if it has this rule, and never
        if it is an array.
        """
        places = self._places(x.shape[1], mask)
        mask = self._near(mask, x.shape[1])

        def body(block: Block, x: Array) -> tuple[Array, None]:
            x, _ = block(x, mask, memory, memory_mask, places=places)
            return x, None

        x, _ = self._run(body, self._start(x))
        return self._end(x)

    def outputs(self, x: Array, mask: Array | Mask | None = None) -> Array:
        """Run x (B, T, D) through all layers, and return the output of each.

        They are (B, L, T, D). The last one is the result of `__call__`: only its norm
        is applied, if the stack is pre-LN.
        """
        places = self._places(x.shape[1], mask)
        mask = self._near(mask, x.shape[1])

        def body(block: Block, x: Array) -> tuple[Array, Array]:
            x, _ = block(x, mask, places=places)
            return x, x

        last, every = self._run(body, self._start(x))
        return every.at[:, -1].set(self._end(last))

    def init_cache(
        self,
        rows: int,
        room: int,
        hypotheses: int = 1,
    ) -> SelfAttentionCache:
        """Return an empty cache of self-attention, with room for `room` positions.

        It is for `rows` · `hypotheses` sequences; the hypotheses of a row are adjacent.
        They may share one cache, see `SharedPast`.
        """
        empty = self.layers.self_attention.empty_cache
        if hypotheses == 1 or not shares_past():
            sequences = rows * hypotheses
            return Past(tuple(empty(sequences, room) for _ in range(self.num_layers)))
        entries = room * hypotheses
        layers = tuple(empty(rows, entries) for _ in range(self.num_layers))
        return SharedPast(layers, jnp.zeros((rows, hypotheses, entries), bool))

    def project(self, memory: Array) -> tuple[KeyValue, ...]:
        """Return caches of memory (B, S, D) for the cross-attention of each layer."""

        def body(block: Block, carry: None) -> tuple[None, KeyValue]:
            projected = block.cross_attention.project(memory)
            return carry, jax.tree.map(lambda x: x.astype(self.config.dtype), projected)

        _, projected = self._run(body, None)
        return unstack(projected, self.num_layers, axis=1)

    def extend(
        self,
        x: Array,
        cache: SelfAttentionCache,
        position: Array | int,
        memory: tuple[KeyValue, ...] | None = None,
        memory_mask: Array | Mask | None = None,
        begins: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run x (B, T, D) through all layers → output (B, T, D), and the cache with x.

        The positions of x are position … position + T - 1. Attention is causal.
        `memory` comes from `project`. It may have fewer rows, which adjacent rows of x
        then share. Positions of the cache before `begins` (B,) are padding. There is no
        dropout, and nothing is sown.

        The layers are unrolled and each has its own cache, because a loop would copy
        the whole cache at every step. Their parameters are unstacked here, unless
        `unstack_layers` has already done this.
        """
        shape = x.shape
        x = self._start(cache.arrange(x))
        cache = cache.advance(position)
        count = x.shape[1]
        keys = cache.keys()
        queries = cache.queries(position, count)
        places = self._places_of(queries, keys, keys.shape[0], causal=True)
        mask = self._in_window(cache.seen(position, count, begins), queries, keys)
        block: Any = Block(self.config, self.cross, parent=None)
        written = []
        for i, (own, past) in enumerate(
            zip(self._unstacked(), cache.layers, strict=True)
        ):
            x, past = block.apply(
                {"params": own},
                x,
                mask,
                None if memory is None else memory[i],
                memory_mask,
                places=places,
                cache=past,
                entry=cache.entry(position),
            )
            written.append(past)
        return self._end(x).reshape(shape), cache.written(tuple(written))

    def _start(self, x: Array) -> Array:
        check_vectors("x", x, self.config.d_model)
        return x.astype(self.config.residual_dtype)

    def _end(self, x: Array) -> Array:
        return self.final_norm(x) if self.config.norm == "pre" else x

    def _near(self, mask: Array | Mask | None, length: Any) -> Array | Mask | None:
        """Return the mask of positions 0 … length - 1 within the window."""
        if not self.config.attention_window:
            return mask
        positions = jnp.arange(length)
        return self._in_window(mask, positions, positions)

    def _in_window(
        self, mask: Array | Mask | None, queries: Array, keys: Array
    ) -> Array | Mask | None:
        """Return the mask without keys (S,) that lie before the window of queries
        (T,), given their positions.
        """
        if not self.config.attention_window:
            return mask
        near = keys[None] > queries[:, None] - self.config.attention_window
        return as_mask(mask) & Mask(allowed=near[None, None])

    def _places(self, length: Any, mask: Array | Mask | None) -> Places:
        """Return the places of queries and keys at 0 … length - 1."""
        positions = np.arange(length) if isinstance(length, int) else jnp.arange(length)
        causal = as_mask(mask).causal
        return self._places_of(positions, positions, length, causal)

    def _places_of(
        self,
        queries: Any,
        keys: Any,
        room: Any,
        causal: bool,
    ) -> Places:
        c = self.config
        if c.positions == "relative_bias":
            return Places(bias=self.relative_bias(queries, keys, causal))
        return make_places(
            c.positions,
            queries,
            keys,
            room,
            head_dim=c.head_dim,
            rotary_base=c.rotary_base,
            max_distance=c.max_relative_distance,
            scaling=c.scaling,
        )

    def _run(self, body: Callable, carry: Any) -> tuple[Any, Any]:
        """Run body(block, carry) → (carry, output) for each layer.

        Outputs are stacked along axis 1. Flax's scan makes the parameters and collects
        what is sown. Otherwise `over_layers` computes the same, faster: see there.
        """
        if self.is_initializing() or self.is_mutable_collection("intermediates"):
            scan = nn.scan(
                lambda block, carry, _: body(block, carry),
                {"params": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.num_layers,
                out_axes=1,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(self.layers, carry, None)

        def layer(carry: Any, own: tuple) -> tuple[Any, Any]:
            params, rngs = own
            block = Block(self.config, self.cross, parent=None)
            return body(block.bind({"params": params}, rngs=rngs), carry)

        scope: Any = self.layers.scope
        keys = {  # new ones in each call
            name: jax.random.split(self.layers.make_rng(name), self.num_layers)
            for name in scope.rngs
        }
        return over_layers(
            layer,
            nn.unbox(self.variables["params"]["layers"]),
            keys,
            carry,
            num_layers=self.num_layers,
            unroll=self.config.unroll,
            remat=self.config.remat,
        )

    def _unstacked(self) -> tuple[Any, ...]:
        """Return the parameters of each layer."""
        stacked: Any = nn.unbox(self.variables["params"]["layers"])
        return as_layers(stacked, self.num_layers)


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a model with the layers of each `Stack` apart.

    A loop over steps that call `Stack.extend` need not take them apart in every step.
    Parameters of models without stacks remain as they are.
    """
    apart = dict(params)
    for name, inside in params.items():
        if not isinstance(inside, Mapping):
            continue
        if name == "layers":
            apart[name] = unstack(inside, len(jax.tree.leaves(inside)[0]))
        else:
            apart[name] = unstack_layers(inside)
    return apart


def sown_weights(sown: Any, sub_layer: str) -> Array:
    """Return the attention weights (B, L, N, T, S) of one sub-layer.

    `sown` has the "intermediates" of a stack.
    """
    return sown["layers"][sub_layer]["weights"][0].swapaxes(0, 1)
