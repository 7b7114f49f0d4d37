"""Measurements, compared with NumPy."""

import jax
import numpy as np
import pytest

from transformer_jax.claims import measuring

B, T, V = 3, 5, 7


@pytest.fixture
def batch():
    draw = np.random.default_rng(0)
    return {
        "target": draw.integers(0, V, (B, T)),
        "target_length": np.array([5, 2, 0]),  # the last row is filler
    }


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(size=(B, T, V)).astype(np.float32)


def tokens(batch):
    return [(b, t) for b in range(B) for t in range(batch["target_length"][b])]


def test_correct(batch, logits):
    right, count = measuring.correct(logits, batch)
    best = logits.argmax(axis=-1)
    assert right == sum(best[i] == batch["target"][i] for i in tokens(batch))
    assert count == 7
    certain = 100 * jax.nn.one_hot(batch["target"], V)
    assert measuring.correct(certain, batch)[0] == 7
