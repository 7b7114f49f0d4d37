"""Cross-entropy against the explicit distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from helpers.labelled import positions
from transformer_jax.losses import (
    binary_cross_entropy,
    correct_tokens,
    cross_entropy,
    doubly_stochastic,
    token_cross_entropy,
)
from transformer_jax.models.kernels import platforms
from transformer_jax.models.layers import Head

B, T, V = 3, 5, 7


def some_logits(padded=V):
    """Return logits (B, T, padded), with the padding of the vocabulary filled in
    like the model does.
    """
    logits = np.full((B, T, padded), np.finfo(np.float32).min, np.float32)
    logits[..., :V] = 3 * np.random.default_rng(0).normal(size=(B, T, V))
    return logits


LABELS = np.random.default_rng(1).integers(0, V, (B, T))

WEIGHTS = {
    "ones": np.ones((B, T), np.float32),
    "bool": np.arange(T) < np.array([5, 2, 0])[:, None],
    "any": np.float32(np.random.default_rng(2).random((B, T))),
}


@pytest.fixture(params=["cpu", "tpu"])
def every_platform(request, monkeypatch):
    """Compute as on this platform."""
    monkeypatch.setattr(platforms, "current", lambda: request.param)


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("padded", [7, 16])
def test_cross_entropy_is_that_of_the_explicit_distribution(
    label_smoothing, weights, padded
):
    weights, logits = WEIGHTS[weights], some_logits(padded)
    total, weight = cross_entropy(
        logits, LABELS, weights, vocab_size=V, label_smoothing=label_smoothing
    )
    expected, expected_weight = oracle.cross_entropy(
        logits[..., :V], LABELS, weights, label_smoothing
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(weight, expected_weight, rtol=1e-6)
    assert total.dtype == weight.dtype == jnp.float32


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padded", [7, 16])
def test_its_gradient_is_p_minus_q(label_smoothing, padded):
    logits, weights = some_logits(padded), WEIGHTS["any"] * WEIGHTS["bool"]

    def total(logits):
        return cross_entropy(
            logits, LABELS, weights, vocab_size=V, label_smoothing=label_smoothing
        )[0]

    gradient = np.asarray(jax.grad(total)(logits))
    p, q = (
        oracle.softmax(np.float64(logits[..., :V])),
        oracle.smoothed(LABELS, V, label_smoothing),
    )
    assert oracle.relative(gradient[..., :V], weights[..., None] * (p - q)) <= 1e-5
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-6)
    assert (gradient[..., V:] == 0).all()
    assert (gradient[weights == 0] == 0).all()


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    total, weight = cross_entropy(
        jnp.zeros((B, T, V)), LABELS, WEIGHTS["ones"], vocab_size=V, label_smoothing=0.1
    )
    np.testing.assert_allclose(total / weight, np.log(V), rtol=1e-6)


def test_smoothing_makes_certainty_costly():
    """Certainty costs nothing without smoothing.

    With smoothing, the least loss is the entropy of q.
    """
    sure = 20 * np.float32(np.eye(V)[LABELS])
    q = oracle.smoothed(LABELS, V, 0.1)
    costs = {}
    for name, logits in {"sure": sure, "best": np.float32(np.log(q))}.items():
        for label_smoothing in (0.0, 0.1):
            total, weight = cross_entropy(
                logits,
                LABELS,
                WEIGHTS["ones"],
                vocab_size=V,
                label_smoothing=label_smoothing,
            )
            costs[name, label_smoothing] = float(total / weight)
    assert costs["sure", 0.0] < 1e-6 < costs["best", 0.0]
    assert costs["best", 0.1] < costs["sure", 0.1]
    np.testing.assert_allclose(
        costs["best", 0.1], -(q * np.log(q)).sum(axis=-1).mean(), rtol=1e-5
    )


def test_sums_of_parts_add_up():
    logits, weights = some_logits(16), WEIGHTS["any"]
    whole = cross_entropy(logits, LABELS, weights, vocab_size=V, label_smoothing=0.1)
    parts = [
        cross_entropy(
            logits[b : b + 1],
            LABELS[b : b + 1],
            weights[b : b + 1],
            vocab_size=V,
            label_smoothing=0.1,
        )
        for b in range(B)
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_in_chunks_is_that_of_the_heads_logits(label_smoothing):
    table, x, labels, weights = positions(4, 5, 0.7)
    valid = weights > 0
    head = Head(table, None, V)
    found = token_cross_entropy(head, x, labels, valid, label_smoothing)
    expected = cross_entropy(
        x @ table.T, labels, valid, vocab_size=V, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_correct_tokens_are_counted():
    table, x, labels, weights = positions(4, 5, 0.7)
    labels = np.array(labels)
    best = np.asarray(x @ table.T).argmax(axis=-1)
    labels[:2] = best[:2]
    valid = weights > 0
    found = correct_tokens(Head(table, None, V), x, labels, valid)
    assert found == ((best == labels) & valid).sum()


def test_binary_cross_entropy_counts_what_is_valid():
    draw = np.random.default_rng(0)
    logits = 3 * draw.normal(size=(B, T)).astype(np.float32)
    labels = draw.random((B, T)) < 0.5
    valid = draw.random((B, T)) < 0.7
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    each = -np.log(np.where(labels, p, 1 - p))
    found = binary_cross_entropy(logits, labels, valid)
    np.testing.assert_allclose(found, (each[valid].sum(), valid.sum()), rtol=1e-5)


def test_doubly_stochastic_attention_is_equation_14_of_xu_et_al():
    """Σ_i (1 - Σ_t α_ti)² of each row, without padding of target and source."""
    draw = np.random.default_rng(0)
    weights = draw.random((2, 3, 5)).astype(np.float32)
    weights[1, :, 3:] = 0  # padding of the source
    valid = np.array([[True, True, True], [True, False, False]])
    expected = 0.0
    for row, (words, size) in enumerate([(3, 5), (1, 3)]):
        for i in range(size):
            looks = sum(float(weights[row, t, i]) for t in range(words))
            expected += (1 - looks) ** 2
    found = doubly_stochastic(weights, valid)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
