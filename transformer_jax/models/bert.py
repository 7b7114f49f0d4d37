"""BERT (Devlin et al. 2019): the bidirectional encoder, and heads for it.

The heads are those of pre-training, and others for fine-tuning.

Shapes: B batch · T positions · P masked positions · D d_model · E width of the
embeddings · V vocabulary · L layers.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.models import layers
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.layers import (
    NORM_TYPES,
    Embedding,
    Head,
    Linear,
    TokenVectors,
    make_initializer,
    parameter,
)
from transformer_jax.models.masks import CAUSAL, Mask, padding
from transformer_jax.models.positions import Positions
from transformer_jax.models.stack import SingleStackConfig, Stack, sown_weights

Array = jax.Array

# activations of the pooler
POOLERS = {
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "gelu": layers.ACTIVATIONS["gelu"],
}


@dataclasses.dataclass(frozen=True)
class BertConfig(SingleStackConfig):
    """Config of `Bert`.

    The defaults are those of BERT base (Devlin et al. 2019, Section 3).
    """

    architecture: str = "bert"
    vocab_size: int = fields.size(30522, 304)
    # e.g. the two sentences of a pair. 1: one vector is added to all tokens (RoBERTa,
    # Liu et al. 2019). 0: none is (DistilBERT, Sanh et al. 2019).
    num_segments: int = 2
    # of token, segment and position embeddings, which a linear map takes to d_model
    # (ELECTRA, Clark et al. 2020). 0: d_model, without such a map
    embedding_dim: int = fields.size(0, 8)
    # "relu" in DistilBERT's head for classes, "gelu" in ELECTRA's
    pooler_activation: str = "tanh"
    # a position sees only itself and those before it: the paper's "LTR" model (Section
    # 5.1)
    causal: bool = False
    init: str = "truncated_normal"
    embedding_init: str = "truncated_normal"
    norm_epsilon: float = 1e-12

    may_be_zero: ClassVar = (
        *SingleStackConfig.may_be_zero,
        "num_segments",
        "embedding_dim",
    )

    def choices(self) -> dict[str, tuple[str, ...]]:
        own = {"architecture": ("bert",), "pooler_activation": tuple(POOLERS)}
        return super().choices() | own

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.embedding_dim == self.d_model:
            yield "embedding_dim", "must not be d_model: set it to 0, for no map"

    @property
    def has_segments(self) -> bool:
        """True if the two texts of a pair have different vectors."""
        return self.num_segments > 1

    @property
    def embedding_width(self) -> int:
        """E, the width of the embeddings."""
        return self.embedding_dim or self.d_model

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of tokens, of a model whose output layer has its own table."""
        width = self.embedding_width
        factor = width**0.5 if self.embedding_scale else 1.0
        key = "embedding_dim" if self.embedding_dim else "d_model"
        return TokenVectors(key, width, factor, is_output=False)


