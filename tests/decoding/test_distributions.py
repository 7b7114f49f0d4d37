"""Distributions of the next token against NumPy float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.searching import PLAIN, SETTINGS, expected_distribution, random_logits
from transformer_jax.decoding import IMPOSSIBLE, penalize, truncate
from transformer_jax.decoding.distributions import k_largest


@pytest.mark.parametrize(
    ("size", "k"), [(10_000, 12), (992, 3), (7, 5), (48, 7), (2 * 211, 5)]
)
@pytest.mark.parametrize("mean", [0.02, 1.0, 1e5])
def test_top_k_is_lax_top_k_ties_included(size, k, mean):
    x = jnp.asarray(
        np.random.default_rng(19).poisson(mean, size=(3, 5, size)), jnp.float32
    )
    for ours, theirs in zip(k_largest(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("settings", SETTINGS)
def test_truncated_distribution(settings):
    logits = random_logits(3, 7, 53, scale=2.0)
    # ties, but no -0.0, which top_k puts after 0.0
    logits[3] = np.round(logits[3]) + 0.0
    kept, tokens = jax.jit(functools.partial(truncate, **settings))(logits)
    for row, x in enumerate(logits):
        found = np.zeros(53)
        found[np.asarray(tokens[row])] = jax.nn.softmax(kept[row])
        np.testing.assert_allclose(
            found, expected_distribution(x, **settings), rtol=1e-5, atol=1e-9
        )
        assert found[x.argmax()] > 0


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """Tokens are kept in the order 1/2, 1/4, then the first of the two 1/8."""
    logits = jnp.log(jnp.array([[0.125, 0.5, 0.125, 0.25]]))
    for top_p, count in (
        (1e-3, 1),
        (0.49, 1),
        (0.51, 2),
        (0.74, 2),
        (0.76, 3),
        (0.88, 4),
    ):
        kept, tokens = truncate(logits, temperature=1.0, top_k=0, top_p=top_p)
        assert tokens[0][jnp.isfinite(kept[0])].tolist() == sorted([1, 3, 0, 2][:count])


def test_what_is_impossible_stays_so_at_any_temperature():
    kept, _ = truncate(
        jnp.array([[0.0, IMPOSSIBLE, -3.0]]), temperature=1e12, top_k=0, top_p=1.0
    )
    np.testing.assert_allclose(jax.nn.softmax(kept[0]), [0.5, 0.0, 0.5])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": t} for t in (0.0, 1e-38, math.inf)]
    + [{"top_k": -1}]
    + [{"top_p": p} for p in (0.0, 1.1)],
)
def test_truncate_refuses(wrong):
    with pytest.raises(
        ValueError,
        match=(
            r"temperature=.*top_k=.*top_p=.*must be at least 1e-06.*use 1.0, 0 and 1.0"
        ),
    ):
        truncate(jnp.zeros((1, 3)), **{**PLAIN, **wrong})


def test_the_penalty_by_hand():
    logits, seen = (
        jnp.array([[3.0, -3.0, 2.0, -2.0, 0.5]]),
        jnp.array([[True, True, False, False]]),
    )
    np.testing.assert_allclose(
        penalize(logits, seen, 1.5), [[2.0, -4.5, 2.0, -2.0, 0.5]]
    )
    np.testing.assert_array_equal(penalize(logits, seen, 1.0), logits)
    np.testing.assert_array_equal(
        penalize(jnp.array([[-jnp.inf]]), seen[:, :1], 1.5), [[-np.inf]]
    )
