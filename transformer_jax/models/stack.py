"""Stacks of Transformer blocks, and their decoding cache.

The blocks combine attention and feed-forward networks.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H head
width · L layers. The parameters of all layers of a stack are stored in one array each,
with axis L first.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.models import layers
from transformer_jax.models.attention import (
    IMPLEMENTATIONS,
    KeyValue,
    MultiHeadAttention,
    unsupported,
)
from transformer_jax.models.checks import check_vectors
from transformer_jax.models.layers import FeedForward, Residual, final_norm
from transformer_jax.models.masks import CAUSAL, Mask, padding
from transformer_jax.models.positions import IN_ATTENTION, POSITIONS

Array = jax.Array

DTYPES = ("float32", "bfloat16")
# Rematerialisation (Chen et al. 2016): what the backward pass of a layer recomputes.
# "none": nothing. "full": everything. "scores": everything except products with
# weights, so that the (B, N, T, S) arrays of attention are not stored.
REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "scores": jax.checkpoint_policies.save_only_these_names(layers.WEIGHT_PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


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
    rotary_base: float = 10000.0  # θ of "rotary" positions
    # on the output of each sub-layer and on the sums of embeddings
    dropout_rate: float = fields.random(0.1, 0.0)
    attention_dropout_rate: float = fields.random(0.0, 0.0)  # on the attention weights
    # on the d_ff hidden units
    feed_forward_dropout_rate: float = fields.random(0.0, 0.0)
    attention_bias: bool = True
    feed_forward_bias: bool = True
    init: str = "xavier_uniform"  # of the linear maps
    # The initial weights of the maps before residual connections are multiplied by
    # 1/√(number of residual connections in the stack) (Radford et al. 2019, Section
    # 2.3).
    scale_residual_init: bool = False
    norm_epsilon: float = 1e-6
    dtype: str = fields.how("float32")  # of the matrix products
    # of the residual stream: see `Residual`
    residual_dtype: str = fields.how("float32")
    # Layers per iteration of a stack's loop. With all of them, there is no loop. This
    # is faster, because a loop copies what the backward pass needs, but compilation
    # takes longer.
    unroll: int = fields.how(1, 2)
    # see `MultiHeadAttention`
    attention_implementation: str = fields.how("auto", "blocked", "jax")
    # what the backward pass recomputes: see REMAT
    remat: str = fields.how("none", "full", "scores")

    def choices(self) -> dict[str, tuple[str, ...]]:
        """Return the allowed values of each field that has a fixed set of them."""
        return {
            "activation": tuple(layers.ACTIVATIONS),
            "norm": layers.NORMS,
            "norm_type": tuple(layers.NORM_TYPES),
            "feed_forward": layers.FEED_FORWARDS,
            "positions": POSITIONS,
            "init": layers.INITS,
            "dtype": DTYPES,
            "residual_dtype": DTYPES,
            "attention_implementation": IMPLEMENTATIONS,
            "remat": tuple(REMAT),
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name == "num_kv_heads" else 1
            if type(value) is int and value < least:
                yield name, f"must be at least {least}"
            if name.endswith("dropout_rate") and not 0 <= value < 1:
                yield name, "must be in [0, 1)"
        if not self.norm_epsilon > 0:
            yield "norm_epsilon", "must be positive, e.g. 1e-6"
        if not self.rotary_base > 0:
            yield "rotary_base", "must be positive, e.g. 10000"
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            yield (
                "num_kv_heads",
                f"must divide num_heads = {self.num_heads}; 0 stands for num_heads",
            )
        for name, allowed in self.choices().items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"
        implementation = self.attention_implementation
        options = (
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
        for name, remedy in unsupported(implementation, *options):
            yield name, f"{rule} {remedy}"
        if self.positions == "rotary" and self.head_dim % 2:
            yield (
                "head_dim",
                (
                    "must be even, because 'rotary' rotates pairs of features: "
                    "change it or model.positions"
                ),
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
        self.self_attention, self.self_attention_residual = (
            self._attention(True),
            self._residual(),
        )
        if self.cross:
            self.cross_attention, self.cross_attention_residual = (
                self._attention(False),
                self._residual(),
            )
        self.feed_forward = FeedForward(
            c.d_model,
            c.d_ff,
            c.activation,
            c.feed_forward_dropout_rate,
            c.dtype,
            c.init,
            c.feed_forward,
            c.feed_forward_bias,
            self.init_scale,
        )
        self.feed_forward_residual = self._residual()

    def __call__(
        self,
        x: Array,
        mask: Array | Mask | None = None,
        memory: Array | KeyValue | None = None,
        memory_mask: Array | Mask | None = None,
        cache: KeyValue | None = None,
        position: Array | int = 0,
        beams: int = 1,
    ) -> tuple[Array, KeyValue | None]:
        """Return the output (B, T, D) for x (B, T, D), and the new cache.

        x is written to the cache from `position` on. `mask` broadcasts to (B, N, T, T),
        or to (B, N, T, S) with a cache of S entries. With `beams`, so many adjacent
        entries of x, and of the cache, share a position. `memory` is (B, S, D) or its
        projection. It may have fewer rows, B / K; each of its rows is then read once
        for K adjacent rows of x.

        Raises:
            ValueError: The block has cross-attention, but there is no memory.
        """
        check_vectors("x", x, self.config.d_model)
        h = self.self_attention_residual.before(x)
        if cache is not None:
            cache = self.self_attention.extend(cache, h, position, beams)
        y = self.self_attention(
            h, h if cache is None else cache, mask=mask, position=position, beams=beams
        )
        x = self.self_attention_residual.after(x, y)
        if self.cross:
            if memory is None:
                raise UserError(
                    "memory = None: a block with cross-attention needs a memory; "
                    "pass one, or cross=False"
                )
            h = self.cross_attention_residual.before(x)
            shared = h.reshape(jax.tree.leaves(memory)[0].shape[0], -1, h.shape[-1])
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
        )

    @nn.nowrap
    def _residual(self) -> Residual:
        c = self.config
        return Residual(
            c.norm, c.dropout_rate, c.norm_epsilon, c.norm_type, c.residual_dtype
        )


class BeamCache(NamedTuple):
    """The self-attention cache of a beam search with K hypotheses per row.

    A row keeps what all its hypotheses have written, and a mask says which of it
    belongs to which hypothesis. So beam search reorders only masks in each step, and no
    keys or values.

    layers: keys and values (B, N, T·K, H) of each layer. Entry t·K + j was written by
        hypothesis j at position t.
    owned: (B, K, T·K), True at the entries that belong to hypothesis k: one at each
        position so far.
    """

    layers: tuple[KeyValue, ...]
    owned: Array

    def reorder(self, parents: Array) -> "BeamCache":
        """Return the cache of hypotheses that continue those of `parents` (B, K).

        Hypothesis k of a row continues hypothesis parents[row, k].
        """
        return self._replace(
            owned=jnp.take_along_axis(self.owned, parents[:, :, None], axis=1)
        )

    def advance(self, position: Array | int) -> "BeamCache":
        """Return the cache in which each hypothesis owns its next entry.

        It is about to write this entry at `position`.
        """
        rows, beams, _ = self.owned.shape
        new = jnp.broadcast_to(jnp.eye(beams, dtype=bool), (rows, beams, beams))
        return self._replace(
            owned=jax.lax.dynamic_update_slice_in_dim(
                self.owned, new, position * beams, axis=2
            )
        )


class Stack(nn.Module):
    """A stack of `num_layers` blocks, followed by a norm if it is pre-LN.

    It is causal if the caller's mask is.
    """

    config: BlockConfig
    num_layers: int
    cross: bool = False

    def setup(self) -> None:
        c, residuals = self.config, self.num_layers * (2 + self.cross)
        self.layers = Block(
            c, self.cross, residuals**-0.5 if c.scale_residual_init else 1.0
        )
        self.norm = final_norm(c.norm, c.norm_epsilon, c.norm_type)

    def __call__(
        self,
        x: Array,
        mask: Array | Mask | None = None,
        memory: Array | None = None,
        memory_mask: Array | Mask | None = None,
    ) -> Array:
        """Run x (B, T, D) through all layers.

        `mask` and `memory_mask` broadcast to (B, N, T, T) and (B, N, T, S).
        """

        def body(block: Block, x: Array, _: None) -> tuple[Array, None]:
            return block(x, mask, memory, memory_mask)[0], None

        return self.norm(self._run(body, self._start(x))[0])

    def outputs(self, x: Array, mask: Array | Mask | None = None) -> Array:
        """Run x (B, T, D) through all layers → their outputs (B, L, T, D).

        The last one is the result of `__call__`: only its norm is applied, if the stack
        is pre-LN.
        """

        def body(block: Block, x: Array, _: None) -> tuple[Array, Array]:
            x = block(x, mask)[0]
            return x, x

        last, every = self._run(body, self._start(x))
        return every.at[:, -1].set(self.norm(last))

    def init_cache(self, batch_size: int, length: int) -> tuple[KeyValue, ...]:
        """Return the self-attention cache of each layer.

        It has room for `length` positions.
        """
        return tuple(
            self.layers.self_attention.empty_cache(batch_size, length)
            for _ in range(self.num_layers)
        )

    def init_beam_cache(self, batch_size: int, length: int, beams: int) -> BeamCache:
        """Return a cache for `beams` hypotheses per row.

        It has room for `length` positions of each.
        """
        room = length * beams
        return BeamCache(
            self.init_cache(batch_size, room),
            jnp.zeros((batch_size, beams, room), bool),
        )

    def project(self, memory: Array) -> tuple[KeyValue, ...]:
        """Project memory (B, S, D) to each layer's cross-attention keys and values."""

        def body(block: Block, carry: None, _: None) -> tuple[None, KeyValue]:
            projected = block.cross_attention.project(memory)
            return carry, jax.tree.map(lambda x: x.astype(self.config.dtype), projected)

        return unstack(self._run(body, None)[1], self.num_layers, axis=1)

    def extend(
        self,
        x: Array,
        cache: tuple[KeyValue, ...],
        position: Array | int,
        memory: tuple[KeyValue, ...] | None = None,
        memory_mask: Array | Mask | None = None,
        start: Array | None = None,
    ) -> tuple[Array, tuple[KeyValue, ...]]:
        """Run x (B, T, D) through all layers → output (B, T, D), the new cache.

        x is written to the cache. The positions of x are position … position + T - 1.
        Attention is causal. `memory` comes from `project`. It may have fewer rows, B /
        K; each of its rows is then shared by K adjacent rows of x. Positions of the
        cache before `start` (B,) are padding. There is no dropout, and nothing is sown.

        The layers are unrolled and each has its own cache, because a loop would copy
        the whole cache at every step. Their parameters are unstacked here, unless
        `unstack_layers` has already done this.
        """
        room = cache[0].key.shape[2]
        mask = (
            CAUSAL
            if start is None
            else CAUSAL & padding(jnp.arange(room)[None] >= start[:, None])
        )
        return self._extend(
            x,
            cache,
            position,
            mask.part(position, x.shape[1], 0, room),
            memory,
            memory_mask,
        )

    def extend_beams(
        self,
        x: Array,
        cache: BeamCache,
        position: Array | int,
        memory: tuple[KeyValue, ...],
        memory_mask: Array | Mask | None = None,
    ) -> tuple[Array, BeamCache]:
        """As `extend`, for x (B, K, D) of the K hypotheses of each row.

        They are at the same `position`; `memory` has B rows.
        """
        cache, beams = cache.advance(position), x.shape[1]
        x, layers = self._extend(
            x, cache.layers, position, cache.owned[:, None], memory, memory_mask, beams
        )
        return x, cache._replace(layers=layers)

    def _extend(
        self,
        x: Array,
        cache: tuple[KeyValue, ...],
        position: Array | int,
        mask: Array | None,
        memory: tuple[KeyValue, ...] | None,
        memory_mask: Array | Mask | None,
        beams: int = 1,
    ) -> tuple[Array, tuple[KeyValue, ...]]:
        block: Any = Block(self.config, self.cross, parent=None)
        x, extended = self._start(x), list[KeyValue]()
        for i, (own, past) in enumerate(zip(self._unstacked(), cache, strict=True)):
            seen = None if memory is None else memory[i]
            x, past = block.apply(
                {"params": own}, x, mask, seen, memory_mask, past, position, beams
            )
            extended.append(past)
        return self.norm(x), tuple(extended)

    def _start(self, x: Array) -> Array:
        check_vectors("x", x, self.config.d_model)
        return x.astype(self.config.residual_dtype)

    def _run(self, body: Callable, carry: Any) -> tuple[Any, Any]:
        """Run body(block, carry, None) → (carry, output) for each layer.

        Outputs are stacked along axis 1.
        """
        c, length = self.config, self.num_layers
        if self.is_initializing() or self.is_mutable_collection("intermediates"):
            scan = nn.scan(
                body,
                {"params": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                length=length,
                out_axes=1,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(self.layers, carry, None)

        def layer(carry: Any, own: tuple) -> tuple[Any, Any]:
            params, rngs = own
            block = Block(c, self.cross, parent=None).bind(
                {"params": params}, rngs=rngs
            )
            return body(block, carry, None)

        if policy := REMAT[c.remat]:
            # Common-subexpression elimination could undo rematerialisation in unrolled
            # layers, but not in a plain loop.
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=c.unroll > 1)
        scope: Any = self.layers.scope
        # new in each call
        keys = {
            name: jax.random.split(self.layers.make_rng(name), length)
            for name in scope.rngs
        }
        if c.unroll < length:
            stacked = nn.unbox(self.variables["params"]["layers"]), keys
            carry, outputs = jax.lax.scan(layer, carry, stacked, unroll=c.unroll)
            return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
        each = list[Any]()
        for own in zip(self._unstacked(), unstack(keys, length), strict=True):
            carry, output = layer(carry, own)
            each.append(output)
        return carry, jax.tree.map(lambda *outputs: jnp.stack(outputs, axis=1), *each)

    def _unstacked(self) -> tuple[Any, ...]:
        """Return the parameters of each layer.

        `unstack_layers` may have unstacked them already.
        """
        stacked: Any = self.variables["params"]["layers"]
        return (
            stacked
            if isinstance(stacked, tuple)
            else unstack(nn.unbox(stacked), self.num_layers)
        )


def unstack(stacked: Any, num_layers: int, axis: int = 0) -> tuple[Any, ...]:
    """Split a tree whose leaves are stacked along `axis` into one tree per layer."""

    def one(layer: int) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.index_in_dim(x, layer, axis, keepdims=False), stacked
        )

    return tuple(map(one, range(num_layers)))


def unstack_layers(params: Any, stack: str, num_layers: int) -> Any:
    """Unstack the layers of the stack named `stack`.

    A loop over `extend` then need not do this at every step.
    """
    return params | {
        stack: params[stack] | {"layers": unstack(params[stack]["layers"], num_layers)}
    }


def sown_weights(sown: Any, sub_layer: str) -> Array:
    """Return the attention weights (B, L, N, T, S) of one sub-layer.

    They are in `sown`, the "intermediates" of a stack.
    """
    return sown["layers"][sub_layer]["weights"][0].swapaxes(0, 1)
