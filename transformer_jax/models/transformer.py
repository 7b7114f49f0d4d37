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
from transformer_jax.models.caches import KeyValue, Past, SharedPast
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.kernels.choose import shares_past
from transformer_jax.models.layers import Embedding, LMHead, OutputLayer, parameter
from transformer_jax.models.masks import CAUSAL, padding
from transformer_jax.models.positions import Positions, check_length
from transformer_jax.models.stack import (
    BlockConfig,
    Stack,
    sown_weights,
    unstack_layers,
)

Array = jax.Array

TIES = ("all", "decoder", "none")


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
    # "decoder": target embedding and output layer. "none": each has its own.
    tie_embeddings: str = "all"
    output_bias: bool = False  # added to the logits
    # of token embeddings and learned positions: see `Embedding`
    embedding_init: str = "normal"
    # token embeddings are multiplied by √d_model (Section 3.4)
    embedding_scale: bool = True
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
        if (
            self.tie_embeddings == "all"
            and self.source_vocab_size != self.target_vocab_size
        ):
            yield (
                "tie_embeddings",
                (
                    "'all' shares one table, "
                    f"but source_vocab_size = {self.source_vocab_size} "
                    f"and target_vocab_size = {self.target_vocab_size}: "
                    "make them equal or set tie_embeddings to 'decoder'"
                ),
            )

    @property
    def shares_tables(self) -> bool:
        """True if source and target share one embedding."""
        return self.tie_embeddings == "all"


class Cache(NamedTuple):
    """Everything that decoding keeps between steps.

    The batch axis comes first in every leaf.

    past: of self-attention to the target so far.
    memory: of cross-attention to the source, for each layer.
    source_valid: (B, S), True at tokens and False at padding.
    """

    past: Past | SharedPast
    memory: tuple[KeyValue, ...]
    source_valid: Array


export.register_namedtuple_serialization(
    Cache, serialized_name="transformer_jax.transformer.Cache"
)


class Transformer(nn.Module):
    """The encoder–decoder Transformer.

    `model.apply(params, source, target)` returns, at each target position, the logits
    of the next token. `target` starts with the begin-of-sentence id (see
    `shift_right`). To decode, call `init_cache` once, which runs the encoder, then
    `extend` with a prompt of any length, and again with each new token.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        c.check()

        def embedding(vocab_size: int) -> Embedding:
            return Embedding(
                vocab_size,
                c.d_model,
                c.vocab_multiple,
                c.embedding_init,
                c.embedding_scale,
            )

        self.target_embedding = embedding(c.target_vocab_size)
        if c.tie_embeddings == "all":
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = embedding(c.source_vocab_size)
        padded = layers.padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
        if c.tie_embeddings == "none":
            self.output = OutputLayer(c.d_model, padded, c.output_bias, c.init)
        elif c.output_bias:
            self.output_bias = parameter(
                self, "output_bias", nn.initializers.zeros, (padded,), ("vocab",)
            )
        self.source_positions = Positions(
            c.positions, c.max_length, c.d_model, c.embedding_init
        )
        self.target_positions = Positions(
            c.positions, c.max_length, c.d_model, c.embedding_init
        )
        self.dropout = layers.Dropout(c.dropout_rate)
        self.encoder = Stack(c, c.num_encoder_layers)
        self.decoder = Stack(c, c.num_decoder_layers, cross=True)

    def encode(self, source: Array, source_valid: Array) -> Array:
        """Encode source ids (B, S) → memory (B, S, D).

        `source_valid` (B, S) is True at tokens.
        """
        check_ids("source", source, self.config.source_vocab_size)
        check_valid("source_valid", source_valid, source.shape)
        x = self.source_embedding(source) + self.source_positions(source.shape[1])
        return self.encoder(self.dropout(x), padding(source_valid))

    def __call__(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
    ) -> Array:
        """Map source ids (B, S) and target ids (B, T) to logits of the next token.

        The logits are float32 (B, T, padded V). See `hidden` for `source_valid` and
        `target_valid`.
        """
        x, lm_head = self.hidden(source, target, source_valid, target_valid)
        return lm_head(x, self.config.target_vocab_size, self.config.dtype)

    def hidden(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
        step: Any = 0,
    ) -> tuple[Array, LMHead]:
        """Return the decoder's output (B, T, D) and its map to logits.

        A loss can apply the map in chunks.

        `source_valid` (B, S) and `target_valid` (B, T) are True at tokens and False at
        padding, or None if there is no padding. `source_valid` masks encoder
        self-attention and cross-attention. `target_valid` masks decoder self-attention,
        together with the causal mask. `step` is ignored; it exists for parity with
        `RecurrentSeq2Seq`.
        """
        if source_valid is None:
            source_valid = jnp.ones(source.shape, bool)
        memory = self.encode(source, source_valid)
        check_ids("target", target, self.config.target_vocab_size)
        if target_valid is not None:
            check_valid("target_valid", target_valid, target.shape)
        mask = CAUSAL if target_valid is None else CAUSAL & padding(target_valid)
        x = self.dropout(
            self.target_embedding(target) + self.target_positions(target.shape[1])
        )
        return self.decoder(x, mask, memory, padding(source_valid)), self.lm_head()

    def lm_head(self) -> LMHead:
        """Return the map from the decoder's output to logits.

        By default, it is the target embedding (Section 3.4).
        """
        if self.config.tie_embeddings == "none":
            return self.output.lm_head()
        return LMHead(
            self.target_embedding.lm_head().table,
            self.output_bias if self.config.output_bias else None,
        )

    def init_cache(
        self, source: Array, source_valid: Array, length: int, hypotheses: int = 1
    ) -> Cache:
        """Run the encoder once, and return a cache for `length` target positions.

        With several `hypotheses` of each row, the cache may be one that they share, see
        `SharedPast`.

        Raises:
            ValueError: `length` exceeds `max_length`, and positions are neither
                relative nor rotary.
        """
        check_length(self.config.positions, length, self.config.max_length)
        memory = self.decoder.project(self.encode(source, source_valid))
        if not shares_past():
            hypotheses = 1
        past = self.decoder.init_cache(source.shape[0], length, hypotheses)
        return Cache(past, memory, source_valid)

    def extend(
        self, cache: Cache, target: Array, position: Array | int
    ) -> tuple[Array, Cache]:
        """Read target ids (B, T) from `position` on → logits (B, T, padded V), cache.

        There is no dropout. If hypotheses share the cache, `target` (N, 1) has the
        newest token of each of the N hypotheses.
        """
        length = target.shape[1]
        x = self.target_embedding(target) + self.target_positions(length, position)
        x, past = self.decoder.extend(
            x, cache.past, position, cache.memory, padding(cache.source_valid)
        )
        logits = self.lm_head()(x, self.config.target_vocab_size, self.config.dtype)
        return logits, cache._replace(past=past)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, N, T, S) from `sown`.

        `sown` is the collection "intermediates". The key is (name, sequence of the
        queries, sequence of the keys). The sequences are "source", "target" (the tokens
        to predict) and "input" (the tokens that the decoder reads).
        """
        encoder, decoder = sown["encoder"], sown["decoder"]
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
    def for_extend(self, params: Any) -> Any:
        """Return parameters in the form in which a loop over `extend` is fastest."""
        return unstack_layers(params, "decoder", self.config.num_decoder_layers)


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
