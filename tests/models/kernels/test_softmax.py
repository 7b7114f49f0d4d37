"""The softmax of scores of which some are hidden, against one over the others."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.kernels.softmax import LOWEST, softmax_or_zeros

SHOWN = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
SCORES = np.float32(np.random.default_rng(0).normal(size=SHOWN.shape))
COTANGENT = np.float32(np.random.default_rng(1).normal(size=SHOWN.shape))


def expected(scores):
    """Return the softmax in float64, row by row, over the scores that are shown."""
    rows = np.zeros(scores.shape)
    for row, shown, weights in zip(np.float64(scores), SHOWN, rows, strict=True):
        powers = np.exp(row[shown])
        weights[shown] = powers / powers.sum()
    return rows


def hidden(scores):
    return softmax_or_zeros(scores + jnp.where(SHOWN, 0.0, LOWEST))


def test_hidden_scores_have_no_weight():
    found = hidden(SCORES)
    np.testing.assert_allclose(found, expected(SCORES), rtol=1e-6)
    assert (np.asarray(found)[~SHOWN] == 0).all()


def test_gradient():
    _, pull = jax.vjp(hidden, SCORES)
    weights = expected(SCORES)
    mean = (weights * COTANGENT).sum(axis=-1, keepdims=True)
    (found,) = pull(COTANGENT)
    np.testing.assert_allclose(found, weights * (COTANGENT - mean), atol=1e-7)
    assert (np.asarray(found)[~SHOWN] == 0).all()


def test_derivatives_in_forward_mode():
    _, forward = jax.jvp(hidden, (SCORES,), (COTANGENT,))
    (backward,) = jax.vjp(hidden, SCORES)[1](COTANGENT)
    # the Jacobian of the softmax is symmetric
    np.testing.assert_allclose(forward, backward, rtol=1e-6)
