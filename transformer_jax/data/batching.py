"""Group the examples of a split into batches, pad them, and prefetch them.

A plan determines which examples form batch i and what shape it has. It depends only on
the lengths of the examples, the seed and the epoch. So every host can compute every
batch, and batch i is the same after a restart and on any number of hosts and devices.

`k` is the number of streams, e.g. 2 in translation: source and target.
"""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from transformer_jax.data.columns import ArrayRecords, WithSources
from transformer_jax.data.ragged import Grouped, Ragged, Shared, ranges
from transformer_jax.errors import UserError

Item = TypeVar("Item")
Arrays = dict[str, np.ndarray]

# most lengths at which a bucket may end; beyond it, lengths are rounded up to multiples
# of a step
MAX_WIDTHS = 1024


class Batch(NamedTuple):
    """One batch of a plan."""

    number: int  # counted from 0 over all epochs
    indices: np.ndarray  # (rows,) int64: the example in each row; -1 in filler rows
    shape: tuple[int, ...]  # (k,) padded length of each stream


class Plan(ABC):
    """Mapping from batch numbers to batches.

    Attributes:
        shapes: [(rows, length of stream 0, …)], every shape that a batch can have.
    """

    shapes: list[tuple[int, ...]]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per epoch, which is the same in every epoch."""

    def batch(self, i: int) -> Batch:
        """Return batch i ≥ 0, counted over all epochs.

        It belongs to epoch i // len(self).

        Raises:
            ValueError: i is negative.
        """
        if i < 0:
            raise UserError(
                f"There is no batch {i}: batches are counted from 0 over all epochs."
            )
        return Batch(i, *self._contents(*divmod(i, len(self))))

    @abstractmethod
    def _contents(
        self, epoch: int, position: int
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the indices and the shape of the batch at `position` in `epoch`."""


class Batches(NamedTuple):
    """The batches of a split: a plan, and a function that loads the arrays of one
    batch (first axis: rows).
    """

    plan: Plan
    load: Callable[[Batch], Arrays]
    records: Sequence[Any] = ()  # the inputs of the examples, in order
    references: Sequence[Any] = ()  # the outputs that predictions are scored against
    # For examples of several rows, e.g. windows of a long text: the example of each
    # row, ascending, and a function from the number of an example and the predictions
    # of its rows to its prediction.
    owners: np.ndarray | None = None
    join: Callable[[int, Sequence[dict[str, Any]]], dict[str, Any]] | None = None
    # In training, a function that returns the entropy of the targets, e.g. tokens or
    # labels, in nats: the loss of a model that knows only how frequent each target is.
    baseline: Callable[[], float] | None = None
    # the length of each record in positions, if it is no text
    lengths: np.ndarray | None = None

    def sha256(self) -> str:
        """Return the SHA-256 of the records and the references.

        It is that of their JSON. Records of arrays are hashed as bytes, see
        `ArrayRecords`. Sources beside the references do not count, since records have
        them.
        """
        digest = hashlib.sha256(b"[")
        for block in _blocks(self.records):
            digest.update(block)
        digest.update(b", ")
        for block in _blocks(self.references):
            digest.update(block)
        digest.update(b"]")
        return digest.hexdigest()


def _blocks(values: Sequence[Any]) -> Iterator[bytes]:
    """Yield the bytes of records, or the JSON of a list, an entry at a time."""
    if isinstance(values, ArrayRecords):
        yield from values.blocks()
        return
    if isinstance(values, WithSources):
        values = values.references
    # a task may have other objects, e.g. of NumPy
    encoder = json.JSONEncoder(sort_keys=True, default=repr)
    yield b"["
    separator = ""
    for value in values:
        yield f"{separator}{encoder.encode(value)}".encode()
        separator = ", "
    yield b"]"


def entropy(values: np.ndarray) -> float:
    """Return the entropy of the distribution of integers ≥ 0, in nats."""
    counts = np.zeros(int(values.max(initial=0)) + 1, np.int64)
    # bincount makes a copy of 8 bytes for each
    for start in range(0, len(values), 2**24):
        block = values[start : start + 2**24]
        counts += np.bincount(block, minlength=len(counts))
    shares = counts[counts > 0] / max(len(values), 1)
    return float(-(shares * np.log(shares)).sum())


