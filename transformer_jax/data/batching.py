"""The batch plan: which examples form batch i, and which of a few fixed shapes it has; padding; prefetching.

It follows from the lengths alone, so every host knows every batch, and batch i is the same after a restart,
on any number of hosts and devices. `k` is the number of streams (2 in translation: source and target).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from transformer_jax.data.ragged import Ragged

Item = TypeVar("Item")

MAX_WIDTHS = 1024  # buckets end at any length up to this, and at multiples where examples are longer


class Batch(NamedTuple):
    """One batch of the plan."""

    indices: np.ndarray  # (rows,) int64: which example each row holds; -1: a filler row
    shape: tuple[int, ...]  # (k,): the padded length of each stream


class BatchPlan:
    """Puts examples of like lengths together: batch i from lengths, seed and epoch alone.

    Each bucket has one shape: as many rows as `tokens` positions of the widest stream allow. The buckets are
    those, at most `max_shapes`, that pad least in an epoch, filler rows counted. Each kept one appears once
    in it. With a seed, examples are shuffled in buckets and batches among each other, anew each epoch;
    without (evaluation), every epoch goes through the buckets in turn, examples in the order given.

    Args:
        lengths: (n, k) positions of each example in each stream.
        max_lengths: (k,) examples longer in any stream are dropped; None keeps all, as evaluation must.
        tokens: budget of padded positions, rows × length, of a batch's widest stream.
        rows_multiple: the rows of every batch are a multiple of it.

    Attributes:
        shapes: [(rows, length of stream 0, …)], a bucket each, narrowest first.
        kept: (m,) indices of the examples not dropped; dropped: how many were.
        fill: (k,) for each stream, the share of an epoch's padded positions that hold something.

    Raises:
        ValueError: nothing to batch, or `rows_multiple` rows of the longest example exceed the budget.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        max_lengths: Sequence[int] | None,
        tokens: int,
        max_shapes: int = 8,
        rows_multiple: int = 1,
        seed: int | None,
    ):
        lengths = np.asarray(lengths)
        if lengths.ndim != 2 or not lengths.size:
            raise ValueError(f"lengths have shape {lengths.shape}: must be (examples, streams), neither 0.")
        limits = np.inf if max_lengths is None else np.asarray(max_lengths)
        kept = np.flatnonzero((lengths <= limits).all(axis=1))
        if not len(kept):
            raise ValueError(f"All {len(lengths)} examples exceed max_lengths={max_lengths}: raise them.")
        # An empty example takes one position, since nothing can be computed on arrays of length 0.
        width = np.maximum(lengths[kept].max(axis=1), 1)
        step = -(-width.max() // MAX_WIDTHS)  # the search for buckets takes memory by the square of the widths
        widths, kind = np.unique(np.minimum(-(-width // step) * step, width.max()), return_inverse=True)
        if tokens < (least := widths[-1] * rows_multiple):
            what = f"{rows_multiple} row(s) of the longest example, {widths[-1]} tokens"
            raise ValueError(f"data.batch_tokens={tokens} is too small for {what}: set {least} or more.")
        tops = np.ones((len(widths), lengths.shape[1]), np.int64)  # longest in each stream, for each width
        for stream, top in enumerate(tops.T):
            np.maximum.at(top, kind, lengths[kept, stream])
        rows = tokens // widths // rows_multiple * rows_multiple
        ends = _bucket_ends(np.bincount(kind), tops, rows, max_shapes)
        heights = np.maximum.reduceat(tops, np.concatenate([[0], ends[:-1]]))
        shapes = np.column_stack([rows[ends - 1], heights])
        self._arrange(lengths, kept, np.searchsorted(ends, kind, side="right"), shapes, seed)

    @classmethod
    def ladder(cls, lengths: np.ndarray, boundaries: Sequence[int], rows: int) -> BatchPlan:
        """A plan for prediction: shapes (rows, boundary) fixed beforehand, one stream, bucket after bucket.

        The bucket of an example depends on its own length alone, its row on its place among those before it.
        `lengths` is (n,), `boundaries` ascending; buckets without examples are left out of `shapes`.

        Raises:
            ValueError: nothing to batch, or an example beyond the last boundary.
        """
        lengths = np.asarray(lengths)
        if not lengths.size:
            raise ValueError("There are no examples: a plan needs at least 1.")
        if (longest := lengths.max()) > (last := boundaries[-1]):
            raise ValueError(f"Example {lengths.argmax()} has {longest} tokens, the limit is {last}: cut it.")
        used, bucket = np.unique(np.searchsorted(boundaries, lengths), return_inverse=True)
        shapes = np.array([(rows, boundaries[i]) for i in used])
        plan = cls.__new__(cls)
        plan._arrange(lengths[:, None], np.arange(len(lengths)), bucket, shapes, None)
        return plan

    def _arrange(
        self, lengths: np.ndarray, kept: np.ndarray, bucket: np.ndarray, shapes: np.ndarray, seed: int | None
    ) -> None:
        """Lays out an epoch, given the bucket (m,) of each kept example and the shapes (buckets, 1 + k)."""
        self.kept, self.dropped, self._seed = kept, len(lengths) - len(kept), seed
        self.shapes: list[tuple[int, ...]] = [tuple(shape) for shape in shapes.tolist()]
        self._bucket = bucket.astype(np.int16)  # numpy sorts 16 bits in linear time
        rows, counts = shapes[:, 0], np.bincount(bucket)
        batches, ends = -(-counts // rows), np.cumsum(counts)
        self._batch_bucket = of = np.repeat(np.arange(len(shapes)), batches)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(batches) - batches, batches)  # within its bucket
        self._starts = (ends - counts)[of] + nth * rows[of]
        self._stops = np.minimum(self._starts + rows[of], ends[of])
        self.fill = tuple((lengths[kept].sum(axis=0) / ((batches * rows) @ shapes[:, 1:])).tolist())
        self._latest: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:  # batches in an epoch: the same in every epoch
        return len(self._starts)

    def batch(self, i: int) -> Batch:
        """Batch i ≥ 0 counted over all epochs; it belongs to epoch i // len(self).

        Raises:
            ValueError: i is negative.
        """
        if i < 0:
            raise ValueError(f"There is no batch {i}: batches are counted from 0 over all epochs.")
        epoch, position = divmod(i, len(self))
        examples, order = self._order(0 if self._seed is None else epoch)
        which = order[position]
        rows, *shape = self.shapes[self._batch_bucket[which]]
        chosen = examples[self._starts[which] : self._stops[which]]
        return Batch(np.pad(chosen, (0, rows - len(chosen)), constant_values=-1), tuple(shape))

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Kept examples, bucket after bucket, and the order of the batches; remembers the latest epoch."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            examples, batches = np.arange(len(self.kept)), np.arange(len(self))
            if self._seed is not None:
                generator = np.random.default_rng((self._seed, epoch))
                examples, batches = generator.permutation(examples), generator.permutation(batches)
            examples = examples[np.argsort(self._bucket[examples], kind="stable")]
            latest = self._latest = epoch, self.kept[examples], batches
        return latest[1], latest[2]


def _bucket_ends(counts: np.ndarray, tops: np.ndarray, rows: np.ndarray, max_shapes: int) -> np.ndarray:
    """Ends of the buckets, ascending: the w widths cut in at most `max_shapes` by dynamic programming.

    Of each width: `counts` (w,) examples, their longest in each stream `tops` (w, k), `rows` (w,) of a batch.
    """
    w, before = len(counts), np.cumsum(counts) - counts
    cost = np.full((w + 1, w + 1), np.inf)  # [i, j]: padded positions of one bucket of widths i … j-1
    for j in range(1, w + 1):
        batches = -(-(before[j - 1] + counts[j - 1] - before[:j]) // rows[j - 1])
        cost[:j, j] = batches * rows[j - 1] * np.maximum.accumulate(tops[:j][::-1])[::-1].sum(axis=1)
    best = cost[0]  # best[j]: of the first j widths, in the buckets allowed so far
    cuts = [np.zeros(w + 1, np.int64)]
    for _ in range(max_shapes - 1):
        total = best[:, None] + cost
        total[0] = cost[0]
        cuts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    ends = [w]
    while (start := cuts.pop()[ends[-1]]) > 0:
        ends.append(start)
    return np.array(ends[::-1])


def pad(rows: Ragged, indices: np.ndarray, length: int, pad_id: int) -> np.ndarray:
    """(len(indices), length) int32: rows[i] for each index, padded on the right; all padding where i is -1.

    Raises:
        ValueError: a row is longer than `length`.
    """
    filled = indices >= 0
    which = indices[filled]
    found = rows.take(which)
    if len(which) and (longest := found.lengths.max()) > length:
        example = which[found.lengths.argmax()]
        raise ValueError(f"Example {example} has {longest} tokens, its batch {length}: cut it before.")
    lengths = np.zeros(len(indices), np.int64)
    lengths[filled] = found.lengths
    padded = np.full((len(indices), length), pad_id, np.int32)
    padded[np.arange(length) < lengths[:, None]] = found.values
    return padded


def prefetch(iterator: Iterator[Item], size: int = 2) -> Generator[Item]:
    """Yields the items in order, computed up to `size` ahead by a background thread that starts at first use.

    An exception of the iterator is raised at the item's place; closing the generator ends the thread.
    """
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(size))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
