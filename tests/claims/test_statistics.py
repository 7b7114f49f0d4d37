"""Intervals and verdicts, against closed forms and random samples."""

import math

import numpy as np
import pytest
from scipy import stats

from transformer_jax.claims.statistics import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Difference,
    difference,
    seeds_needed,
    verdict,
)


def test_a_difference_of_two_samples():
    # means 2 and 5, variances 1 and 4
    first, second = [1.0, 2.0, 3.0], [3.0, 5.0, 7.0]
    found = difference(first, second)
    expected = stats.ttest_ind(first, second, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(-3.0)
    assert found.low == pytest.approx(interval.low)
    assert found.high == pytest.approx(interval.high)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.effect == pytest.approx(-3.0 / math.sqrt(2.5))


def test_an_interval_holds_the_difference_in_95_of_100_samples():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        first = generator.normal(1.0, 1.0, 3).tolist()
        second = generator.normal(0.5, 2.0, 4).tolist()
        found = difference(first, second)
        hits += found.low <= 0.5 <= found.high
    assert 0.93 <= hits / 2000 <= 0.98


def test_p_is_below_5_percent_where_the_interval_excludes_zero():
    generator = np.random.default_rng(1)
    seen = set()
    for _ in range(200):
        first = generator.normal(1.0, 1.0, 4).tolist()
        second = generator.normal(0.0, 1.0, 5).tolist()
        for found in (difference(first, second), difference(first)):
            excludes = found.low > 0 or found.high < 0
            assert (found.p < 0.05) == excludes
            seen.add(excludes)
    assert seen == {True, False}


def test_one_sample_gives_the_interval_of_its_mean():
    # standard error 1 / √3, quantile of 2 degrees of freedom 4.3027
    found = difference([1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0 + 4.3027 / math.sqrt(3), rel=1e-4)


def test_samples_without_spread_have_an_interval_of_one_point():
    assert difference([2.0, 2.0], [1.0, 1.0]) == (1.0, 1.0, 1.0, math.inf, 0.0)
    assert difference([1.0, 1.0], [1.0, 1.0]) == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_one_value_decides_nothing():
    found = difference([2.0], [1.0, 1.5])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert verdict(found, 0.0, math.inf) == UNDECIDED
    assert seeds_needed([2.0], [1.0, 1.5], 0.0, math.inf) is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 0.9, HOLDS),
        (0.0, 1.0, HOLDS),
        (-0.1, 0.5, UNDECIDED),
        (0.5, 1.1, UNDECIDED),
        (-0.5, -0.1, FAILS),
        (1.1, 1.2, FAILS),
        (-5.0, 5.0, UNDECIDED),
    ],
)
def test_the_verdict_of_an_interval(low, high, expected):
    found = Difference((low + high) / 2, low, high, 1.0, 0.5)
    assert verdict(found, 0.0, 1.0) == expected


def test_a_value_that_is_not_finite_decides_nothing():
    found = difference([1.0, math.inf], [1.0, 1.5])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert seeds_needed([1.0, math.nan], [1.0, 1.5], 0.0, math.inf) is None


def test_the_number_of_seeds_that_would_decide():
    first, second = [1.0, 2.0, 3.0], [0.5, 1.0, 3.0]
    count = seeds_needed(first, second, 0.0, math.inf)
    assert count is not None
    # samples of this size with the same means and variances
    for size, decides in ((count, True), (count - 1, False)):
        spread = np.linspace(-1, 1, size)
        samples = [
            np.mean(sample) + spread / np.std(spread, ddof=1) * np.std(sample, ddof=1)
            for sample in (first, second)
        ]
        found = difference(*[sample.tolist() for sample in samples])
        assert (verdict(found, 0.0, math.inf) == HOLDS) == decides


def test_no_number_of_seeds_decides_at_the_border():
    assert seeds_needed([1.0, 2.0], [0.0, 1.0], 1.0, math.inf) is None
