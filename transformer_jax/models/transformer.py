"""The encoder–decoder Transformer (Vaswani et al. 2017, "Attention Is All You Need").

Shapes: B batch · S source positions · T target positions · D d_model · N heads · H head width · V vocabulary ·
L layers.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.models import layers
from transformer_jax.models.attention import KeyValue, Valid, causal_mask, combine_masks, padding_mask
from transformer_jax.models.layers import Embedding, LMHead, OutputLayer
from transformer_jax.models.positions import Positions, check_length
from transformer_jax.models.stack import BlockConfig, Stack, sown_weights, unstack_layers

Array = jax.Array

TIES = ("all", "decoder", "none")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(BlockConfig):
    """The defaults are the paper's base model (Table 3, first row)."""

    architecture: str = "transformer"
    source_vocab_size: int = fields.size(37000, 304)
    target_vocab_size: int = fields.size(37000, 304)
    num_encoder_layers: int = fields.size(6, 2)
    num_decoder_layers: int = fields.size(6, 2)
    max_length: int = fields.size(1024, 32)
    # "all": source, target and output embeddings are one table (Section 3.4); "decoder": target and output are.
    tie_embeddings: str = "all"
    output_bias: bool = False  # of an untied output layer
    embedding_init: str = "normal"  # of tokens and of learned positions: see `Embedding`
    embedding_scale: bool = True  # token embeddings are multiplied by √d_model (Section 3.4)
    vocab_multiple: int = 1  # embedding tables are padded to a multiple of this many rows

    def choices(self) -> dict[str, tuple[str, ...]]:
        own = {"architecture": ("transformer",), "tie_embeddings": TIES, "embedding_init": layers.INITS}
        return super().choices() | own

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.tie_embeddings == "all" and self.source_vocab_size != self.target_vocab_size:
            yield (
                "tie_embeddings",
                f"'all' shares one table, but source_vocab_size = {self.source_vocab_size} and target_vocab_size = "
                f"{self.target_vocab_size}: make them equal or set tie_embeddings to 'decoder'",
            )
        if self.tie_embeddings != "none" and self.output_bias:
            yield "output_bias", "belongs to an untied output layer: set tie_embeddings to 'none'"

    @property
    def shares_tables(self) -> bool:
        """True if source and target have one embedding."""
        return self.tie_embeddings == "all"


class Cache(NamedTuple):
    """The state of decoding between steps. The batch axis comes first in every leaf.

    past: each layer's keys and values (B, N, T, H) of the target so far, for self-attention; memory: those of the
    source (B, N, S, H), for cross-attention; source_valid: (B, S).
    """

    past: tuple[KeyValue, ...]
    memory: tuple[KeyValue, ...]
    source_valid: Array