def label_entropy(labels: np.ndarray | None) -> Callable[[], float] | None:
    """Return a function that returns the entropy of labels (n,), for `Batches`.

    Return None if there are no labels, or if they are real numbers.
    """
    if labels is None or labels.dtype.kind != "i":
        return None
    return functools.partial(entropy, labels)


class BatchPlan(Plan):
    """Plan that groups examples of similar length into buckets.

    Every kept example occurs once per epoch.

    All batches of a bucket have the same shape, with as many rows as `tokens` positions
    of the widest stream allow. The plan chooses the division into at most `max_buckets`
    buckets that has the least padding per epoch, including filler rows. A stream whose
    lengths are all equal, e.g. of images, does not tell examples apart.

    With a seed (training), each epoch shuffles the examples within their buckets, and
    then the batches. Without one (evaluation), every epoch takes the buckets in order
    and keeps the given order of examples within a bucket.

    Args:
        lengths: (n, k) positions of each example in each stream.
        max_lengths: (k,) limits. Examples that exceed the limit of any stream are
            dropped. None keeps all.
        tokens: most padded positions, rows × length, in the widest stream of a batch.
        max_buckets: most buckets, and hence shapes.
        rows_multiple: the number of rows of every batch is a multiple of this.
        seed: seed for shuffling, or None.
        groups: (n,) the group of each example, from 0. Examples of different groups
            are never in one batch. None: all are in one group.

    Attributes:
        shapes: [(rows, length of stream 0, …)], one per bucket, narrowest first.
        kept: (m,) indices of the examples that were not dropped.
        dropped: number of examples that were dropped.
        fill: (k,) fraction of each stream's padded positions in an epoch that hold
            data.

    Raises:
        ValueError: there is nothing to batch, or `rows_multiple` rows of the longest
            example exceed `tokens`.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        max_lengths: Sequence[int] | None,
        tokens: int,
        max_buckets: int = 8,
        rows_multiple: int = 1,
        seed: int | None,
        groups: np.ndarray | None = None,
    ):
        lengths = np.asarray(lengths)
        if lengths.ndim != 2 or not lengths.size:
            raise UserError(
                f"lengths have shape {lengths.shape}: "
                "must be (examples, streams), both at least 1."
            )
        limits = np.inf if max_lengths is None else np.asarray(max_lengths)
        kept = np.flatnonzero((lengths <= limits).all(axis=1))
        if not len(kept):
            raise UserError(
                f"All {len(lengths)} examples exceed max_lengths={max_lengths}: "
                "raise the limits."
            )
        of_kept = lengths[kept]
        is_constant = (of_kept == of_kept[0]).all(axis=0)
        if is_constant.all():
            is_constant[:] = False
        constant = of_kept[0, is_constant].max(initial=1)
        # An empty example takes one position, so that no array has length 0.
        width = np.maximum(of_kept[:, ~is_constant].max(axis=1), 1)
        # the search for buckets needs memory quadratic in the number of widths
        step = -(-width.max() // MAX_WIDTHS)
        rounded = np.minimum(-(-width // step) * step, width.max())
        widths, width_index = np.unique(rounded, return_inverse=True)
        widest = np.maximum(widths, constant)  # of all streams
        least = widest[-1] * rows_multiple
        if tokens < least:
            raise UserError(
                f"data.batch_tokens={tokens} is too small for {rows_multiple} row(s) "
                f"of the longest example, {widest[-1]} positions: set {least} or more."
            )
        # for each width, the longest of each stream
        longest = np.ones((len(widths), lengths.shape[1]), np.int64)
        for stream, longest_of_stream in enumerate(longest.T):
            np.maximum.at(longest_of_stream, width_index, of_kept[:, stream])
        rows = tokens // widest // rows_multiple * rows_multiple
        counts = np.bincount(width_index)
        ends = _bucket_ends(counts, longest, rows, max_buckets)
        starts = np.concatenate([[0], ends[:-1]])
        padded = np.maximum.reduceat(longest, starts)
        shapes = np.column_stack([rows[ends - 1], padded])
        bucket = np.searchsorted(ends, width_index, side="right")
        self._arrange(lengths, kept, bucket, shapes, seed, groups)

    @classmethod
    def ladder(
        cls,
        lengths: np.ndarray,
        boundaries: Sequence[int],
        rows: int,
        limits: Sequence[int] | None = None,
        groups: np.ndarray | None = None,
    ) -> BatchPlan:
        """Return a plan for evaluation and prediction, with padded lengths taken from
        `boundaries`.

        An example's bucket depends only on its length in stream 0, and its row only on
        the examples before it. Every further stream is padded to the boundary that fits
        the longest example in the bucket. `shapes` has no entries for buckets without
        examples.

        Args:
            lengths: (n, k) positions of each example in each stream, or (n,) for one
                stream.
            boundaries: padded lengths, ascending, e.g. from `ladder_lengths`.
            rows: number of rows of every batch.
            limits: (k,) most positions of each stream. No stream is padded to more.
            groups: see the class.

        Raises:
            ValueError: there is nothing to batch, or an example exceeds the last
                boundary.
        """
        lengths = np.asarray(lengths)
        if not lengths.size:
            raise UserError("There are no examples: a plan needs at least 1.")
        lengths = lengths.reshape(len(lengths), -1)
        longest = lengths.max()
        if longest > boundaries[-1]:
            example = lengths.max(axis=1).argmax()
            raise UserError(
                f"Example {example} has {longest} positions, "
                f"the limit is {boundaries[-1]}: truncate it."
            )
        rungs = np.searchsorted(boundaries, lengths[:, 0])
        used_rungs, bucket = np.unique(rungs, return_inverse=True)
        longest_in_bucket = np.zeros((len(used_rungs), lengths.shape[1]), np.int64)
        np.maximum.at(longest_in_bucket, bucket, lengths)
        padded = np.asarray(boundaries)[np.searchsorted(boundaries, longest_in_bucket)]
        if limits is not None:
            padded = np.minimum(padded, limits)
        shapes = np.insert(padded, 0, rows, axis=1)
        plan = cls.__new__(cls)
        plan._arrange(lengths, np.arange(len(lengths)), bucket, shapes, None, groups)
        return plan

    def part(self, lengths: np.ndarray, is_chosen: np.ndarray) -> BatchPlan:
        """Return a plan of some of the examples, with the shapes of this plan.

        Args:
            lengths: (n, k) as in the constructor.
            is_chosen: (n,) True for these examples. This plan keeps at least one.
        """
        of_kept = is_chosen[self.kept]
        plan = BatchPlan.__new__(BatchPlan)
        plan._arrange(
            lengths,
            self.kept[of_kept],
            self._bucket[of_kept],
            self._shapes,
            self._seed,
            None,
        )
        plan.dropped = int(is_chosen.sum() - of_kept.sum())
        return plan

    def _arrange(
        self,
        lengths: np.ndarray,
        kept: np.ndarray,
        bucket: np.ndarray,
        shapes: np.ndarray,
        seed: int | None,
        groups: np.ndarray | None,
    ) -> None:
        """Lay out an epoch from the bucket (m,) of each kept example and the shapes
        (buckets, 1 + k).

        A bucket is divided if it has examples of several groups.
        """
        self.kept = kept
        self.dropped = len(lengths) - len(kept)
        self._seed = seed
        self.shapes: list[tuple[int, ...]] = [tuple(shape) for shape in shapes.tolist()]
        if groups is not None:
            count = groups.max() + 1
            divided = bucket * count + groups[kept]
            used, bucket = np.unique(divided, return_inverse=True)
            shapes = shapes[used // count]
        self._shapes = shapes
        # NumPy sorts 16-bit integers in linear time
        self._bucket = bucket.astype(np.int16)
        rows = shapes[:, 0]
        counts = np.bincount(bucket, minlength=len(rows))
        batches = -(-counts // rows)
        ends = np.cumsum(counts)
        bucket_of_batch = np.repeat(np.arange(len(shapes)), batches)
        number_in_bucket = ranges(0, batches)
        rows_of_batch = rows[bucket_of_batch]
        first_of_bucket = (ends - counts)[bucket_of_batch]
        self._batch_bucket = bucket_of_batch
        self._starts = first_of_bucket + number_in_bucket * rows_of_batch
        self._stops = np.minimum(self._starts + rows_of_batch, ends[bucket_of_batch])
        filled = lengths[kept].sum(axis=0)
        padded = (batches * rows) @ shapes[:, 1:]
        self.fill = tuple((filled / padded).tolist())
        self._latest: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def _contents(
        self, epoch: int, position: int
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        examples, order = self._order(0 if self._seed is None else epoch)
        batch = order[position]
        rows, *shape = self._shapes[self._batch_bucket[batch]].tolist()
        indices = examples[self._starts[batch] : self._stops[batch]]
        return filled_up(indices, rows), tuple(shape)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the kept examples, sorted by bucket, and the order of the batches.

        The latest epoch is cached.
        """
        latest = self._latest
        if latest is None or latest[0] != epoch:
            examples = np.arange(len(self.kept))
            batches = np.arange(len(self))
            if self._seed is not None:
                generator = np.random.default_rng((self._seed, epoch))
                examples = generator.permutation(examples)
                batches = generator.permutation(batches)
            by_bucket = np.argsort(self._bucket[examples], kind="stable")
            latest = (epoch, self.kept[examples[by_bucket]], batches)
            self._latest = latest
        _, examples, batches = latest
        return examples, batches


