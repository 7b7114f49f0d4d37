"""The encoder–decoder Transformer (Vaswani et al. 2017, "Attention Is All You Need").

Shapes: B batch · S source positions · T target positions · D d_model · N heads · H head
width · V vocabulary · L layers.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

from transformer_jax import fields
from transformer_jax.models import layers
from transformer_jax.models.attention import Valid
from transformer_jax.models.caches import Cache, KeyValue
from transformer_jax.models.front_ends import Tokens
from transformer_jax.models.layers import (
    Embedding,
    Head,
    OutputLayer,
    TokenVectors,
    parameter,
)
from transformer_jax.models.masks import CAUSAL, padding
from transformer_jax.models.positions import Positions
from transformer_jax.models.stack import BlockConfig, Stack, sown_weights

Array = jax.Array

TIES = ("all", "decoder", "embeddings", "none")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(BlockConfig):
    """Config of `Transformer`.

    The defaults are those of the paper's base model (Table 3, first row).
    """

    architecture: str = "transformer"
    source_vocab_size: int = fields.size(37000, 304)
    target_vocab_size: int = fields.size(37000, 304)
    num_encoder_layers: int = fields.size(6, 2)
    num_decoder_layers: int = fields.size(6, 2)
    max_length: int = fields.size(1024, 32)
    # Which of these share one table. "all": source embedding, target embedding and
    # output layer (Section 3.4).
    # "decoder": target embedding and output layer. "embeddings": the two embeddings.
    # "none": each has its own.
    tie_embeddings: str = "all"
    output_bias: bool = False  # added to the logits
    # of token embeddings and learned positions: see `Embedding`
    embedding_init: str = "normal"
    # token embeddings are multiplied by √d_model (Section 3.4)
    embedding_scale: bool = True
    # a norm of the sums of token embeddings and positions, in encoder and decoder, as
    # in BART (Lewis et al. 2020)
    embedding_norm: bool = False
    output_scale: bool = False  # the output layer reads vectors divided by √d_model
    final_dropout_rate: float = fields.random(0.0, 0.0)  # on the output of each stack
    # embedding tables are padded to a multiple of this many rows
    vocab_multiple: int = 1

    def choices(self) -> dict[str, tuple[str, ...]]:
        own = {
            "architecture": ("transformer",),
            "tie_embeddings": TIES,
            "embedding_init": layers.INITS,
        }
        return super().choices() | own

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.shares_tables and self.source_vocab_size != self.target_vocab_size:
            yield (
                "tie_embeddings",
                (
                    f"{self.tie_embeddings!r} shares one table, "
                    f"but source_vocab_size = {self.source_vocab_size} "
                    f"and target_vocab_size = {self.target_vocab_size}: "
                    "make them equal or set tie_embeddings to 'decoder'"
                ),
            )

    @property
    def shares_tables(self) -> bool:
        """True if source and target share one embedding."""
        return self.tie_embeddings in ("all", "embeddings")

    @property
    def has_output_layer(self) -> bool:
        """True if the output layer has a table of its own."""
        return self.tie_embeddings in ("embeddings", "none")

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of source and target tokens."""
        factor = self.d_model**0.5 if self.embedding_scale else 1.0
        is_output = not self.has_output_layer
        return TokenVectors("d_model", self.d_model, factor, is_output)

    @property
    def source_width(self) -> int:
        """The width of the vectors that the encoder reads."""
        return self.d_model

    @property
    def memory_width(self) -> int:
        """The width of the vectors that the encoder writes."""
        return self.d_model

    @property
    def memory_stride(self) -> int:
        """The positions that the encoder reads for each that it writes."""
        return 1

    @property
    def source_dropout_rate(self) -> float:
        """The dropout of front ends."""
        return self.dropout_rate

    @property
    def source_positions(self) -> str:
        """The kind of positions that front ends add."""
        return self.positions


class Memory(NamedTuple):
    """The encoded source that the decoder reads.

    vectors: the encoder's output, (B, S, D).
    valid: (B, S), True at the source and False at its padding.
    """

    vectors: Array
    valid: Array


class ProjectedMemory(NamedTuple):
    """The memory in a cache: its keys and values in the cross-attention of each layer.

    valid: (B, S), see `Memory`.
    """

    layers: tuple[KeyValue, ...]
    valid: Array


for _kind in (Memory, ProjectedMemory):
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"transformer_jax.transformer.{_kind.__name__}"
    )