def sizes(
    num_layers: int,
    d_model: int,
    vocab_size: int = 30522,
) -> dict[str, int]:
    """Return fields of `BertConfig` for a model of this size.

    Heads have width 64, and d_ff = 4 d_model.
    """
    heads = {"num_heads": d_model // 64, "head_dim": 64, "value_dim": 64}
    return {
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "d_model": d_model,
        "d_ff": 4 * d_model,
        **heads,
    }


# The paper's sizes (Section 3), and the mini of Turc et al. 2019 with a vocabulary for
# small corpora.
SIZES = {"mini": sizes(4, 256, 8000), "base": sizes(12, 768), "large": sizes(24, 1024)}


class Bert(nn.Module):
    """Embeddings, a stack of bidirectional blocks, and a pooler.

    The embeddings are those of tokens, segments and positions. A model around this one
    can add others.

    Differs: The paper has no pre-LN. With `norm = "pre"`, the stack ends in a layer
    norm.
    """

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        c.check()
        self.embedding = Embedding(
            c.vocab_size,
            c.embedding_width,
            c.vocab_multiple,
            c.embedding_init,
            c.embedding_scale,
        )
        if c.num_segments:
            shape = (c.num_segments, c.embedding_width)
            init = make_initializer(c.embedding_init)
            axes = ("segment", "vector")
            self.segments = parameter(self, "segments", init, shape, axes)
        self.positions = Positions(
            c.positions, c.max_length, c.embedding_width, c.embedding_init
        )
        self.norm = NORM_TYPES[c.norm_type](c.norm_epsilon)
        self.dropout = layers.Dropout(c.dropout_rate)
        if c.embedding_dim:
            self.embeddings_project = project_embeddings(c)
        self.encoder = Stack(c, c.num_layers)
        self.pooler = Linear(
            "BD,DE->BE",
            (c.d_model, c.d_model),
            ("embed", "vector"),
            dtype=c.dtype,
            initializer=c.init,
        )

    def __call__(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
        added: Array | None = None,
    ) -> tuple[Array, Array]:
        """Encode token ids (B, T) → x (B, T, D), pooled (B, D).

        `valid` (B, T) is True at tokens and False at padding; no position attends to
        padding. `segments` (B, T) are ids below `num_segments`, by default all 0.
        `added` (B, T, E) is added to the embeddings. `pooled` is tanh(W x₀ + b), where
        x₀ belongs to the first token, [CLS]; `pooler_activation` may replace tanh. If
        the model is causal, [CLS] sees only itself, and the last token takes its place.
        """
        x = self.encode(tokens, valid, segments, added)
        if self.config.causal:
            last = jnp.where(valid, jnp.arange(valid.shape[1])[None], 0).max(axis=1)
            pooled = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        else:
            pooled = x[:, 0]
        activation = POOLERS[self.config.pooler_activation]
        return x, activation(self.pooler(pooled))

    def encode(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
        added: Array | None = None,
    ) -> Array:
        """Encode token ids (B, T) → x (B, T, D), without the pooler.

        The arguments are those of `__call__`.
        """
        x = self._embed(tokens, valid, segments, added)
        return self.encoder(x, self._mask(valid))

    def features(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None,
        last: int,
    ) -> Array:
        """Return the concatenated outputs of the `last` layers, (B, T, last · D).

        Devlin et al. 2019, Section 5.3. The last layer comes last. If the stack is
        pre-LN, the final norm is applied to it alone.
        """
        outputs = self.encoder.outputs(
            self._embed(tokens, valid, segments), self._mask(valid)
        )
        if self.is_initializing():
            # Flax makes the parameters of a layer in its first call. Features need no
            # pooler, but the checkpoints that the encoder starts from have one.
            self.pooler(outputs[:, 0, 0])
        return jnp.concatenate([outputs[:, i] for i in range(-last, 0)], axis=-1)

    def _embed(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None,
        added: Array | None = None,
    ) -> Array:
        """Return the input of the stack (B, T, D)."""
        x = self.embed(tokens, valid, segments, added)
        return self.embeddings_project(x) if self.config.embedding_dim else x

    def embed(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None,
        added: Array | None = None,
    ) -> Array:
        """Return the embeddings (B, T, E), after norm and dropout.

        The arguments are those of `__call__`.
        """
        check_ids("tokens", tokens, self.config.vocab_size)
        check_valid("valid", valid, tokens.shape)
        x = self.embedding(tokens)
        if self.config.num_segments:
            segments = jnp.zeros_like(tokens) if segments is None else segments
            check_ids("segments", segments, self.config.num_segments, tokens.shape)
            x += jnp.take(self.segments, segments, axis=0)
        x += self.positions(tokens.shape[1])
        if added is not None:
            x += added
        return self.dropout(self.norm(x))

    def _mask(self, valid: Array) -> Mask:
        return CAUSAL & padding(valid) if self.config.causal else padding(valid)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, N, T, T) from `sown`.

        `sown` is the collection "intermediates". The key is (name, sequence of the
        queries, sequence of the keys).
        """
        return {
            ("self-attention", "text", "text"): sown_weights(
                sown["encoder"], "self_attention"
            )
        }


def project_embeddings(config: BertConfig) -> Linear:
    """Return the map of embeddings (B, T, E) to the stack's input (B, T, D)."""
    return Linear(
        "BTE,ED->BTD",
        (config.embedding_width, config.d_model),
        ("vector", "embed"),
        dtype=config.dtype,
        initializer=config.init,
    )


def mean_over_tokens(x: Array, valid: Array) -> Array:
    """Return the mean of vectors (B, T, D) over the positions that are `valid` (B, T),
    0 without one → (B, D).
    """
    count = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    return (x * valid[..., None]).sum(axis=1) / count


