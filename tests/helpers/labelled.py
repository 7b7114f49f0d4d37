"""Vectors at positions, and their labels, for tests of losses."""

import numpy as np

D = 4
V = 7


def positions(rows, width, filled, seed=0):
    """Return a table (V, D), x (B, T, D), labels, and weights.

    Padding is anywhere in a row, not only at its end.
    """
    draw = np.random.default_rng(seed)
    x = np.float32(draw.normal(size=(rows, width, D)))
    table = np.float32(draw.normal(size=(V, D)))
    present = draw.random((rows, width)) < filled
    weights = np.float32(present * draw.random((rows, width)))
    return table, x, draw.integers(0, V, (rows, width)), weights