class Transformer(nn.Module):
    """The encoder–decoder Transformer.

    `model.apply(params, source, target)` returns, at each target position, the logits
    of the next token. `target` starts with the begin-of-sentence id (see
    `shift_right`). The other methods are those of `EncoderDecoder`.

    front_end: maps what the encoder reads to vectors (B, S, D), see `front_ends`. None:
        the source consists of tokens.
    """

    config: TransformerConfig
    front_end: nn.Module | None = None

    def setup(self) -> None:
        c = self.config
        c.check()
        self.target_embedding = self._embedding(c.target_vocab_size)
        if c.shares_tables:
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = self._embedding(c.source_vocab_size)
        self.source_positions = self._positions()
        self.target_positions = self._positions()
        self.dropout = layers.Dropout(c.dropout_rate)
        self.source_norm = self._embedding_norm()
        self.target_norm = self._embedding_norm()
        self.source = self.front_end or Tokens(
            self.source_embedding,
            self.source_positions,
            self.dropout,
            self.source_norm,
        )
        self.target = Tokens(
            self.target_embedding,
            self.target_positions,
            self.dropout,
            self.target_norm,
        )
        self.encoder = Stack(c, c.num_encoder_layers)
        self.decoder = Stack(c, c.num_decoder_layers, cross=True)
        self.final_dropout = layers.Dropout(c.final_dropout_rate)
        self.output_bias = None
        if c.has_output_layer:
            self.output = OutputLayer(
                c.target_vocab_size,
                c.d_model,
                c.vocab_multiple,
                c.output_bias,
                c.init,
                c.dtype,
            )
        elif c.output_bias:
            rows = layers.padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
            zeros = nn.initializers.zeros
            self.output_bias = parameter(
                self, "output_bias", zeros, (rows,), ("vocab",)
            )

    def __call__(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
    ) -> Array:
        """Map source ids (B, S) and target ids (B, T) to logits of the next token.

        The logits are float32 (B, T, padded V). `source_valid` (B, S) and
        `target_valid` (B, T) are True at tokens and False at padding, or None if there
        is no padding.
        """
        memory = self.encode(source, source_valid)
        return self.head()(self.hidden(memory, target, target_valid))

    def encode(self, inputs: Array, valid: Valid = None) -> Memory:
        """Encode the source, e.g. ids (B, S), of which `valid` (B, S) are tokens."""
        x, valid = self.source(inputs, valid)
        if valid is None:
            valid = jnp.ones(x.shape[:2], bool)
        x = self.encoder(x, padding(valid))
        return Memory(self.final_dropout(x), valid)

    def hidden(
        self,
        memory: Memory,
        target: Array,
        target_valid: Valid = None,
        step: Array | int = 0,
    ) -> Array:
        """Return the decoder's output (B, T, D) if it reads the ids `target` (B, T).

        Self-attention is causal, and does not see padding: `target_valid` (B, T) is
        False there. Cross-attention does not see the padding of the source. With
        `output_scale`, the output is divided by √d_model.
        """
        x, target_valid = self.target(target, target_valid)
        mask = CAUSAL
        if target_valid is not None:
            mask &= padding(target_valid)
        x = self.decoder(x, mask, memory.vectors, padding(memory.valid))
        return self._scaled(self.final_dropout(x))

    def head(self) -> Head:
        """Return the map from the decoder's output to logits.

        By default, it is the target embedding (Section 3.4).
        """
        if self.config.has_output_layer:
            return self.output.head()
        return self.target_embedding.head(self.config.dtype, self.output_bias)

    def start(
        self,
        memory: Memory,
        room: int,
        hypotheses: int = 1,
    ) -> Cache:
        """Return a cache with the projections of the memory in all layers, and room.

        Raises:
            ValueError: `room` exceeds `max_length`, and positions do not act in
                attention.
        """
        self.target.check_room(room)
        rows = memory.valid.shape[0]
        past = self.decoder.init_cache(rows, room, hypotheses)
        projected = self.decoder.project(memory.vectors)
        return Cache(past, ProjectedMemory(projected, memory.valid))

    def extend(
        self,
        cache: Cache,
        ids: Array,
        position: Array | int,
    ) -> tuple[Array, Cache]:
        """Read ids (B, T) from `position` on → logits (B, T, padded V), cache."""
        projected, valid = cache.memory
        x = self.target.embed(ids, position)
        x, past = self.decoder.extend(
            x, cache.past, position, projected, padding(valid)
        )
        return self.head()(self._scaled(x)), cache._replace(past=past)

    @nn.nowrap
    def _scaled(self, x: Array) -> Array:
        """Return what the output layer reads of the decoder's vectors x (B, T, D)."""
        return x * self.config.d_model**-0.5 if self.config.output_scale else x

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, N, T, S): see `EncoderDecoder`."""
        encoder = sown["encoder"]
        decoder = sown["decoder"]
        return {
            ("cross-attention", "target", "source"): sown_weights(
                decoder, "cross_attention"
            ),
            ("encoder self-attention", "source", "source"): sown_weights(
                encoder, "self_attention"
            ),
            ("decoder self-attention", "target", "input"): sown_weights(
                decoder, "self_attention"
            ),
        }

    @nn.nowrap
    def _embedding(self, vocab_size: int) -> Embedding:
        c = self.config
        return Embedding(
            vocab_size, c.d_model, c.vocab_multiple, c.embedding_init, c.embedding_scale
        )

    @nn.nowrap
    def _embedding_norm(self) -> nn.Module | None:
        c = self.config
        if not c.embedding_norm:
            return None
        return layers.NORM_TYPES[c.norm_type](c.norm_epsilon)

    @nn.nowrap
    def _positions(self) -> Positions:
        c = self.config
        return Positions(c.positions, c.max_length, c.d_model, c.embedding_init)


def shift_right(target: Any, bos_id: int) -> Any:
    """Return the decoder's input for predicting `target` (B, T).

    It is `bos_id`, then all ids of a row except the last. `target` may be a JAX array
    or a NumPy array. The result is of the same kind, so NumPy arrays stay on the host.
    """
    xp = target.__array_namespace__()
    return xp.concat([xp.full_like(target[:, :1], bos_id), target[:, :-1]], axis=1)


def annotated(source_vocab_size: int, target_vocab_size: int) -> TransformerConfig:
    """Return the config of the Annotated Transformer at base size.

    Rush 2018; Huang et al. 2022. Its code is pre-LN with final norms, although its text
    describes post-LN. Dropout of 0.1 also acts on the attention weights and in the
    feed-forward networks. All linear maps have biases. The two embeddings and the
    output layer have separate tables.

    Differs: Its LayerNorm divides by the unbiased standard deviation plus 1e-6, and its
    biases have PyTorch's default initialization instead of 0.
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
