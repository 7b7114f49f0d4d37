"""Metrics computable by hand."""

import math

import numpy as np
import pytest

from transformer_jax.metrics import bleu, exact_match, loss_and_perplexity

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


def test_perplexity_is_the_exponential_of_the_loss():
    assert loss_and_perplexity({"loss": math.log(7), "accuracy": 0.5}) == pytest.approx(
        {"loss": math.log(7), "perplexity": 7.0}
    )
    assert loss_and_perplexity({}) == {}


def test_the_perplexity_of_a_huge_loss_is_finite():
    scores = loss_and_perplexity({"loss": 1e6})
    assert scores["loss"] == 1e6
    assert scores["perplexity"] == math.exp(700)
