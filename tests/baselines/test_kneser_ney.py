"""Kneser–Ney smoothing against its equations, written with dictionaries."""

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from transformer_jax.baselines.kneser_ney import FALLBACK, discounts_of, estimate
from transformer_jax.data.ragged import Ragged

BEGIN, END, SIZE = 0, 1, 9


class Brute:
    """Chen and Goodman 1999, Section 2.7 and eq. 17, without arrays."""

    def __init__(self, texts, order, predicted, discounts):
        self.predicted = predicted
        self.order = order
        self.c = {k: Counter() for k in range(1, order + 1)}
        occurrences = {k: Counter() for k in range(1, order + 1)}
        before = defaultdict(set)
        for text in texts:
            for k in range(1, order + 1):
                for i in range(len(text) - k + 1):
                    gram = tuple(text[i : i + k])
                    occurrences[k][gram] += 1
                    if i:
                        before[gram].add(text[i - 1])
        for k in range(1, order + 1):
            for gram, number in occurrences[k].items():
                if k == 1 and gram[0] not in predicted:
                    continue
                highest = k == order or (k > 1 and gram[0] == BEGIN)
                self.c[k][gram] = number if highest else len(before[gram])
        self.d = {k: self.discounts(self.c[k], discounts) for k in self.c}

    @staticmethod
    def discounts(counts, discounts):
        n = Counter(counts.values())
        if discounts == "one":
            if n[1] and n[2]:
                return [n[1] / (n[1] + 2 * n[2])] * 3
            return FALLBACK["one"]
        if not all(n[i] for i in (1, 2, 3, 4)):
            return FALLBACK["modified"]
        y = n[1] / (n[1] + 2 * n[2])
        d = [i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3)]
        good = all(0 < x < i for i, x in enumerate(d, 1))
        return d if good else FALLBACK["modified"]

    def p(self, w, h):
        """P(w | h), h a tuple of up to n - 1 tokens."""
        if w not in self.predicted:
            return 0.0
        k = len(h) + 1
        lower = self.p(w, h[1:]) if h else 1 / len(self.predicted)
        after = {g[-1]: c for g, c in self.c[k].items() if g[:-1] == h}
        total = sum(after.values())
        if not total:
            return lower
        d = self.d[k]
        gamma = sum(d[min(c, 3) - 1] for c in after.values()) / total
        c = after.get(w, 0)
        kept = c - d[min(c, 3) - 1] if c else 0
        return kept / total + gamma * lower


def drawn(seed, count, longest, size=SIZE):
    """Return texts of tokens that are not equally frequent."""
    draw = random.Random(seed)
    ids = range(2, size - 1)  # the last one is never seen
    weights = [1 / (i - 1) for i in ids]
    return [
        [BEGIN, *draw.choices(ids, weights, k=draw.randint(0, longest)), END]
        for _ in range(count)
    ]


TEXTS = {
    "sentences": drawn(1, 60, 9),
    "one text": [[BEGIN, *(t for text in drawn(2, 40, 9) for t in text[1:-1])]],
    "small": [[BEGIN, 2, 3, 2, END], [BEGIN, 2, END]],  # too small for discounts
}


def model_of(texts, order, discounts):
    predicted = np.ones(SIZE, bool)
    predicted[BEGIN] = False
    return estimate(Ragged.of(texts), order, predicted, discounts), {*range(1, SIZE)}


@pytest.mark.parametrize("discounts", ["one", "modified"])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("name", TEXTS)
def test_probabilities_are_those_of_the_equations(name, order, discounts):
    texts = TEXTS[name]
    model, predicted = model_of(texts, order, discounts)
    brute = Brute(texts, order, predicted, discounts)
    others = drawn(4, 12, 12, SIZE + 1)  # with the token that is never seen
    found = model.log_probabilities(Ragged.of(others))
    expected = [
        brute.p(text[i], tuple(text[max(0, i - order + 1) : i]))
        for text in others
        for i in range(len(text))
    ]
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-12)
    assert np.isneginf(found[[0]])  # the begin token is not predicted


@pytest.mark.parametrize("discounts", ["one", "modified"])
@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("name", TEXTS)
def test_probabilities_sum_to_one_after_any_context(name, order, discounts):
    model, _ = model_of(TEXTS[name], order, discounts)
    contexts = [[BEGIN], [2], [2, 3], [SIZE - 1], [3, SIZE - 1, 2, 2], [BEGIN, 2, 3, 2]]
    contexts += [text[1:-1][:4] for text in TEXTS[name][:20] if len(text) > 2]
    for context in contexts:
        rows = Ragged.of([[*context, w] for w in range(SIZE)])
        last = model.log_probabilities(rows)[rows.offsets[1:] - 1]
        assert np.exp(last).sum() == pytest.approx(1, abs=1e-12)
        assert (last[1:] > -math.inf).all()


def test_the_discounts_of_known_counts():
    # n_1 = 8, n_2 = 4, n_3 = 2, n_4 = 1: Y = 1 / 2
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] + [9, 0])
    assert discounts_of(counts, "one", 1).tolist() == [0, 0.5, 0.5, 0.5]
    assert discounts_of(counts, "modified", 1).tolist() == [0, 0.5, 1.25, 2.0]


def test_counts_that_determine_no_discount(caplog):
    caplog.set_level("INFO")
    assert discounts_of(np.array([5, 7]), "one", 3).tolist() == [0, 0.5, 0.5, 0.5]
    assert "order 3" in caplog.text
    assert discounts_of(np.array([1, 2, 3]), "modified", 1).tolist() == [0, 0.5, 1, 1.5]
