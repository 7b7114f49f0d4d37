"""Batch plans for running text: windows of one text, or windows of many documents
packed into rows.

Every row has the same length, so the training step is compiled once.
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from typing import Generic, TypeVar

import numpy as np

from transformer_jax.data.batching import Batch, Plan, filled_up
from transformer_jax.data.ragged import Ragged, Windows
from transformer_jax.errors import UserError

Contents = TypeVar("Contents")


class RowPlan(Plan, Generic[Contents]):
    """Plan whose rows hold one or more windows of documents.

    `batch(i).indices` are numbers of rows.

    Attributes:
        count: number of rows per epoch, without filler rows.
        fill: fraction of the positions in these rows that are filled.
    """

    def __init__(
        self, count: int, length: int, rows: int, seed: int | None, fill: float = 1.0
    ):
        self.count = count
        self.shapes = [(rows, length)]
        self.fill = fill
        self._seed = seed
        self._latest: tuple[int, np.ndarray, Contents] | None = None

    def __len__(self) -> int:
        return -(-self.count // self.shapes[0][0])

    def _contents(
        self, epoch: int, position: int
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        ((rows, length),) = self.shapes
        order, _ = self._epoch(epoch)
        indices = order[position * rows : (position + 1) * rows]
        return filled_up(indices, rows), (length,)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, Contents]:
        """Return the order of the rows, and what they hold. The latest epoch is
        cached.
        """
        epoch = 0 if self._seed is None else epoch
        latest = self._latest
        if latest is None or latest[0] != epoch:
            generator = np.random.default_rng((self._seed or 0, epoch))
            order, contents = self._draw(generator)
            latest = (epoch, order, contents)
            self._latest = latest
        _, order, contents = latest
        return order, contents

    @abstractmethod
    def _draw(self, generator: np.random.Generator) -> tuple[np.ndarray, Contents]:
        """Return the order of the rows in an epoch, and what they hold."""

    @abstractmethod
    def windows(self, batch: Batch) -> tuple[Windows, np.ndarray]:
        """Return the windows in the rows of a batch, one row after another, and
        their number in each row.
        """


class WindowPlan(RowPlan[int]):
    """Plan for training that cuts one text of `positions` tokens into full windows of
    `length`, one per row.

    Each epoch starts at an offset drawn from [0, length) and shuffles its windows. It
    leaves out other positions than the epochs before: fewer than `length` before the
    first window, and fewer than 2 · `length` in total.

    Args:
        positions: length of the text.
        length: length of a window.
        rows: number of rows of every batch.
        seed: seed for the offsets and for shuffling.

    Raises:
        ValueError: the text is too short for a window.
    """

    def __init__(self, positions: int, length: int, rows: int, seed: int):
        if positions < length:
            raise UserError(
                f"{positions} positions are too few for a window of {length}: "
                "choose shorter windows."
            )
        self._positions = positions
        self._length = length
        # the same at every offset
        count = max(1, (positions - length + 1) // length)
        super().__init__(count, length, rows, seed)

    def _draw(self, generator: np.random.Generator) -> tuple[np.ndarray, int]:
        """Return the order of the windows, and the offset of the first one."""
        free = self._positions - self.count * self._length
        offset = int(generator.integers(min(self._length, free + 1)))
        return generator.permutation(self.count), offset

    def windows(self, batch: Batch) -> tuple[Windows, np.ndarray]:
        _, offset = self._epoch(batch.number // len(self))
        is_filled = batch.indices >= 0
        starts = offset + batch.indices[is_filled] * self._length
        owners = np.zeros_like(starts)
        windows = Windows(owners, starts, starts + self._length)
        return windows, is_filled.astype(np.int32)


class PackedPlan(RowPlan[Ragged]):
    """Plan that packs windows of documents into rows of `length` positions, by
    `best_fit_decreasing`.

    The packing depends on the lengths of the windows only. With a seed (training), each
    epoch draws which windows of equal length take each other's places, and shuffles the
    rows. Without one (evaluation), every epoch is the same.

    Source: Krell et al. 2021, "Efficient sequence packing without cross-contamination",
    who also pack by the histogram of the lengths.

    Args:
        windows: windows of 1 to `length` tokens.
        length: length of a row.
        rows: number of rows of every batch.
        seed: seed for shuffling, or None.
    """

    def __init__(self, windows: Windows, length: int, rows: int, seed: int | None):
        self._windows = windows
        lengths = windows.lengths
        # NumPy sorts small integers in linear time
        self._key = (length - lengths).astype(np.min_scalar_type(length))
        row_of = best_fit_decreasing(np.bincount(lengths, minlength=length + 1))
        self._by_row = np.argsort(row_of, kind="stable")
        self._sizes = np.bincount(row_of)
        count = len(self._sizes)
        fill = float(lengths.sum() / (count * length))
        super().__init__(count, length, rows, seed, fill=fill)

    def _draw(self, generator: np.random.Generator) -> tuple[np.ndarray, Ragged]:
        """Return the order of the rows, and the windows in each row."""
        windows = np.arange(len(self._key))
        rows = np.arange(self.count)
        if self._seed is not None:
            windows = generator.permutation(windows)
            rows = generator.permutation(rows)
        by_length = np.argsort(self._key[windows], kind="stable")
        longest_first = windows[by_length]
        return rows, Ragged(longest_first[self._by_row], self._sizes)

    def windows(self, batch: Batch) -> tuple[Windows, np.ndarray]:
        _, contents = self._epoch(batch.number // len(self))
        is_filled = batch.indices >= 0
        rows = contents.take(batch.indices[is_filled])
        counts = np.zeros(len(batch.indices), np.int32)
        counts[is_filled] = rows.lengths
        return self._windows.take(rows.values), counts


def best_fit_decreasing(counts: np.ndarray) -> np.ndarray:
    """Pack items into rows of R positions: the longest first, each into the fullest row
    that has room for it.

    Source: Johnson et al. 1974, "Worst-case performance bounds for simple
    one-dimensional packing algorithms". Items of equal length are placed together, so
    the time depends on the number of different lengths.

    Args:
        counts: (R + 1,) number of items of each length.

    Returns:
        The row (items,) of each item, in the order of descending length.
    """
    room = len(counts) - 1
    opened = 0
    placed = [np.zeros(0, np.int64)]
    free: dict[int, np.ndarray] = {}  # the rows that have this much room left
    sizes: list[int] = []  # the keys of `free`, ascending

    def put(size: int, rows: np.ndarray) -> None:
        if not size or not len(rows):
            return
        if size in free:
            free[size] = np.concatenate([free[size], rows])
        else:
            bisect.insort(sizes, size)
            free[size] = rows

    for length in range(room, 0, -1):
        left = int(counts[length])
        while left:
            tightest = bisect.bisect_left(sizes, length)
            if tightest < len(sizes):
                size = sizes.pop(tightest)
                rows = free.pop(size)
            else:
                size = room
                needed = -(-left // (room // length))
                rows = opened + np.arange(needed)
                opened += needed
            each = size // length
            items = np.repeat(rows, each)[:left]
            full, rest = divmod(len(items), each)
            put(size - each * length, rows[:full])
            put(size - rest * length, rows[full : full + 1])
            put(size, rows[full + 1 :])
            placed.append(items)
            left -= len(items)
    return np.concatenate(placed)
