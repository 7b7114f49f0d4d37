"""The decoder-only Transformer: GPT, GPT-2 and Llama.

Radford et al. 2018, Radford et al. 2019 and Touvron et al. 2023. A head for fine-tuning
follows at the end.

Shapes: B batch · T positions · D d_model · N heads · V vocabulary · L layers.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models import layers, masks
from transformer_jax.models.caches import SelfAttentionCache
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.layers import (
    Embedding,
    Head,
    Linear,
    OutputLayer,
    TokenVectors,
)
from transformer_jax.models.masks import CAUSAL, padding
from transformer_jax.models.positions import Positions, check_length
from transformer_jax.models.stack import SingleStackConfig, Stack, sown_weights

Array = jax.Array

# tokens of fine-tuning, which get the ids V, V + 1 and V + 2
SPECIALS = ("[START]", "[DELIM]", "[EXTRACT]")


@dataclasses.dataclass(frozen=True)
class GPTConfig(SingleStackConfig):
    """Config of `GPT`.

    The defaults are those of GPT (Radford et al. 2018, Section 4.1).

    Differs: `activation` is the exact GELU; the authors' code uses its tanh
    approximation, "gelu_tanh".
    """

    architecture: str = "gpt"
    init: str = "normal"
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True  # the token embedding is also the output layer

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of tokens."""
        return super().token_vectors._replace(is_output=self.tie_embeddings)

    def choices(self) -> dict[str, tuple[str, ...]]:
        return super().choices() | {"architecture": ("gpt",)}


def sizes(
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    num_kv_heads: int = 0,
) -> dict[str, Any]:
    """Return fields of `GPTConfig` for a model of this size.

    All heads together are as wide as the model.
    """
    width = d_model // num_heads
    heads = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": width,
        "value_dim": width,
    }
    return {"num_layers": num_layers, "d_model": d_model, "d_ff": d_ff, **heads}


