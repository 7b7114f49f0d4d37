"""Ragged arrays: rows of unequal length, stored in one array without a Python object
per row.

An entry of a row is a number, or an array, e.g. a vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Windows(NamedTuple):
    """Parts of rows. Window w is the values starts[w] to stops[w] - 1 of row
    owners[w].
    """

    owners: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def over(cls, lengths: np.ndarray, rooms: np.ndarray, stride: int) -> Windows:
        """Cover each row of `lengths` (n,) by windows of `rooms` (n,) values, which
        start `stride` values apart.

        The last window of a row ends with it. An empty row has one empty window.
        """
        # the first one, and one for every `stride` values beyond it that are begun
        counts = 1 - np.minimum(rooms - lengths, 0) // stride
        owners = np.repeat(np.arange(len(lengths)), counts)
        starts = stride * ranges(0, counts)
        stops = np.minimum(starts + rooms[owners], lengths[owners])
        return cls(owners, starts, stops)

    @property
    def lengths(self) -> np.ndarray:
        """Number of values of each window."""
        return self.stops - self.starts

    def take(self, indices: np.ndarray) -> Windows:
        """Return the windows at `indices`, in this order."""
        return Windows(*(values[indices] for values in self))

    def shifted(self, by: int) -> Windows:
        """Return the windows that start and stop `by` values later."""
        return Windows(self.owners, self.starts + by, self.stops + by)


def ranges(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """Return `lengths[i]` successive integers from `starts[i]`, for one i after
    another.

    `starts` may be one number.
    """
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


class Shared:
    """The rows of a `Ragged`, each of which `times` adjacent examples have."""

    def __init__(self, rows: Ragged, times: int):
        self._rows = rows
        self._times = times
        self.values = rows.values
        self.lengths = np.repeat(rows.lengths, times)

    def take(self, indices: np.ndarray) -> Ragged:
        """Return the rows of the examples at `indices`, see `Ragged.take`."""
        return self._rows.take(indices // self._times)


class Grouped(NamedTuple):
    """The rows of a `Ragged`, of which each example has `size` adjacent ones."""

    rows: Ragged
    size: int

    @property
    def lengths(self) -> np.ndarray:
        """The length of the longest row of each example."""
        return self.rows.lengths.reshape(-1, self.size).max(axis=1)


class Ragged:
    """Rows of unequal length. Row i is `values[offsets[i] : offsets[i + 1]]`.

    Attributes:
        values: (total, …) the entries of the rows, one row after another.
        lengths: (rows,) length of each row.
        offsets: (rows + 1,) start of each row in `values`, and the end of the last one.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray):
        self.values = values
        self.lengths = lengths
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @classmethod
    def of(
        cls, rows: Iterable[Sequence[int]], dtype: np.typing.DTypeLike = np.int32
    ) -> Ragged:
        """Return the rows of a list of sequences."""
        rows = list(rows)
        values = np.fromiter(itertools.chain.from_iterable(rows), dtype)
        return cls(values, np.fromiter(map(len, rows), np.int32, len(rows)))

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate: the rows of all parts, one part after another."""
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )

    @classmethod
    def repeated(cls, value: int, count: int) -> Ragged:
        """Return `count` rows that hold only `value`."""
        return cls(np.full(count, value, np.int32), np.ones(count, np.int32))

    @classmethod
    def beside(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate row by row: row i is row i of each part, one after another."""
        lengths = sum((part.lengths for part in parts[1:]), parts[0].lengths)
        dtype = np.result_type(*(part.values for part in parts))
        values = np.empty(lengths.sum(), dtype)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        for part in parts:
            values[ranges(starts, part.lengths)] = part.values
            starts = starts + part.lengths
        return cls(values, lengths)

    def first(self, counts: np.ndarray | int) -> Ragged:
        """Return the first counts[i] values of each row i, or all of a shorter row.

        `counts` may be one number.
        """
        lengths = np.minimum(self.lengths, counts)
        is_first = ranges(0, self.lengths) < np.repeat(lengths, self.lengths)
        return Ragged(self.values[is_first], lengths)

    def _last(self, count: int) -> Ragged:
        """Return the last `count` values of each row, or all of a shorter row."""
        is_last = ranges(-self.lengths, self.lengths) >= -count
        return Ragged(self.values[is_last], np.minimum(self.lengths, count))

    def framed(self, begin: int | None = None, end: int | None = None) -> Ragged:
        """Put `begin` before each row and `end` after it, unless they are None."""
        rows = self
        if end is not None:
            rows = rows._inserted(end, rows.offsets[1:])
        if begin is not None:
            rows = rows._inserted(begin, rows.offsets[:-1])
        return rows

    def _inserted(self, value: int, offsets: np.ndarray) -> Ragged:
        """Return the rows with one more value each, at `offsets` in `values`."""
        values = np.insert(self.values, offsets, value)
        return Ragged(values, self.lengths + np.int32(1))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, indices: np.ndarray) -> Ragged:
        """Return the rows at `indices` ≥ 0, in this order.

        An index may occur several times.
        """
        lengths = self.lengths[indices]
        sources = ranges(self.offsets[indices], lengths)
        return Ragged(self.values[sources], lengths)

    def parts(self, windows: Windows) -> Ragged:
        """Return the values of each window."""
        lengths = windows.lengths
        starts = self.offsets[windows.owners] + windows.starts
        sources = ranges(starts, lengths)
        return Ragged(self.values[sources], lengths)

    def cut(
        self, limit: int, begin: bool = False, end: int = 1, tail: bool = False
    ) -> Ragged:
        """Return the rows, truncated to at most `limit` values.

        A truncated row keeps its first values. The last `end` of these are replaced by
        the last values of the full row, e.g. the end-of-sequence id. With `tail`, it
        keeps its last values. With `begin`, the first of these is replaced by the first
        value of the full row.
        """
        too_long = np.flatnonzero(self.lengths > limit)
        if not len(too_long):
            return self
        if tail:
            rows = self._last(limit)
            if begin:
                firsts = self.values[self.offsets[too_long]]
                rows.values[rows.offsets[too_long]] = firsts
            return rows
        rows = self.first(limit)
        for i in range(1, end + 1):
            lasts = self.values[self.offsets[too_long + 1] - i]
            rows.values[rows.offsets[too_long + 1] - i] = lasts
        return rows
