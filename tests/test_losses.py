"""Cross-entropy against the explicit distribution; BLEU computable by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from transformer_jax.losses import cross_entropy
from transformer_jax.metrics import bleu, exact_match

B, T, V = 3, 5, 7


def some_logits(padded=V):
    """(B, T, padded), the padding as the model gives it."""
    logits = np.full((B, T, padded), np.finfo(np.float32).min, np.float32)
    logits[..., :V] = 3 * np.random.default_rng(0).normal(size=(B, T, V))
    return logits


LABELS = np.random.default_rng(1).integers(0, V, (B, T))
WEIGHTS = {
    "ones": np.ones((B, T), np.float32),
    "bool": np.arange(T) < np.array([5, 2, 0])[:, None],
    "any": np.float32(np.random.default_rng(2).random((B, T))),
}


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("padded", [7, 16])
def test_cross_entropy_is_that_of_the_explicit_distribution(label_smoothing, weights, padded):
    weights, logits = WEIGHTS[weights], some_logits(padded)
    total, weight = cross_entropy(logits, LABELS, weights, vocab_size=V, label_smoothing=label_smoothing)
    expected, expected_weight = oracle.cross_entropy(logits[..., :V], LABELS, weights, label_smoothing)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(weight, expected_weight, rtol=1e-6)
    assert total.dtype == weight.dtype == jnp.float32


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padded", [7, 16])
def test_its_gradient_is_p_minus_q(label_smoothing, padded):
    logits, weights = some_logits(padded), WEIGHTS["any"] * WEIGHTS["bool"]

    def total(logits):
        return cross_entropy(logits, LABELS, weights, vocab_size=V, label_smoothing=label_smoothing)[0]

    gradient = np.asarray(jax.grad(total)(logits))
    p, q = oracle.softmax(np.float64(logits[..., :V])), oracle.smoothed(LABELS, V, label_smoothing)
    assert oracle.relative(gradient[..., :V], weights[..., None] * (p - q)) <= 1e-5
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-6)
    assert (gradient[..., V:] == 0).all()
    assert (gradient[weights == 0] == 0).all()


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    total, weight = cross_entropy(jnp.zeros((B, T, V)), LABELS, WEIGHTS["ones"], vocab_size=V, label_smoothing=0.1)
    np.testing.assert_allclose(total / weight, np.log(V), rtol=1e-6)


def test_smoothing_makes_certainty_costly():
    """With p = onehot(label) nothing is lost without smoothing; with it, at best the entropy of q."""
    sure = 20 * np.float32(np.eye(V)[LABELS])
    q = oracle.smoothed(LABELS, V, 0.1)
    costs = {}
    for name, logits in {"sure": sure, "best": np.float32(np.log(q))}.items():
        for label_smoothing in (0.0, 0.1):
            total, weight = cross_entropy(
                logits, LABELS, WEIGHTS["ones"], vocab_size=V, label_smoothing=label_smoothing
            )
            costs[name, label_smoothing] = float(total / weight)
    assert costs["sure", 0.0] < 1e-6 < costs["best", 0.0]
    assert costs["best", 0.1] < costs["sure", 0.1]
    np.testing.assert_allclose(costs["best", 0.1], -(q * np.log(q)).sum(axis=-1).mean(), rtol=1e-5)


def test_sums_of_parts_add_up():
    logits, weights = some_logits(16), WEIGHTS["any"]
    whole = cross_entropy(logits, LABELS, weights, vocab_size=V, label_smoothing=0.1)
    parts = [
        cross_entropy(logits[b : b + 1], LABELS[b : b + 1], weights[b : b + 1], vocab_size=V, label_smoothing=0.1)
        for b in range(B)
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-5)


SENTENCES = ["The cat sat on the mat .", "It is raining again today ."]


def test_bleu_of_the_references_is_100():
    scores = bleu(SENTENCES, SENTENCES)
    np.testing.assert_allclose((scores["bleu"], scores["bleu_tokenized"]), 100)
    assert "tok:13a" in scores["bleu_signature"]
    assert "case:mixed" in scores["bleu_signature"]


@pytest.mark.parametrize(
    ("hypotheses", "references", "expected"),
    [
        # precisions 5/6, 3/5, 2/4, 1/3: the second "the" finds no partner
        (["the cat sat on the mat"], ["the cat sat on a mat"], 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        # a prefix: precisions 1, brevity exp(1 - 5/4)
        (["a b c d"], ["a b c d e"], 100 * np.exp(1 - 5 / 4)),
        # counts are summed over the corpus before they are divided: 9/10, 6/8, 3/6, 2/4
        (["a b c d e", "a b c d e"], ["a b c d e", "a b x d e"], 100 * (9 / 10 * 6 / 8 * 3 / 6 * 2 / 4) ** 0.25),
    ],
)
def test_bleu_by_hand(hypotheses, references, expected):
    scores = bleu(hypotheses, references)
    np.testing.assert_allclose((scores["bleu"], scores["bleu_tokenized"]), expected, rtol=1e-6)


def test_the_tokenized_reading_is_lower_cased_and_takes_tokens_as_given():
    lowered = bleu([line.lower() for line in SENTENCES], SENTENCES)
    assert lowered["bleu"] < 90
    np.testing.assert_allclose(lowered["bleu_tokenized"], 100)
    detached = bleu([line.replace(" .", ".") for line in SENTENCES], SENTENCES)
    np.testing.assert_allclose(detached["bleu"], 100)
    assert detached["bleu_tokenized"] < 90


def test_exact_match():
    assert exact_match(["a", "b", "c", ""], ["a", "x", "c ", ""]) == 0.5
    with pytest.raises(ValueError, match="argument 2 is longer"):
        exact_match(["a"], ["a", "b"])