def _gpt2(num_layers: int, d_model: int) -> dict[str, Any]:
    """Return fields of `GPTConfig` for a size of GPT-2.

    Radford et al. 2019, Section 2.3 and Table 2.
    """
    parts = {"norm": "pre", "activation": "gelu_tanh", "scale_residual_init": True}
    return {
        "vocab_size": 50257,
        "max_length": 1024,
        **parts,
        **sizes(num_layers, d_model, 4 * d_model, d_model // 64),
    }


def _llama(vocab_size: int, *shape: int) -> dict[str, Any]:
    """Return fields of `GPTConfig` for a size of Llama.

    Touvron et al. 2023, Section 2.2.
    """
    parts = {
        "norm": "pre",
        "norm_type": "rms_norm",
        "norm_epsilon": 1e-6,
        "positions": "rotary",
        "feed_forward": "gated",
        "activation": "silu",
        "attention_bias": False,
        "feed_forward_bias": False,
        "tie_embeddings": False,
        "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
    }
    return {"vocab_size": vocab_size, "max_length": 2048, **parts, **sizes(*shape)}


# The sizes of the papers, and two for small corpora and CPUs: GPT in the size of BERT's
# mini, and one of Llama's architecture, with grouped-query attention.
SIZES: dict[str, dict[str, Any]] = {
    # Fine-tuning adds 3 rows to the embedding; a multiple of 8 lets up to eight devices
    # share it. Pre-LN learns within a few hundred steps, in which the paper's post-LN
    # does not.
    "mini": {
        "vocab_size": 8000,
        "max_length": 128,
        "vocab_multiple": 8,
        "norm": "pre",
        **sizes(4, 256, 1024, 4),
    },
    "gpt": {"vocab_size": 40478, "max_length": 512, **sizes(12, 768, 3072, 12)},
    "gpt2-small": _gpt2(12, 768),
    "gpt2-medium": _gpt2(24, 1024),
    "gpt2-large": _gpt2(36, 1280),
    "gpt2-xl": _gpt2(48, 1600),
    "llama-7b": _llama(32000, 32, 4096, 11008, 32),
    "llama-tiny": _llama(80, 4, 128, 344, 4, 2),
}


class GPT(nn.Module):
    """A decoder-only language model.

    `model.apply(params, tokens)` returns, at each position, the logits of the next
    token. To generate text, call `start` once, then `extend` with a prompt of any
    length, and again with each new token.
    """

    config: GPTConfig

    def setup(self) -> None:
        c = self.config
        c.check()
        self.embedding = Embedding(
            c.vocab_size,
            c.d_model,
            c.vocab_multiple,
            c.embedding_init,
            c.embedding_scale,
        )
        self.positions = Positions(
            c.positions, c.max_length, c.d_model, c.embedding_init
        )
        self.dropout = layers.Dropout(c.dropout_rate)
        self.decoder = Stack(c, c.num_layers)
        if not c.tie_embeddings:
            self.output = OutputLayer(
                c.vocab_size,
                c.d_model,
                c.vocab_multiple,
                use_bias=False,
                initializer=c.init,
                dtype=c.dtype,
            )

    def __call__(
        self,
        tokens: Array,
        valid: Array | None = None,
        segments: Array | None = None,
        positions: Array | int = 0,
    ) -> Array:
        """Map token ids (B, T) to float32 logits (B, T, padded V) of the next token.

        For the arguments, see `hidden`.
        """
        return self.head()(self.hidden(tokens, valid, segments, positions))

    def hidden(
        self,
        tokens: Array,
        valid: Array | None = None,
        segments: Array | None = None,
        positions: Array | int = 0,
    ) -> Array:
        """Return the last layer's output (B, T, D). `head` maps it to logits.

        Args:
            tokens: ids (B, T).
            valid: (B, T) True at tokens and False at padding, to which no position
                attends. None: there is no padding.
            segments: (B, T) numbers of the documents in a row, from 1; 0 at padding. A
                document sees only itself.
            positions: (B, T) place of each token in its document; an integer is that of
                the first token in a row. Positions that act in attention do not use
                it, because they depend only on distances.
        """
        check_ids("tokens", tokens, self.config.vocab_size)
        if valid is not None:
            check_valid("valid", valid, tokens.shape)
        mask = CAUSAL if valid is None else CAUSAL & padding(valid)
        if segments is not None:
            mask &= masks.segments(segments, segments)
        x = self.embedding(tokens) + self.positions(tokens.shape[1], positions)
        return self.decoder(self.dropout(x), mask)

    def head(self) -> Head:
        """Return the map from the last layer's output to logits."""
        if self.config.tie_embeddings:
            return self.embedding.head(self.config.dtype)
        return self.output.head()

    def start(self, rows: int, room: int) -> SelfAttentionCache:
        """Return an empty cache for `rows` sequences of at most `room` tokens.

        The rows are the first axis of every leaf.

        Raises:
            ValueError: `room` exceeds `max_length`, and positions do not act in
                attention.
        """
        check_length(self.config.positions, room, self.config.max_length)
        return self.decoder.init_cache(rows, room)

    def extend(
        self,
        cache: SelfAttentionCache,
        tokens: Array,
        position: Array | int,
        begins: Array | None = None,
    ) -> tuple[Array, SelfAttentionCache]:
        """Read ids (B, T) from `position` on → logits (B, T, padded V), the new cache.

        There is no dropout. `begins` (B,) is the place in the cache at which each row
        begins. Positions count from it, and what is read before it is padding. So the
        rows of a batch can end at the same place and grow together. None: all begin at
        0.
        """
        length = tokens.shape[1]
        places = position
        if begins is not None:
            from_begin = position + jnp.arange(length)[None] - begins[:, None]
            places = jnp.maximum(from_begin, 0)
        x = self.embedding(tokens) + self.positions(length, places)
        x, cache = self.decoder.extend(x, cache, position, begins=begins)
        return self.head()(x), cache

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, N, T, T) from `sown`.

        `sown` is the collection "intermediates". The key is (name, sequence of the
        queries, sequence of the keys).
        """
        return {
            ("self-attention", "text", "text"): sown_weights(
                sown["decoder"], "self_attention"
            )
        }


class GPTClassifier(nn.Module):
    """GPT with a linear map from the last token's vector to classes.

    The last token is [EXTRACT] (Radford et al. 2018, eq. 3). The model inside is called
    "gpt". Its vocabulary is that of `config`, V, and `SPECIALS` (Section 3.3). A single
    class is a score: the value in a regression, or the score of one of several choices.

    views: the vectors of this many adjacent rows are added before the map: 2 for both
        orders of a pair (Section 3.3).
    specials: False: the vocabulary is V, the last token is that of the text, and the
        map has no bias, as in `GPT2ForSequenceClassification` of Hugging Face's
        transformers. Differs: There, the vectors have no dropout.

    The vectors have dropout, as in the authors' code. Differs: In that code, all
    choices of an example share one mask.
    """

    config: GPTConfig
    num_classes: int
    views: int = 1
    specials: bool = True

    def setup(self) -> None:
        c = self.config
        shape = (c.d_model, self.num_classes)
        vocab_size = c.vocab_size + len(SPECIALS) * self.specials
        self.gpt = GPT(dataclasses.replace(c, vocab_size=vocab_size))
        self.dropout = layers.Dropout(c.dropout_rate)
        options: dict[str, Any] = {
            "use_bias": self.specials,
            "dtype": c.dtype,
            "initializer": c.init,
        }
        self.head = Linear("...D,DC->...C", shape, ("embed", "classes"), **options)

    def __call__(self, tokens: Array, valid: Array) -> Array:
        """Map token ids (B, T) to float32 logits (B / views, num_classes).

        `valid` (B, T) is False at padding.
        """
        return self.hidden(tokens, valid)[0]

    def hidden(self, tokens: Array, valid: Array) -> tuple[Array, Array, Head]:
        """Return the logits, `GPT.hidden` and its map to logits of tokens.

        The last two are for the auxiliary language-modeling loss.
        """
        check_ids("tokens", tokens, self.gpt.config.vocab_size)
        check_valid("valid", valid, tokens.shape, at_end=True)
        x = self.gpt.hidden(tokens, valid)
        last = jnp.maximum(valid.sum(axis=1) - 1, 0)
        vectors = jnp.take_along_axis(x, last[:, None, None], axis=1)
        vectors = vectors.reshape(-1, self.views, x.shape[-1]).sum(axis=1)
        return self.head(self.dropout(vectors)), x, self.gpt.head()

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return `GPT.attention_maps` for the first of every `views` rows."""
        return {
            name: weights[:: self.views]
            for name, weights in GPT(self.config).attention_maps(sown["gpt"]).items()
        }


def swapped(
    tokens: Array,
    second: Array,
    length: Array,
) -> Array:
    """Swap the texts of pairs.

    [START] a [DELIM] b [EXTRACT] becomes [START] b [DELIM] a [EXTRACT]. tokens (B, T);
    second (B,) is the place at which b starts, and length (B,) the number of tokens.
    """
    place = jnp.arange(tokens.shape[1])[None]
    second = second[:, None]
    length = length[:, None]
    middle = length - second  # the new place of [DELIM]
    source = jnp.select(
        [place == 0, place < middle, place == middle, place < length - 1],
        [place, second + place - 1, second - 1, place - middle],
        place,
    )
    return jnp.take_along_axis(tokens, source, axis=1)
