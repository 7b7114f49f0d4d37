"""The Transformer: blocks, stacks and the encoder–decoder model (Vaswani et al. 2017, "Attention Is All You Need").

Shapes: B batch · S source positions · T target positions · D d_model · N heads · H head width · F d_ff
· V vocabulary · L layers. The parameters of a stack's layers are stored stacked, axis L first.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models import layers
from transformer_jax.models.attention import (
    KeyValue,
    MultiHeadAttention,
    causal_mask,
    combine_masks,
    padding_mask,
)
from transformer_jax.models.layers import (
    Embedding,
    FeedForward,
    OutputLayer,
    Projection,
    Residual,
    final_norm,
)
from transformer_jax.models.positions import IN_ATTENTION, POSITIONS, Positions

Array = jax.Array

TIES = ("all", "decoder", "none")
DTYPES = ("float32", "bfloat16")
IMPLEMENTATIONS = ("einsum", "xla")
# Rematerialisation (Chen et al. 2016) of a layer: what its backward pass has to compute again. "none": nothing.
# "scores": all but the products with weights, so that attention's (B, N, T, S) need not be kept. "full": everything.
REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "scores": jax.checkpoint_policies.save_only_these_names(layers.PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The defaults are the paper's base model (Table 3, first row)."""

    architecture: str = dataclasses.field(default="transformer", kw_only=True)
    source_vocab_size: int = 37000
    target_vocab_size: int = 37000
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    head_dim: int = 64  # d_k
    value_dim: int = 64  # d_v
    activation: str = "relu"
    norm: str = "post"
    positions: str = "sinusoidal"
    max_relative_distance: int = 16  # k of "relative": farther tokens are all alike
    max_length: int = 1024
    # "all": source, target and output embeddings are one table (Section 3.4); "decoder": target and output are.
    tie_embeddings: str = "all"
    dropout_rate: float = 0.1  # on each sub-layer's output and on the sums of embeddings and positions
    attention_dropout_rate: float = 0.0  # on the attention weights
    feed_forward_dropout_rate: float = 0.0  # on the d_ff hidden units
    attention_bias: bool = True
    output_bias: bool = False  # of an untied output projection
    embedding_init: str = "normal"  # of tokens, and of learned positions
    norm_epsilon: float = 1e-6
    vocab_multiple: int = 1  # embedding tables are padded to a multiple of this many rows
    dtype: str = "float32"  # of the matrix products
    unroll: int = 1  # layers that one iteration of a stack's loop holds
    attention_implementation: str = "einsum"  # "xla": the library's, see `library_attention`
    remat: str = "none"  # what the backward pass computes again: see REMAT

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int and value < 1:
                yield name, "must be at least 1"
        for name in ("dropout_rate", "attention_dropout_rate", "feed_forward_dropout_rate"):
            if not 0 <= getattr(self, name) < 1:
                yield name, "must be in [0, 1)"
        if not self.norm_epsilon > 0:
            yield "norm_epsilon", "must be positive, as 1e-6"
        choices = {
            "architecture": ("transformer",),
            "activation": tuple(layers.ACTIVATIONS),
            "norm": layers.NORMS,
            "positions": POSITIONS,
            "tie_embeddings": TIES,
            "embedding_init": layers.EMBEDDING_INITS,
            "dtype": DTYPES,
            "attention_implementation": IMPLEMENTATIONS,
            "remat": tuple(REMAT),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"
        if self.attention_implementation == "xla":
            rule = "attention_implementation = 'xla' cannot do that: set it to 'einsum', or"
            if self.attention_dropout_rate:
                yield "attention_dropout_rate", f"{rule} this to 0"
            if self.positions == "relative":
                yield "positions", f"{rule} this to another"
            if self.value_dim != self.head_dim:
                yield "value_dim", f"{rule} this to head_dim = {self.head_dim}"
        if self.positions == "rotary" and self.head_dim % 2:
            yield "head_dim", "must be even, since 'rotary' turns pairs of features: change it or model.positions"
        if self.tie_embeddings == "all" and self.source_vocab_size != self.target_vocab_size:
            yield (
                "tie_embeddings",
                f"'all' shares one table, but source_vocab_size = {self.source_vocab_size} and target_vocab_size = "
                f"{self.target_vocab_size}: make them equal or set tie_embeddings to 'decoder'",
            )
        if self.tie_embeddings != "none" and self.output_bias:
            yield "output_bias", "belongs to an untied output projection: set tie_embeddings to 'none'"

    @property
    def shares_tables(self) -> bool:
        """Whether source and target have one embedding."""
        return self.tie_embeddings == "all"

    @property
    def needs_warmup(self) -> bool:
        """Post-LN seldom trains without (Xiong et al. 2020)."""
        return self.norm == "post"

    @staticmethod
    def shrink(model: Any) -> None:
        """Makes sizes in a recipe's section (ConfigDict) those of seconds."""
        model.num_encoder_layers = model.num_decoder_layers = 2
        model.value_dim = 8 if model.value_dim == model.head_dim else 4
        model.d_model, model.d_ff, model.num_heads, model.head_dim = 16, 24, 2, 8

    def check(self) -> None:
        """Raises ValueError for the first of `problems`: what a config file goes through, for configs made in code."""
        for field, rule in self.problems():
            raise ValueError(f"TransformerConfig.{field} = {getattr(self, field)!r}: {rule}")


class Cache(NamedTuple):
    """What decoding keeps between steps; the batch axis comes first in every leaf.

    past: for each layer keys and values (B, N, T, H) of the target so far, for self-attention; memory: those of the
    source, (B, N, S, H), for cross-attention; source_valid: (B, S).
    """

    past: tuple[KeyValue, ...]
    memory: tuple[KeyValue, ...]
    source_valid: Array


def _attention(config: TransformerConfig, to_itself: bool) -> MultiHeadAttention:
    return MultiHeadAttention(
        num_heads=config.num_heads,
        d_model=config.d_model,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        use_bias=config.attention_bias,
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
        positions=config.positions if to_itself and config.positions in IN_ATTENTION else "none",
        max_relative_distance=config.max_relative_distance,
        implementation=config.attention_implementation,
    )


def _feed_forward(config: TransformerConfig) -> FeedForward:
    return FeedForward(config.d_model, config.d_ff, config.activation, config.feed_forward_dropout_rate, config.dtype)


def _residual(config: TransformerConfig) -> Residual:
    return Residual(config.norm, config.dropout_rate, config.norm_epsilon)


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each in its residual (Section 3.1)."""

    config: TransformerConfig

    def setup(self) -> None:
        self.config.check()
        self.self_attention, self.self_attention_residual = _attention(self.config, True), _residual(self.config)
        self.feed_forward, self.feed_forward_residual = _feed_forward(self.config), _residual(self.config)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """x (B, S, D), mask to (B, N, S, S) → (B, S, D)."""
        h = self.self_attention_residual.before(x)
        x = self.self_attention_residual.after(x, self.self_attention(h, h, mask=mask))
        h = self.feed_forward_residual.before(x)
        return self.feed_forward_residual.after(x, self.feed_forward(h))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the source, feed-forward, each in its residual (Section 3.1).

    In the attention to the source the queries come from the decoder, keys and values from the encoder.
    """

    config: TransformerConfig

    def setup(self) -> None:
        self.config.check()
        self.self_attention, self.self_attention_residual = _attention(self.config, True), _residual(self.config)
        self.cross_attention, self.cross_attention_residual = _attention(self.config, False), _residual(self.config)
        self.feed_forward, self.feed_forward_residual = _feed_forward(self.config), _residual(self.config)

    def __call__(
        self,
        x: Array,
        memory: Array | KeyValue,
        self_mask: Array | None = None,
        cross_mask: Array | None = None,
        cache: KeyValue | None = None,
        position: Array | int = 0,
    ) -> tuple[Array, KeyValue | None]:
        """x (B, T, D), memory (B, S, D) or its projection → (B, T, D) and the cache, extended at `position`.

        Memory of fewer rows, B / K, is shared: each of its rows is read once for K neighbouring rows of x.
        """
        h = self.self_attention_residual.before(x)
        if cache is not None:
            cache = self.self_attention.extend(cache, h, position)
        y = self.self_attention(h, h if cache is None else cache, mask=self_mask, position=position)
        x = self.self_attention_residual.after(x, y)
        h = self.cross_attention_residual.before(x)
        shared = h.reshape(jax.tree.leaves(memory)[0].shape[0], -1, h.shape[-1])
        y = self.cross_attention(shared, memory, mask=cross_mask)
        x = self.cross_attention_residual.after(x, y.reshape(x.shape))
        h = self.feed_forward_residual.before(x)
        return self.feed_forward_residual.after(x, self.feed_forward(h)), cache


def over_layers(body: Callable, num_layers: int, unroll: int, remat: str) -> Callable:
    """body(block, carry, inputs) → (carry, outputs), run through a stack whose parameters lie along axis 0.

    Inputs and outputs that belong to a layer have the layers on axis 1, behind the batch.
    """
    if policy := REMAT[remat]:
        # In the loop's body nothing could be merged with the forward pass, in unrolled layers it must not be.
        body = nn.remat(body, policy=policy, prevent_cse=unroll > 1)
    return nn.scan(
        body,
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        length=num_layers,
        in_axes=1,
        out_axes=1,
        unroll=unroll,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


def unstack(stacked: Any, num_layers: int, axis: int = 0) -> tuple[Any, ...]:
    """Leaves with the layers along `axis` → a tree for each layer."""

    def one(layer: int) -> Any:
        return jax.tree.map(lambda x: jax.lax.index_in_dim(x, layer, axis, keepdims=False), stacked)

    return tuple(map(one, range(num_layers)))


class Encoder(nn.Module):
    """A stack of encoder blocks; every position sees every other (it is not causal)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """x (B, S, D) → (B, S, D)."""

        def body(block: EncoderBlock, x: Array, _: None) -> tuple[Array, None]:
            return block(x, mask), None

        run = over_layers(body, self.config.num_encoder_layers, self.config.unroll, self.config.remat)
        x, _ = run(EncoderBlock(self.config, name="layers"), x, None)
        return final_norm(self.config.norm, self.config.norm_epsilon)(x)


class Decoder(nn.Module):
    """A stack of decoder blocks."""

    config: TransformerConfig

    def setup(self) -> None:
        self.layers = DecoderBlock(self.config)
        self.norm = final_norm(self.config.norm, self.config.norm_epsilon)

    def __call__(
        self, x: Array, memory: Array, self_mask: Array | None = None, cross_mask: Array | None = None
    ) -> Array:
        """x (B, T, D), memory (B, S, D) → (B, T, D)."""

        def body(block: DecoderBlock, x: Array, _: None) -> tuple[Array, Any]:
            return block(x, memory, self_mask, cross_mask)

        x, _ = self._run(body, x, None)
        return self.norm(x)

    def init_cache(self, memory: Array, source_valid: Array, length: int) -> Cache:
        """A cache with room for `length` target positions and the source's keys and values in it."""

        def body(block: DecoderBlock, carry: None, _: None) -> tuple[None, tuple[KeyValue, KeyValue]]:
            empty = block.self_attention.empty_cache(memory.shape[0], length)
            cross = jax.tree.map(lambda x: x.astype(self.config.dtype), block.cross_attention.project(memory))
            return carry, (empty, cross)

        _, stacked = self._run(body, None, None)
        self_attention, cross_attention = (unstack(x, self.config.num_decoder_layers, axis=1) for x in stacked)
        return Cache(self_attention, cross_attention, source_valid)

    def extend(self, x: Array, cache: Cache, position: Array | int) -> tuple[Array, Cache]:
        """x (B, T, D) at positions position … position + T - 1 → (B, T, D) and the cache with them in it.

        The layers follow one another in the open, and each has a cache of its own: a loop over them would copy the
        whole cache at every step. Their parameters are taken apart here unless `unstack_decoder` has done so. The
        rows of x may be K times those of the source, side by side: they share it. No dropout; nothing is sown.
        """
        self_mask = causal_mask(x.shape[1], cache.past[0].key.shape[2], position)
        cross_mask = padding_mask(cache.source_valid)
        stack: Any = self.variables["params"]["layers"]
        layers = stack if isinstance(stack, tuple) else unstack(nn.unbox(stack), self.config.num_decoder_layers)
        block: Any = DecoderBlock(self.config, parent=None)
        extended: list[KeyValue] = []
        for params, past, memory in zip(layers, cache.past, cache.memory, strict=True):
            x, past = block.apply({"params": params}, x, memory, self_mask, cross_mask, past, position)
            extended.append(past)
        return self.norm(x), cache._replace(past=tuple(extended))

    def _run(self, body: Callable, carry: Any, inputs: Any) -> tuple[Any, Any]:
        c = self.config
        return over_layers(body, c.num_decoder_layers, c.unroll, c.remat)(self.layers, carry, inputs)


class Transformer(nn.Module):
    """The encoder–decoder model.

    `model.apply(params, source, target)` gives the logits of every next target token; `target` starts with the
    begin-of-sentence id (`shift_right`). To decode: `encode` once, `init_cache`, then `extend` by prompts of any
    length and by single tokens.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        c.check()

        def embedding(vocab_size: int) -> Embedding:
            return Embedding(vocab_size, c.d_model, c.vocab_multiple, c.embedding_init)

        self.target_embedding = embedding(c.target_vocab_size)
        if c.tie_embeddings == "all":
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = embedding(c.source_vocab_size)
        if c.tie_embeddings == "none":
            padded = layers.padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
            self.output = OutputLayer(c.d_model, padded, c.output_bias)
        self.source_positions = Positions(c.positions, c.max_length, c.d_model, c.embedding_init)
        self.target_positions = Positions(c.positions, c.max_length, c.d_model, c.embedding_init)
        self.dropout = layers.Dropout(c.dropout_rate)
        self.encoder, self.decoder = Encoder(c), Decoder(c)

    def encode(self, source: Array, source_valid: Array) -> Array:
        """source ids (B, S), source_valid (B, S) → memory (B, S, D)."""
        x = self.source_embedding(source) + self.source_positions(source.shape[1])
        return self.encoder(self.dropout(x), padding_mask(source_valid))

    def __call__(
        self,
        source: Array,
        target: Array,
        source_valid: Array | None = None,
        target_valid: Array | None = None,
    ) -> Array:
        """source ids (B, S), target ids (B, T) → logits (B, T, padded V) of the token after each, float32.

        See `hidden` for the masks.
        """
        x, project = self.hidden(source, target, source_valid, target_valid)
        return project(x, self.config.target_vocab_size, self.config.dtype)

    def hidden(
        self,
        source: Array,
        target: Array,
        source_valid: Array | None = None,
        target_valid: Array | None = None,
        step: Array | int = 0,
    ) -> tuple[Array, Projection]:
        """The decoder's output (B, T, D) and what projects it to logits: for a loss that does so in chunks.

        `source_valid`, `target_valid`: True at tokens, False at padding; None: there is no padding. The source's
        masks encoder self-attention and cross-attention, the target's (with causality) decoder self-attention. `step`,
        which a schedule may need, is free here.
        """
        if source_valid is None:
            source_valid = jnp.ones(source.shape, bool)
        memory = self.encode(source, source_valid)
        valid = None if target_valid is None else padding_mask(target_valid)
        self_mask = combine_masks(causal_mask(target.shape[1]), valid)
        x = self.dropout(self.target_embedding(target) + self.target_positions(target.shape[1]))
        return self.decoder(x, memory, self_mask, padding_mask(source_valid)), self.projection()

    def projection(self) -> Projection:
        """What turns the decoder's output into logits; Section 3.4: the target embedding."""
        if self.config.tie_embeddings == "none":
            return self.output.projection()
        return self.target_embedding.projection()

    def init_cache(self, source: Array, source_valid: Array, length: int) -> Cache:
        """Runs the encoder, once, and makes room for `length` target positions.

        Raises ValueError for more than there are position vectors.
        """
        if self.config.positions not in IN_ATTENTION and length > self.config.max_length:
            raise ValueError(
                f"{length=}: must not be beyond max_length = {self.config.max_length}; ask for fewer, or raise "
                "model.max_length"
            )
        return self.decoder.init_cache(self.encode(source, source_valid), source_valid, length)

    def extend(self, cache: Cache, target: Array, position: Array | int) -> tuple[Array, Cache]:
        """target ids (B, T) at positions position … → logits (B, T, padded V) and the extended cache. No dropout."""
        x = self.target_embedding(target) + self.target_positions(target.shape[1], position)
        x, cache = self.decoder.extend(x, cache, position)
        return self.projection()(x, self.config.target_vocab_size, self.config.dtype), cache

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Of what `apply(…, mutable="intermediates")` has sown: (name, who looks, at what) → weights (B, L, N, T, S).

        Who and what are "source", "target" (what the decoder is about to say) or "input" (what it has read).
        """

        def layers_of(stack: str, sub_layer: str) -> Array:
            return sown[stack]["layers"][sub_layer]["weights"][0].swapaxes(0, 1)

        return {
            ("cross-attention", "target", "source"): layers_of("decoder", "cross_attention"),
            ("encoder self-attention", "source", "source"): layers_of("encoder", "self_attention"),
            ("decoder self-attention", "target", "input"): layers_of("decoder", "self_attention"),
        }

    @nn.nowrap
    def for_extend(self, params: Any) -> Any:
        """The parameters as `extend` in a loop wants them."""
        return unstack_decoder(params, self.config.num_decoder_layers)


def unstack_decoder(params: Any, num_layers: int) -> Any:
    """The Transformer's parameters with the decoder's layers apart, for `extend` in a loop: else it would take them
    apart at every step."""
    decoder = params["decoder"]
    return params | {"decoder": decoder | {"layers": unstack(decoder["layers"], num_layers)}}


def shift_right(target: Array, bos_id: int) -> Array:
    """(B, T) → (B, T): what the decoder reads to predict `target`: begin-of-sentence first, the last one left out."""
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=bos_id)


def annotated(source_vocab_size: int, target_vocab_size: int) -> TransformerConfig:
    """The model that the Annotated Transformer (Rush 2018; Huang et al. 2022) builds, at base size.

    Pre-LN with final norms (where its text says post-LN), dropout 0.1 also on the attention weights and in the
    feed-forward networks, biases everywhere, three separate tables.
    Differs: its LayerNorm divides by the unbiased standard deviation plus 1e-6, and its biases start as torch's, not 0.
    """
    return TransformerConfig(
        source_vocab_size=source_vocab_size,
        target_vocab_size=target_vocab_size,
        norm="pre",
        tie_embeddings="none",
        attention_dropout_rate=0.1,
        feed_forward_dropout_rate=0.1,
        output_bias=True,
        embedding_init="xavier_uniform",
        max_length=5000,
    )