class MaskedLMHead(nn.Module):
    """Logits of the token at a position: LayerNorm(activation(x W + b)) Tᵀ + c.

    T is the table of token embeddings.

    Differs: The paper does not describe the head; this is the one of the authors' code.
    """

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.transform = Linear(
            "BTD,DE->BTE",
            (c.d_model, c.embedding_width),
            ("embed", "vector"),
            dtype=c.dtype,
            initializer=c.init,
        )
        self.norm = NORM_TYPES[c.norm_type](c.norm_epsilon)
        shape = (layers.padded_vocab_size(c.vocab_size, c.vocab_multiple),)
        self.bias = parameter(self, "bias", nn.initializers.zeros, shape, ("vocab",))

    def __call__(self, x: Array, embedding: Embedding) -> tuple[Array, Head]:
        """Transform x (B, P, D).

        Return it and the map to logits, which a loss can apply in chunks.
        """
        activation = layers.ACTIVATIONS[self.config.activation]
        y = self.norm(activation(self.transform(x)))
        return y, embedding.head(self.config.dtype, self.bias)


class _WithBert(nn.Module):
    """A model that contains the encoder under the name "bert".

    The name lets parameters be passed on.
    """

    config: BertConfig

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return `Bert.attention_maps`."""
        return Bert(self.config).attention_maps(sown["bert"])


class Pretraining(_WithBert):
    """BERT with the heads of its pre-training (Section 3.1).

    These are masked LM and next-sentence prediction.
    """

    def setup(self) -> None:
        c = self.config
        self.bert = Bert(c)
        self.masked_lm = MaskedLMHead(c)
        self.next_sentence = Linear(
            "BD,DC->BC",
            (c.d_model, 2),
            ("embed", "classes"),
            dtype=c.dtype,
            initializer=c.init,
        )

    def __call__(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> tuple[Array, Head, Array]:
        """Return vectors, their map to logits, and next-sentence logits (B, 2).

        The vectors (B, P, E) are those at `positions` (B, P). The default of
        `positions` is all T positions. Next-sentence class 1 means that the second
        segment follows the first one in its document.
        """
        x, pooled = self.bert(tokens, valid, segments)
        if positions is not None:
            check_ids("positions", positions, tokens.shape[1])
            x = jnp.take_along_axis(x, positions[..., None], axis=1)
        vectors, head = self.masked_lm(x, self.bert.embedding)
        return vectors, head, self.next_sentence(pooled)


class _Head(_WithBert):
    """BERT with a linear map to `num_classes`.

    feature_layers: if not 0, the input of the map is not the last layer's output x but
        the concatenated outputs of this many last layers, as features of an encoder
        that is not fine-tuned (Section 5.3). That encoder has no dropout.
    """

    num_classes: int
    feature_layers: int = 0

    def setup(self) -> None:
        c = self.config
        plain = dataclasses.replace(
            c,
            dropout_rate=0.0,
            attention_dropout_rate=0.0,
            feed_forward_dropout_rate=0.0,
        )
        self.bert = Bert(plain if self.feature_layers else c)
        self.dropout = layers.Dropout(c.dropout_rate)
        shape = c.d_model * (self.feature_layers or 1), self.num_classes
        self.head = Linear(
            "...D,DC->...C",
            shape,
            ("embed", "classes"),
            dtype=c.dtype,
            initializer=c.init,
        )


class Classifier(_Head):
    """BERT with a linear map from the pooled vector to classes (Section 4.1).

    A single class is a score: the value in a regression, or the score of one of several
    choices.

    Differs: With `feature_layers`, the input of the map is the mean of the features
    over all tokens. The paper uses features only for tagging.
    """

    def __call__(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
    ) -> Array:
        """Map token ids (B, T) to float32 logits (B, num_classes).

        The arguments are those of `Bert`.
        """
        if self.feature_layers:
            x = self.bert.features(tokens, valid, segments, self.feature_layers)
            pooled = mean_over_tokens(x, valid)
        else:
            _, pooled = self.bert(tokens, valid, segments)
        return self.head(self.dropout(pooled))


class TokenClassifier(_Head):
    """BERT with a linear map from the vector of each token to classes.

    The classes are tags, or start and end of an answer. Devlin et al. 2019, Sections
    4.2 and 5.3. Differs: With `feature_layers`, the paper has a BiLSTM before the map.
    """

    def __call__(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
    ) -> Array:
        """Map token ids (B, T) to float32 logits (B, T, num_classes).

        The arguments are those of `Bert`.
        """
        if self.feature_layers:
            x = self.bert.features(tokens, valid, segments, self.feature_layers)
        else:
            x, _ = self.bert(tokens, valid, segments)
        return self.head(self.dropout(x))
