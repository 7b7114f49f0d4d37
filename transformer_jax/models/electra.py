"""ELECTRA (Clark et al. 2020): a discriminator that tells which tokens of a text were
replaced, and the small generator that replaces them in pre-training.

Shapes: B batch · T positions · P masked positions · D d_model · E width of the
embeddings · V vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models import layers
from transformer_jax.models.bert import (
    Bert,
    BertConfig,
    MaskedLMHead,
    project_embeddings,
)
from transformer_jax.models.checks import check_ids
from transformer_jax.models.layers import Embedding, Head, Linear
from transformer_jax.models.masks import padding
from transformer_jax.models.stack import Stack

Array = jax.Array


class ReplacedTokensHead(nn.Module):
    """Logits that a token was replaced: activation(x W + b) · w + c.

    Differs: The paper has sigmoid(w · x) (Section 2); the layer before it is that of
    the authors' code.
    """

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.transform = Linear(
            "BTD,DE->BTE",
            (c.d_model, c.d_model),
            ("embed", "vector"),
            dtype=c.dtype,
            initializer=c.init,
        )
        self.output = Linear(
            "BTD,DC->BTC",
            (c.d_model, 1),
            ("embed", "classes"),
            dtype=c.dtype,
            initializer=c.init,
        )

    def __call__(self, x: Array) -> Array:
        """Map x (B, T, D) to float32 logits (B, T)."""
        activation = layers.ACTIVATIONS[self.config.activation]
        return self.output(activation(self.transform(x)))[..., 0]


class Generator(nn.Module):
    """A masked language model that reads the embeddings of another model."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        if c.embedding_dim:
            self.embeddings_project = project_embeddings(c)
        self.encoder = Stack(c, c.num_layers)
        self.masked_lm = MaskedLMHead(c)

    def __call__(
        self,
        x: Array,
        valid: Array,
        positions: Array | None,
        embedding: Embedding,
    ) -> tuple[Array, Head]:
        """Return vectors (B, P, E) at `positions` (B, P), and their map to logits.

        x (B, T, E) are embedded tokens, and `embedding` has their table. `positions`
        None stands for all T.
        """
        if self.config.embedding_dim:
            x = self.embeddings_project(x)
        x = self.encoder(x, padding(valid))
        if positions is not None:
            check_ids("positions", positions, valid.shape[1])
            x = jnp.take_along_axis(x, positions[..., None], axis=1)
        return self.masked_lm(x, embedding)


class Electra(nn.Module):
    """A BERT without a pooler as discriminator, and a generator if it has a config.

    Both read the same embeddings (Section 3.2), so the generator's config has the
    `embedding_width` of the discriminator's.

    Differs: In the paper, embeddings of tokens and positions are shared. Here, as in
    the authors' code, those of segments and the norm after the sum are shared as well.
    """

    config: BertConfig
    generator_config: BertConfig | None = None

    def setup(self) -> None:
        self.bert = Bert(self.config)
        self.replaced_tokens = ReplacedTokensHead(self.config)
        if self.generator_config is not None:
            self.generator = Generator(self.generator_config)

    def __call__(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
    ) -> Array:
        """Map token ids (B, T) to float32 logits (B, T) that they were replaced.

        The arguments are those of `Bert`.
        """
        if self.is_initializing() and self.generator_config is not None:
            # Flax makes the parameters of a module in its first call.
            self.generate(tokens, valid, segments)
        return self.replaced_tokens(self.bert.encode(tokens, valid, segments))

    def generate(
        self,
        tokens: Array,
        valid: Array,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> tuple[Array, Head]:
        """Return the generator's vectors (B, P, E) at `positions`, and their map to
        logits. See `Generator`; the other arguments are those of `Bert`.
        """
        x = self.bert.embed(tokens, valid, segments)
        return self.generator(x, valid, positions, self.bert.embedding)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return `Bert.attention_maps` of the discriminator."""
        return Bert(self.config).attention_maps(sown["bert"])


def sample(head: Head, vectors: Array, keys: Array, size: int) -> Array:
    """Draw a token for each of the vectors (B, P, E) → ids (B, P) below `size`.

    Token v is drawn with probability softmax(head(vectors))_v among the first `size`:
    it is argmax_v (logit_v + g_v), where g are independent draws of a standard Gumbel
    distribution. Row b is drawn with keys[b] (B,), so it does not depend on the other
    rows. There is no gradient.

    The logits of one position of every row are in memory at a time.
    """
    head, vectors = jax.lax.stop_gradient((head, vectors))

    def noise(key: Array, i: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, i), (size,))

    def draw(position: tuple[Array, Array]) -> Array:
        i, x = position
        logits = head(x[:, None])[:, 0, :size]
        noisy = logits + jax.vmap(noise, (0, None))(keys, i)
        return noisy.argmax(axis=-1).astype(jnp.int32)

    count = vectors.shape[1]
    ids = jax.lax.map(draw, (jnp.arange(count), vectors.swapaxes(0, 1)))
    return ids.swapaxes(0, 1)


def replace(tokens: Array, positions: Array, counted: Array, new: Array) -> Array:
    """Return tokens (B, T) with `new` (B, P) at `positions` (B, P), where `counted`
    (B, P) is True.
    """

    def of_row(row: Array, index: Array, values: Array) -> Array:
        return row.at[index].set(values, mode="drop")

    index = jnp.where(counted, positions, tokens.shape[1])
    return jax.vmap(of_row)(tokens, index, new)
