"""Batches of the examples of a corpus: in buckets for training, in order otherwise."""

import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.batching import (
    Batches,
    BatchPlan,
    Plan,
    entropy,
    ladder_lengths,
    padded_arrays,
)
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.languages import Joined
from transformer_jax.data.mixture import Mixture
from transformer_jax.data.progress import counted
from transformer_jax.data.ragged import Grouped, Ragged, Shared
from transformer_jax.data.references import References
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)


class Rule(NamedTuple):
    """A rule that leaves examples out of training.

    words: what these examples are, e.g. "with too few positions for the text".
    broken: function from the rows of each stream, and the examples (n,) that nothing
        else leaves out, to those of them (n,) that the rule leaves out.
    """

    words: str
    broken: Callable[[Mapping[str, Any], np.ndarray], np.ndarray]


def cut(
    rows: Ragged,
    limit: int,
    source: str,
    limit_words: str = "",
    begin: bool = False,
    end: int = 1,
    tail: bool = False,
    entry: str = "line",
    unit: str = "tokens",
) -> Ragged:
    """Truncate rows to at most `limit` positions, and log a warning for each row that
    is truncated.

    Args:
        rows: the ids or vectors of each entry of a column.
        limit: most positions per row.
        source: name of the source of the column, for the warning.
        limit_words: the limit in words, for the warning: by default
            "model.max_length = {limit}".
        begin: keep the first position of a row, its begin id.
        end: keep the last `end` positions of a row, e.g. its end id.
        tail: keep the last positions of a row instead of the first.
        entry: what an entry of the column is called in the warning.
        unit: what its positions are called.
    """
    for i in np.flatnonzero(rows.lengths > limit):
        log.warning(
            "%s, %s %d: %d %s, cut to %s",
            source,
            entry,
            i + 1,
            rows.lengths[i],
            unit,
            limit_words or f"model.max_length = {limit}",
        )
    return rows.cut(limit, begin, end, tail)


