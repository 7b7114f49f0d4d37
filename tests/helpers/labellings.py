"""Connectionist temporal classification by enumeration (Graves et al. 2006)."""

import itertools
import math
from collections import defaultdict

import numpy as np


def merged(alignment: tuple[int, ...], blank: int) -> tuple[int, ...]:
    """Return the labelling of an alignment (their function B, Section 3.1)."""
    return tuple(i for i, _ in itertools.groupby(alignment) if i != blank)


def probabilities(logits: np.ndarray, blank: int) -> dict[tuple[int, ...], float]:
    """Return P of each labelling, the sum over all V^S alignments, given logits (S, V).

    In float64.
    """
    scores = np.exp(logits.astype(np.float64))
    shares = scores / scores.sum(axis=1, keepdims=True)
    size = logits.shape[1]
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for alignment in itertools.product(range(size), repeat=len(logits)):
        p = math.prod(row[i] for row, i in zip(shares, alignment, strict=True))
        found[merged(alignment, blank)] += p
    return dict(found)
