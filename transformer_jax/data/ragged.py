"""Rows of unequal length in one flat array: millions of sentences as numbers, without a Python object for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np


class Ragged:
    """Row i is values[offsets[i] : offsets[i + 1]]; lengths are (rows,), offsets (rows + 1,)."""

    def __init__(self, values: np.ndarray, lengths: np.ndarray):
        self.values, self.lengths = values, lengths
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], dtype: np.typing.DTypeLike = np.int32) -> Ragged:
        rows = list(rows)
        values = np.fromiter(itertools.chain.from_iterable(rows), dtype)
        return cls(values, np.fromiter(map(len, rows), np.int32, len(rows)))

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Their rows, one after another."""
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, indices: np.ndarray) -> Ragged:
        """The rows of `indices` ≥ 0, in their order; one may come several times."""
        lengths = self.lengths[indices]
        ends = np.cumsum(lengths, dtype=np.int64)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.offsets[indices] - (ends - lengths), lengths)
        return Ragged(self.values[at], lengths)

    def cut(self, limit: int, end: int) -> Ragged:
        """Rows of at most `limit`: of a longer one the first limit - 1, and `end`."""
        too_long = self.lengths > limit
        if not too_long.any():
            return self
        place = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)
        rows = Ragged(self.values[place < limit], np.minimum(self.lengths, limit))
        rows.values[rows.offsets[1:][too_long] - 1] = end
        return rows