def ladder_batches(
    corpus: Corpus,
    columns: Mapping[str, Sequence[Any]],
    *,
    rows: int,
    limit: int,
    source: str,
    begin: bool = False,
    end: bool = True,
    key: str = "model.max_length",
    tail: bool = False,
    more_arrays: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> Batches:
    """Return batches for evaluation and prediction: each example once, truncated to
    `limit` positions, `rows` per batch.

    The padded length of an example in the first stream depends only on its own length.
    So results computed from the first stream alone do not depend on the other examples.

    Args:
        corpus: corpus whose streams encode the columns.
        columns: a column for each of one or more streams, keyed by stream; entry i of
            one belongs to entry i of the others. One may be `References`.
        rows: number of rows of every batch.
        limit: most positions of an example, in streams without a limit of their own.
        source: name of the source of the columns, for warnings.
        begin: add the tokenizer's begin id before each text.
        end: add the tokenizer's end id after each text.
        key: config key of `limit`, for warnings.
        tail: keep the last positions of a longer example instead of the first.
        more_arrays: further arrays (examples,), e.g. labels.

    Returns:
        Batches with arrays as in `padded_arrays`. `records` are the entries of the
        first column, `references` those of the second. `lengths` are given for
        vectors. If a stream divides the examples into groups, the rows of a batch are
        of one group, and "group" (B,) has its number.
    """
    streams: dict[str, Ragged | Grouped] = {}
    limits = []
    for name, column in columns.items():
        stream = corpus.streams[name]
        encoded = stream.encode(one_by_one(column), begin, end)
        most = stream.limit or limit
        words = stream.limit_words if stream.limit else f"{key} = {limit}"
        has_begin = begin and stream.added(True, False) > 0
        rows_of_stream = cut(
            encoded,
            most,
            source,
            words,
            has_begin,
            stream.closing if end else 0,
            tail,
            entry="reference" if isinstance(column, References) else stream.entry,
            unit=stream.unit,
        )
        streams[name] = rows_of_stream
        if isinstance(column, References):
            streams[name] = Grouped(rows_of_stream, column.size)
        limits.append(most)
    first, *further = columns
    first_stream = corpus.streams[first]
    is_empty = streams[first].lengths == first_stream.added(begin, end)
    _warn_of_empty(is_empty, source, first_stream.entry)
    lengths = np.stack([encoded.lengths for encoded in streams.values()], axis=1)
    groups = _groups(corpus, columns)
    boundaries = ladder_lengths(max(limits))
    plan = BatchPlan.ladder(lengths, boundaries, rows, limits, groups.get("group"))
    load = functools.partial(padded_arrays, streams, {**more_arrays, **groups})
    references = columns[further[0]] if further else ()
    first_lengths = lengths[:, 0] if first_stream.trailing else None
    return Batches(plan, load, columns[first], references, lengths=first_lengths)


def _warn_of_empty(is_empty: np.ndarray, source: str, entry: str) -> None:
    empty = np.flatnonzero(is_empty) + 1
    if not empty.size:
        return
    shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
    if len(empty) == 1:
        log.warning("%s: %s %s is empty", source, entry, shown)
    else:
        count = f"{len(empty):,}"
        log.warning("%s: %s %ss are empty: %ss %s", source, count, entry, entry, shown)


def bucket_batches(
    corpus: Corpus,
    columns: Mapping[str, Sequence[Any]],
    *,
    split: str,
    seed: int,
    max_ratio: float = 0.0,
    predicted: str = "",
    begin: bool = False,
    end: bool = True,
    more_arrays: Mapping[str, np.ndarray] = types.MappingProxyType({}),
    rule: Rule | None = None,
) -> Batches:
    """Return batches for training, with examples of similar length together.

    Arguments are as in `ladder_batches`. `predicted` is the stream whose ids the model
    predicts, if there is one: `Batches.baseline` is the entropy of these ids.

    An example is left out if one of its entries is empty or has more positions than the
    limit of its stream, by default `data.max_length`, or if one has more than
    `max_ratio` times as many as another (0: no limit), or if it breaks `rule`. Each of
    several references is an example of its own, so an epoch has each of them once.

    Raises:
        ValueError: no example is left to train on.
    """
    data = corpus.config
    sizes = [i.size for i in columns.values() if isinstance(i, References)]
    streams: dict[str, Ragged | Shared] = {}
    for name, column in columns.items():
        rows = corpus.encode(name, one_by_one(column), begin, end)
        is_shared = sizes and not isinstance(column, References)
        streams[name] = Shared(rows, sizes[0]) if is_shared else rows
    added = [corpus.streams[name].added(begin, end) for name in streams]
    limits = [corpus.streams[name].limit or data.max_length for name in streams]
    lengths = np.stack([encoded.lengths for encoded in streams.values()], axis=1)
    bare = lengths - added
    shorter = bare.min(axis=1)
    longer = bare.max(axis=1)
    empty = shorter == 0
    allowed = max_ratio * shorter
    fits = (lengths <= limits).all(axis=1)
    uneven = (allowed > 0) & (longer > allowed) & fits
    barred = np.zeros(len(lengths), bool)
    if rule is not None:
        barred = rule.broken(streams, fits & ~empty & ~uneven)
    # the plan drops them together with those that are too long
    lengths[empty | uneven | barred] = max(limits) + 1
    too_long = _too_long(corpus, streams)
    if (lengths > limits).any(axis=1).all():
        others = f"{too_long} or {rule.words}" if rule else too_long
        raise UserError(
            f"{split}: none of {len(lengths)} examples is left to train on: "
            f"{empty.sum()} have an empty side, {uneven.sum()} "
            f"exceed data.max_ratio = {max_ratio:g}, and the others are "
            f"{others}: check the files, or raise the limits"
        )
    groups = _groups(corpus, columns)
    plan = corpus.plan(lengths, seed, limits, groups.get("group"))
    reasons = {
        too_long: plan.dropped - empty.sum() - uneven.sum() - barred.sum(),
        "with an empty side": empty.sum(),
        f"above data.max_ratio = {max_ratio:g}": uneven.sum(),
        rule.words if rule else "": barred.sum(),
    }
    _log_plan(plan, split, list(streams)[-1], reasons)
    mixed: Plan = plan
    if data.weights:
        (first, *_) = columns.values()
        assert isinstance(first, Joined)
        mixed = Mixture.of(plan, lengths, first.sizes, data.weights, seed)
    baseline = None
    if predicted:
        baseline = functools.partial(entropy, streams[predicted].values)
    load = functools.partial(padded_arrays, streams, {**more_arrays, **groups})
    return Batches(mixed, load, baseline=baseline)


def _log_plan(
    plan: BatchPlan, split: str, stream: str, reasons: Mapping[str, int]
) -> None:
    """Log the batches of a split, how full they are in one stream, and how many
    examples are left out for each reason.
    """
    left_out = ", ".join(
        f"{count:,} {reason}" for reason, count in reasons.items() if count
    )
    log.info(
        "%s: %s in %s of %s; %.0f %% of the %s positions are filled; left out: %s",
        split,
        counted(len(plan.kept), "example"),
        counted(len(plan), "batch", "batches"),
        counted(len(plan.shapes), "shape"),
        100 * plan.fill[-1],
        stream,
        left_out or "none",
    )


def _groups(
    corpus: Corpus, columns: Mapping[str, Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return the groups of the examples (n,) as "group", if a stream has some."""
    for name, column in columns.items():
        groups = corpus.streams[name].groups(column)
        if groups is not None:
            return {"group": groups}
    return {}


def one_by_one(column: Sequence[Any]) -> Sequence[Any]:
    """Return the entries of a column, or all references one after another."""
    if isinstance(column, References):
        return [text for texts in column for text in texts]
    return column


def _too_long(corpus: Corpus, names: Iterable[str]) -> str:
    """Return the phrase for examples that exceed the limit of a stream."""
    general = f"data.max_length = {corpus.config.max_length}"
    streams = map(corpus.streams.__getitem__, names)
    limits = [stream.limit_words if stream.limit else general for stream in streams]
    return "longer than " + " or ".join(dict.fromkeys(limits))


def example_batches(
    corpus: Corpus,
    streams: Mapping[str, Ragged],
    more_arrays: Mapping[str, np.ndarray | Ragged],
    *,
    seed: int | None,
    rows: int,
    limit: int,
) -> Batches:
    """Return batches of encoded examples: shuffled with a `seed` for training, each
    example once and in order without.

    Args:
        corpus: corpus of the examples, whose config has the options of training
            batches.
        streams: the ids or vectors of each example in each stream, with special ids.
        more_arrays: further arrays (examples,), e.g. labels, or one value per position
            of the first stream.
        seed: seed of the shuffle, or None.
        rows: number of rows of a batch without a seed.
        limit: most positions of an example.
    """
    lengths = np.stack([ids.lengths for ids in streams.values()], axis=1)
    plan = example_plan(corpus, lengths, seed=seed, rows=rows, limit=limit)
    return Batches(plan, functools.partial(padded_arrays, streams, more_arrays))


def example_plan(
    corpus: Corpus, lengths: np.ndarray, *, seed: int | None, rows: int, limit: int
) -> BatchPlan:
    """Return the plan of `example_batches` for examples of `lengths` (n, k)."""
    if seed is None:
        return BatchPlan.ladder(lengths, ladder_lengths(limit), rows)
    return corpus.plan(lengths, seed)
