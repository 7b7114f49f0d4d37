"""The encoder-only Transformer, BERT (Devlin et al. 2019), and a classifier built on it.

Shapes: B batch · T positions · D d_model · N heads · L layers.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.models import layers
from transformer_jax.models.attention import padding_mask
from transformer_jax.models.layers import Embedding, Linear, layer_norm, make_initializer, parameter
from transformer_jax.models.positions import Positions
from transformer_jax.models.stack import SingleStackConfig, Stack, sown_weights

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BertConfig(SingleStackConfig):
    """Config of `Bert`. The defaults are those of BERT base (Devlin et al. 2019, Section 3)."""

    architecture: str = "bert"
    vocab_size: int = fields.size(30522, 304)
    num_segments: int = 2  # e.g. the two sentences of a pair
    init: str = "truncated_normal"
    embedding_init: str = "truncated_normal"
    norm_epsilon: float = 1e-12

    def choices(self) -> dict[str, tuple[str, ...]]:
        return super().choices() | {"architecture": ("bert",)}


class Bert(nn.Module):
    """Embeddings of tokens, segments and positions, a stack of bidirectional blocks, and a pooler.

    Differs: The paper has no pre-LN. With `norm = "pre"`, the stack ends in a layer norm.
    """

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        c.check()
        self.embedding = Embedding(c.vocab_size, c.d_model, c.vocab_multiple, c.embedding_init, c.embedding_scale)
        shape, axes = (c.num_segments, c.d_model), ("segment", "vector")
        self.segments = parameter(self, "segments", make_initializer(c.embedding_init), shape, axes)
        self.positions = Positions(c.positions, c.max_length, c.d_model, c.embedding_init)
        self.norm = layer_norm(c.norm_epsilon)
        self.dropout = layers.Dropout(c.dropout_rate)
        self.encoder = Stack(c, c.num_layers)
        self.pooler = Linear((c.d_model, c.d_model), ("embed", "vector"), dtype=c.dtype, initializer=c.init)

    def __call__(self, tokens: Array, valid: Array, segments: Array | None = None) -> tuple[Array, Array]:
        """Encode token ids (B, T) → x (B, T, D), pooled (B, D).

        `valid` (B, T) is True at tokens and False at padding; no position attends to padding. `segments` (B, T) are ids
        below `num_segments`, by default all 0. `pooled` is tanh(W x₀ + b), where x₀ belongs to the first token, [CLS].
        """
        if segments is None:
            segments = jnp.zeros_like(tokens)
        x = self.embedding(tokens) + jnp.take(self.segments, segments, axis=0) + self.positions(tokens.shape[1])
        x = self.encoder(self.dropout(self.norm(x)), padding_mask(valid))
        return x, jnp.tanh(self.pooler(x[:, 0]))

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, N, T, T) from `sown`, the collection "intermediates".

        The key is (name, sequence of the queries, sequence of the keys).
        """
        return {("self-attention", "text", "text"): sown_weights(sown["encoder"], "self_attention")}


class Classifier(nn.Module):
    """BERT with a linear map from the pooled vector to classes (Devlin et al. 2019, Section 4.1)."""

    config: BertConfig
    num_classes: int

    def setup(self) -> None:
        c = self.config
        self.bert = Bert(c)
        self.dropout = layers.Dropout(c.dropout_rate)
        shape = c.d_model, self.num_classes
        self.head = Linear(shape, ("embed", "classes"), dtype=c.dtype, initializer=c.init)

    def __call__(self, tokens: Array, valid: Array, segments: Array | None = None) -> Array:
        """Map token ids (B, T) to float32 logits (B, num_classes). The arguments are those of `Bert`."""
        _, pooled = self.bert(tokens, valid, segments)
        return self.head(self.dropout(pooled))

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return `Bert.attention_maps`."""
        return Bert(self.config).attention_maps(sown["bert"])