class Transformer(nn.Module):
    """The encoder–decoder model.

    `model.apply(params, source, target)` returns the logits of the token after each target token; `target` starts with
    the begin-of-sentence id (see `shift_right`). To decode, call `init_cache` once, which runs the encoder, then
    `extend` with prompts of any length and with single tokens.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        c.check()

        def embedding(vocab_size: int) -> Embedding:
            return Embedding(vocab_size, c.d_model, c.vocab_multiple, c.embedding_init, c.embedding_scale)

        self.target_embedding = embedding(c.target_vocab_size)
        if c.tie_embeddings == "all":
            self.source_embedding = self.target_embedding
        else:
            self.source_embedding = embedding(c.source_vocab_size)
        if c.tie_embeddings == "none":
            padded = layers.padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
            self.output = OutputLayer(c.d_model, padded, c.output_bias, c.init)
        self.source_positions = Positions(c.positions, c.max_length, c.d_model, c.embedding_init)
        self.target_positions = Positions(c.positions, c.max_length, c.d_model, c.embedding_init)
        self.dropout = layers.Dropout(c.dropout_rate)
        self.encoder = Stack(c, c.num_encoder_layers)
        self.decoder = Stack(c, c.num_decoder_layers, cross=True)

    def encode(self, source: Array, source_valid: Array) -> Array:
        """Encode source ids (B, S), of which `source_valid` (B, S) says which are tokens → memory (B, S, D)."""
        x = self.source_embedding(source) + self.source_positions(source.shape[1])
        return self.encoder(self.dropout(x), padding_mask(source_valid))

    def __call__(self, source: Array, target: Array, source_valid: Valid = None, target_valid: Valid = None) -> Array:
        """Map source ids (B, S) and target ids (B, T) to float32 logits (B, T, padded V) of the token after each.

        See `hidden` for the masks.
        """
        x, lm_head = self.hidden(source, target, source_valid, target_valid)
        return lm_head(x, self.config.target_vocab_size, self.config.dtype)

    def hidden(
        self, source: Array, target: Array, source_valid: Valid = None, target_valid: Valid = None, step: Any = 0
    ) -> tuple[Array, LMHead]:
        """Return the decoder's output (B, T, D) and its map to logits, for losses that apply it in chunks.

        `source_valid`, `target_valid`: True at tokens, False at padding; None if there is no padding. The source's
        masks encoder self-attention and cross-attention; the target's, with causality, decoder self-attention. `step`
        is not used here: other models have schedules that need it.
        """
        if source_valid is None:
            source_valid = jnp.ones(source.shape, bool)
        memory = self.encode(source, source_valid)
        valid = None if target_valid is None else padding_mask(target_valid)
        mask = combine_masks(causal_mask(target.shape[1]), valid)
        x = self.dropout(self.target_embedding(target) + self.target_positions(target.shape[1]))
        return self.decoder(x, mask, memory, padding_mask(source_valid)), self.lm_head()

    def lm_head(self) -> LMHead:
        """Return the map from the decoder's output to logits; by default it is the target embedding (Section 3.4)."""
        return self.output.lm_head() if self.config.tie_embeddings == "none" else self.target_embedding.lm_head()

    def init_cache(self, source: Array, source_valid: Array, length: int) -> Cache:
        """Run the encoder once and make room for `length` target positions.

        Raises:
            ValueError: There are fewer position vectors.
        """
        check_length(self.config.positions, length, self.config.max_length)
        memory = self.decoder.project(self.encode(source, source_valid))
        return Cache(self.decoder.init_cache(source.shape[0], length), memory, source_valid)

    def extend(self, cache: Cache, target: Array, position: Array | int) -> tuple[Array, Cache]:
        """Read target ids (B, T) at positions position … → logits (B, T, padded V) and the new cache. No dropout."""
        x = self.target_embedding(target) + self.target_positions(target.shape[1], position)
        x, past = self.decoder.extend(x, cache.past, position, cache.memory, padding_mask(cache.source_valid))
        return self.lm_head()(x, self.config.target_vocab_size, self.config.dtype), cache._replace(past=past)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return weights (B, L, N, T, S) by (name, who looks, at what), from what was sown in "intermediates".

        Who and what are "source", "target" (the tokens to predict) or "input" (the tokens that the decoder has read).
        """
        encoder, decoder = sown["encoder"], sown["decoder"]
        return {
            ("cross-attention", "target", "source"): sown_weights(decoder, "cross_attention"),
            ("encoder self-attention", "source", "source"): sown_weights(encoder, "self_attention"),
            ("decoder self-attention", "target", "input"): sown_weights(decoder, "self_attention"),
        }

    @nn.nowrap
    def for_extend(self, params: Any) -> Any:
        """Return the parameters in the form that is fastest for `extend` in a loop."""
        return unstack_layers(params, "decoder", self.config.num_decoder_layers)


def shift_right(target: Any, bos_id: int) -> Any:
    """Return what the decoder reads to predict `target` (B, T): the begin-of-sentence id first, the last id left out.

    Takes and returns arrays of JAX or of NumPy, which stay on the host.
    """
    xp = target.__array_namespace__()
    return xp.concat([xp.full_like(target[:, :1], bos_id), target[:, :-1]], axis=1)


def annotated(source_vocab_size: int, target_vocab_size: int) -> TransformerConfig:
    """Return the config of the Annotated Transformer (Rush 2018; Huang et al. 2022) at base size.

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