class Divided(Plan):
    """The batches of another plan, divided into batches of `rows` rows.

    Rows that only filled the batches are left out.

    The padded lengths stay the same. One example then costs `rows` rows, and not those
    of a whole batch.
    """

    def __init__(self, plan: Plan, rows: int):
        self._parts: list[tuple[np.ndarray, tuple[int, ...]]] = []
        for whole in map(plan.batch, range(len(plan))):
            examples = whole.indices[whole.indices >= 0]
            for start in range(0, len(examples), rows):
                part = filled_up(examples[start : start + rows], rows)
                self._parts.append((part, whole.shape))
        shapes = dict.fromkeys(shape for _, shape in self._parts)
        self.shapes = [(rows, *shape) for shape in shapes]

    def __len__(self) -> int:
        return len(self._parts)

    def _contents(
        self, epoch: int, position: int
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        return self._parts[position]


def ladder_lengths(limit: int) -> list[int]:
    """Return the padded lengths 8, 12, 16, 24, 32, 48, … below `limit`, followed by
    `limit`.
    """
    lengths = []
    for exponent in range(3, 32):
        lengths += [2**exponent, 2**exponent * 3 // 2]
    return [*(length for length in lengths if length < limit), limit]


def filled_up(indices: np.ndarray, rows: int) -> np.ndarray:
    """Return `indices` with -1 appended up to `rows` of them."""
    return np.pad(indices, (0, rows - len(indices)), constant_values=-1)


def _bucket_ends(
    counts: np.ndarray, longest: np.ndarray, rows: np.ndarray, max_buckets: int
) -> np.ndarray:
    """Divide w widths into at most `max_buckets` buckets by dynamic programming.

    Return the buckets' ends, ascending.

    Args:
        counts: (w,) number of examples of each width.
        longest: (w, k) length of the longest of these examples in each stream.
        rows: (w,) number of rows of a batch of each width.
        max_buckets: most buckets.
    """
    w = len(counts)
    # [i]: examples of the widths before width i
    before = np.concatenate([[0], np.cumsum(counts)])
    # [i, j]: padded positions of a bucket of widths i … j-1
    cost = np.full((w + 1, w + 1), np.inf)
    for j in range(1, w + 1):
        rows_of_batch = rows[j - 1]
        batches = -(-(before[j] - before[:j]) // rows_of_batch)
        # [i]: padded lengths of widths i … j-1
        padded = np.maximum.accumulate(longest[:j][::-1])[::-1]
        cost[:j, j] = batches * rows_of_batch * padded.sum(axis=1)
    # best[j]: least cost of the first j widths, with the number of buckets allowed so
    # far
    best = cost[0]
    cuts = [np.zeros(w + 1, np.int64)]
    for _ in range(max_buckets - 1):
        total = best[:, None] + cost
        total[0] = cost[0]
        cuts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    ends = [w]
    while True:
        start = cuts.pop()[ends[-1]]
        if start == 0:
            return np.array(ends[::-1])
        ends.append(start)


def pad(rows: Ragged | Shared, indices: np.ndarray, length: int) -> np.ndarray:
    """Return rows[i] for each index i, padded with zeros: (len(indices), length, …).

    Where i is -1, all entries are zeros. The type is that of `device_dtype`.

    Raises:
        ValueError: a row is longer than `length`.
    """
    lengths = lengths_of(rows, indices)
    if len(lengths) and (longest := lengths.max()) > length:
        example = indices[lengths.argmax()]
        raise UserError(
            f"Example {example} has {longest} positions, "
            f"but its batch has length {length}: truncate it."
        )
    shape = (len(indices), length, *rows.values.shape[1:])
    padded = np.zeros(shape, device_dtype(rows.values))
    filled = np.arange(length) < lengths[:, None]
    padded[filled] = rows.take(indices[indices >= 0]).values
    return padded


def device_dtype(values: np.ndarray) -> np.typing.DTypeLike:
    """Return the type in which values go to a device: float32 or int32, or uint8 for
    pixels.
    """
    if values.dtype == np.uint8:
        return np.uint8
    return np.float32 if np.issubdtype(values.dtype, np.floating) else np.int32


def lengths_of(rows: Ragged | Shared, indices: np.ndarray) -> np.ndarray:
    """Return (len(indices),) int32, the length of rows[i] for each index i; 0 where
    i is -1.
    """
    lengths = np.zeros(len(indices), np.int32)
    filled = indices >= 0
    lengths[filled] = rows.lengths[indices[filled]]
    return lengths


def padded_arrays(
    streams: Mapping[str, Ragged | Shared | Grouped],
    more_arrays: Mapping[str, np.ndarray | Ragged],
    batch: Batch,
) -> Arrays:
    """Return the arrays of a batch, in their `device_dtype`.

    - For stream i, called `name`: the rows {name} (B, batch.shape[i], …) and their
      lengths {name}_length (B,). If examples have R rows each, both have an axis of
      length R after the first.
    - For each of `more_arrays`: the values of the rows, 0 in filler rows. They are
      (B,), or (B, batch.shape[0]) if there is one per position of the first stream.
    - "index" (B,): the example in each row, -1 in filler rows.
    """
    arrays: Arrays = {}
    for (name, rows), length in zip(streams.items(), batch.shape, strict=True):
        if isinstance(rows, Grouped):
            arrays |= _grouped_arrays(name, rows, batch.indices, length)
            continue
        arrays[name] = pad(rows, batch.indices, length)
        arrays[f"{name}_length"] = lengths_of(rows, batch.indices)
    is_filled = batch.indices >= 0
    for name, values in more_arrays.items():
        if isinstance(values, Ragged):
            arrays[name] = pad(values, batch.indices, batch.shape[0])
            continue
        column = np.where(is_filled, values[batch.indices], 0)
        arrays[name] = column.astype(device_dtype(values))
    arrays["index"] = batch.indices.astype(np.int32)
    return arrays


def _grouped_arrays(
    name: str, groups: Grouped, indices: np.ndarray, length: int
) -> Arrays:
    """Return the R rows of each example (B, R, length, …), and their lengths (B, R)."""
    of_rows = [
        np.where(indices >= 0, indices * groups.size + number, -1)
        for number in range(groups.size)
    ]
    rows = groups.rows
    return {
        name: np.stack([pad(rows, each, length) for each in of_rows], axis=1),
        f"{name}_length": np.stack([lengths_of(rows, i) for i in of_rows], axis=1),
    }


def prefetch(iterator: Iterator[Item], size: int = 2) -> Generator[Item]:
    """Yield the items of `iterator` in order.

    A background thread, started at first use, computes up to `size` ahead.

    An exception in the iterator is raised in place of the item. Closing the generator
    ends the thread.
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
