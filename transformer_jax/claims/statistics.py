"""Verdicts: is a difference between two samples in a given range?

Intervals are those of Welch's t-test (Welch 1947), at 95 %.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats  # a dependency of jax

HOLDS = "holds"
FAILS = "does not hold here"
UNDECIDED = "undecided"
CONFIDENCE = 0.95
MOST_SEEDS = 1000


class Difference(NamedTuple):
    """The difference of two means, or one mean.

    low, high: its 95 % interval, infinite if a sample has one value, or one that is not
        finite.
    effect: the difference in standard deviations (Cohen's d; for one sample, the mean
        divided by the standard deviation).
    p: probability of a difference that is at least as large if the means are equal.
    """

    mean: float
    low: float
    high: float
    effect: float
    p: float


def difference(first: Sequence[float], second: Sequence[float] = ()) -> Difference:
    """Return the difference between the means of two independent samples.

    Without `second`, return the mean of `first`. Samples without any spread give an
    interval of width 0.
    """
    mean, variances = _moments(first, second)
    if not np.isfinite(variances).all():
        return Difference(mean, -math.inf, math.inf, math.nan, math.nan)
    spread = math.sqrt(np.mean(variances))
    if spread == 0:
        effect = math.copysign(math.inf, mean) if mean else 0.0
        return Difference(mean, mean, mean, effect, 0.0 if mean else 1.0)
    half = _half_width(variances, [len(first), len(second)][: len(variances)])
    if second:
        p = stats.ttest_ind(first, second, equal_var=False).pvalue
    else:
        p = stats.ttest_1samp(first, 0.0).pvalue
    return Difference(mean, mean - half, mean + half, mean / spread, float(p))


def verdict(found: Difference, least: float, most: float) -> str:
    """Return HOLDS if the whole interval is from `least` to `most`, FAILS if no part of
    it is, and else UNDECIDED.
    """
    if least <= found.low and found.high <= most:
        return HOLDS
    if found.high < least or found.low > most:
        return FAILS
    return UNDECIDED


def seeds_needed(
    first: Sequence[float], second: Sequence[float], least: float, most: float
) -> int | None:
    """Return how many seeds would decide if means and variances stay as they are.

    Return None if it is more than MOST_SEEDS, or if a sample has only one value, or one
    that is not finite.
    """
    mean, variances = _moments(first, second)
    if not np.isfinite(variances).all():
        return None
    distance = min(abs(mean - least), abs(mean - most))
    for count in range(2, MOST_SEEDS + 1):
        if _half_width(variances, [count] * len(variances)) < distance:
            return count
    return None


def _moments(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float, list[float]]:
    """Return the difference of the means, and the variance of each sample.

    The variance is NaN if a sample has one value, or one that is not finite.
    """
    samples = [sample for sample in (first, second) if len(sample)]
    means = [float(np.mean(sample)) for sample in samples]
    variances = [
        float(np.var(sample, ddof=1))
        if len(sample) > 1 and np.isfinite(sample).all()
        else math.nan
        for sample in samples
    ]
    return (means[0] - means[1] if len(second) else means[0]), variances


def _half_width(variances: Sequence[float], counts: Sequence[int]) -> float:
    """Return half of the width of the interval, by the Welch–Satterthwaite equation."""
    parts = [
        variance / count for variance, count in zip(variances, counts, strict=True)
    ]
    total = sum(parts)
    if total == 0:
        return 0.0
    terms = [part**2 / (count - 1) for part, count in zip(parts, counts, strict=True)]
    freedom = total**2 / sum(terms)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
    return float(quantile * math.sqrt(total))
