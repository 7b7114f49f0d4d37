"""Claims that cannot be tested are refused when they are written."""

import pytest

from transformer_jax.claims.claim import Claim, Computed, Expected
from transformer_jax.errors import UserError


def claim(*rules):
    conditions = {"a": Computed(lambda seed, quick: {"x": 1.0})}
    return Claim("A is one", "nobody", conditions, rules, "seconds")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((), "'A is one' has no rule"),
        ((Expected("x", "b", least=0),), "names 'b': choose from the conditions a"),
        ((Expected("x", "a", minus="c", least=0),), "names 'c'"),
        ((Expected("x", "a", least=0, paired=True),), "has one condition"),
        ((Expected("x", "a"),), "cannot fail: set `least` or `most`"),
        ((Expected("x", "a", least=2, most=1),), "cannot be met"),
    ],
)
def test_a_claim_that_cannot_be_tested(rules, message):
    with pytest.raises(UserError, match=message):
        claim(*rules)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Expected("bleu", "a", minus="b", least=0.5), "bleu: a − b ≥ 0.5"),
        (Expected("loss", "a", most=2), "loss: a ≤ 2"),
        (Expected("x", "a", "b", -1, 1), "x: a − b from -1 to 1"),
    ],
)
def test_the_words_of_a_rule(rule, words):
    assert rule.words == words
