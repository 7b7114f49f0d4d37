"""The loss of the language model that is fine-tuned with a classifier."""

import jax.numpy as jnp
import numpy as np

from helpers import oracle
from transformer_jax.models.layers import Head
from transformer_jax.tasks.backbones import next_token_per_text


def test_the_language_modeling_loss_by_numpy():
    """It is a mean over the tokens of a text, then over texts.

    A text of one token and padding do not count.
    """
    rng = np.random.default_rng(0)
    x, embeddings, tokens = (
        rng.normal(size=(4, 7, 5)),
        rng.normal(size=(13, 5)),
        rng.integers(0, 13, (4, 7)),
    )
    lengths = np.array([7, 3, 1, 0])
    each = []
    for row, n in zip(range(2), lengths, strict=False):
        logits = x[row, : n - 1] @ embeddings.T
        each.append(
            oracle.cross_entropy(logits, tokens[row, 1:n], np.ones(n - 1))[0] / (n - 1)
        )

    valid = np.arange(7) < lengths[:, None]
    found = next_token_per_text(
        Head(jnp.float32(embeddings), None, 13),
        jnp.float32(x),
        tokens,
        jnp.array(valid),
    )
    assert float(found.weight) == 2
    np.testing.assert_allclose(found.sum, sum(each), rtol=1e-5)
