"""Weights of alignments against their equations."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers import oracle
from transformer_jax.models.alignment import damped_scores, local_weights


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def test_damped_scores():
    scores = normal(2, 3, 5)
    np.testing.assert_array_equal(damped_scores(scores, jnp.array(0.0)), scores)
    expected = np.float64(scores) * np.exp(-0.3 * np.float64(scores))
    assert oracle.relative(damped_scores(scores, jnp.array(0.3)), expected) < 1e-6
    gradient = jax.grad(lambda damping: damped_scores(scores, damping).sum())(0.0)
    assert oracle.relative(gradient, -(np.float64(scores) ** 2).sum()) < 1e-5


def test_local_weights():
    """Luong et al. 2015, eq. 10: a softmax within the window, times a Gaussian.

    Weights outside the window and on padding are zero.
    """
    scores, center, window = normal(1, 2, 9), np.array([[3.2, 40.0]], np.float32), 2
    mask = (np.arange(9) != 4)[None, None]
    weights = np.asarray(local_weights(scores, center, window, mask))
    inside = [2, 3, 5]
    gauss = np.exp(-((np.array(inside) - 3.2) ** 2) / 2)  # σ = 1
    assert (
        oracle.relative(
            weights[0, 0, inside],
            oracle.softmax(np.float64(scores[0, 0, inside])) * gauss,
        )
        < 1e-5
    )
    assert (np.delete(weights[0, 0], inside) == 0).all()
    assert (weights[0, 1] == 0).all()
