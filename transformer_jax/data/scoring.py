"""Texts to score with a language model, alone or as choices after a context.

A record is a line of text, {"text": text}, {"text": text, "context": text}, or
{"choices": [text, …]} with or without a context. A line may also be such an object as
JSON.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.batching import (
    Batches,
    BatchPlan,
    ladder_lengths,
    padded_arrays,
)
from transformer_jax.data.continuations import encode_pairs
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.examples import as_object
from transformer_jax.data.ragged import Ragged, Windows, ranges
from transformer_jax.data.sources import DataError

FIELDS = ("text", "context", "choices")


class Given(NamedTuple):
    """The texts of a record. `choice` is True if one of them is to be chosen."""

    context: str
    texts: list[str]
    choice: bool


def read_given(record: str | Mapping[str, Any], number: int) -> Given:
    """Read record `number`, from 1.

    Raises:
        DataError: it is none of the objects above.
    """
    values = dict(as_object(record, FIELDS, number))
    context = values.pop("context", "")
    texts = None
    if values.keys() == {"text"}:
        texts = [values["text"]]
    elif values.keys() == {"choices"}:
        texts = values["choices"]
    if not isinstance(texts, list) or not texts or not _all_texts([context, *texts]):
        raise DataError(
            f'record {number} is {record!r:.80}: a text to score is a line, {{"text":'
            ' "…"} or {"choices": ["…", "…"]}, both of them also with'
            ' "context": "…"'
        )
    return Given(context, texts, choice="choices" in values)


def _all_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def scored_batches(
    corpus: Corpus,
    stream: str,
    records: Sequence[Any],
    *,
    limit: int,
    rows: int,
    begin: bool = False,
) -> Batches:
    """Return batches in which every token of every text is predicted once, given its
    context and the text before it.

    Context and text are tokenized together, see `encode_pairs`. An empty context counts
    as a line break; with `begin`, or if the tokenizer has no token for a line break, as
    the begin id. Sequences of more than `limit` + 1 tokens are read in windows of
    `limit` tokens that start `limit` / 2 apart, and a token counts in the first window
    that predicts it.

    Args:
        corpus: corpus whose tokenizers encode the text.
        stream: name of the stream in the corpus and in the batches.
        records: see the module.
        limit: most tokens that the model reads.
        rows: number of rows of every batch.
        begin: the begin id precedes every context.

    Returns:
        Batches of {stream: (B, T), "target": (B, T), "counted": (B, T),
        {stream}_length: (B,), "index": (B,)}, int32. "target" is the token after each
        one, and "counted" is 1 where it belongs to the text. `join` makes the
        prediction of a record from those of its rows, {"log_likelihood": …, "tokens":
        …}: a `score`, or for choices {"choice": number of the one with the largest
        log-likelihood per token, "scores": those of all}.

    Raises:
        DataError: see `read_given`; a choice has no tokens.
    """
    given = [read_given(record, number) for number, record in enumerate(records, 1)]
    ids, context = encode_given(corpus, stream, given, begin)
    windows = _windows(ids, context, limit)
    read = ids.parts(windows)
    per_token = {
        "target": ids.parts(windows.shifted(1)),
        "counted": Ragged(_counted(windows, context, limit), read.lengths),
    }
    text_counts = [len(each.texts) for each in given]
    owners = np.repeat(np.arange(len(given)), text_counts)
    plan = BatchPlan.ladder(read.lengths, ladder_lengths(limit), rows)
    load = functools.partial(padded_arrays, {stream: read}, per_token)
    join = joined(given, windows.owners)
    return Batches(plan, load, records, owners=owners[windows.owners], join=join)


def encode_given(
    corpus: Corpus, stream: str, given: Sequence[Given], begin: bool
) -> tuple[Ragged, np.ndarray]:
    """Return the ids of each text and its context, and how many of them precede the
    text (texts,). See `scored_batches`.

    Raises:
        DataError: a choice has no tokens.
    """
    texts = [text for each in given for text in each.texts]
    owners = [each for each in given for _ in each.texts]
    empty = "" if begin else "\n"
    contexts = [each.context or empty for each in owners]
    written, context = encode_pairs(corpus.tokenizers[stream], contexts, texts)
    for i in np.flatnonzero(written.lengths == context):
        if owners[i].choice:
            raise DataError(
                f"record {given.index(owners[i]) + 1} has a choice without tokens: "
                "there is nothing to score; leave it out"
            )
    has_begin = np.full(len(texts), True) if begin else context == 0
    begin_id = 0
    if begin:
        begin_id = corpus.begin_id(stream)
    elif has_begin.any():
        begin_id = corpus.special_ids(stream).begin
    begins = Ragged.repeated(begin_id, len(texts)).first(has_begin.astype(int))
    return Ragged.beside([begins, written]), has_begin + context


def _stride(limit: int) -> int:
    """Return the distance between the starts of windows of `limit` tokens."""
    return max(1, limit // 2)


def _windows(ids: Ragged, context: np.ndarray, limit: int) -> Windows:
    """Return the windows that predict a token of a text, and the last one of each."""
    limits = np.full(len(context), limit)
    windows = Windows.over(ids.lengths - 1, limits, _stride(limit))
    is_last = np.diff(windows.owners, append=len(context)) > 0
    predicts = windows.stops >= context[windows.owners]
    return windows.take(np.flatnonzero(is_last | predicts))


def _counted(windows: Windows, context: np.ndarray, limit: int) -> np.ndarray:
    """Return 1 for each position (n,) whose next token belongs to a text and is not in
    an earlier window.
    """
    window = np.repeat(np.arange(len(windows.owners)), windows.lengths)
    position = ranges(0, windows.lengths)
    start = windows.starts[window]
    is_new = (position >= limit - _stride(limit)) | (start == 0)
    is_text = start + position + 1 >= context[windows.owners[window]]
    return (is_new & is_text).astype(np.int32)


def joined(
    given: Sequence[Given], owners: np.ndarray
) -> Callable[[int, Sequence[dict[str, Any]]], dict[str, Any]]:
    """Return `join` of `Batches`, for rows that belong to the texts `owners` (rows,),
    ascending.
    """
    texts = [text for each in given for text in each.texts]
    sizes = [len(each.texts) for each in given]
    first_text = [0, *itertools.accumulate(sizes)]
    numbers = np.arange(len(texts) + 1)
    first_row = np.searchsorted(owners, numbers).tolist()

    def join(number: int, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        scores = []
        parts_of_record = iter(parts)
        for i in range(first_text[number], first_text[number + 1]):
            count = first_row[i + 1] - first_row[i]
            parts_of_text = list(itertools.islice(parts_of_record, count))
            scores.append(score(parts_of_text, len(texts[i].encode())))
        return prediction_of(given[number], scores)

    return join


def prediction_of(given: Given, scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the prediction of a record, given the scores of its texts."""
    if not given.choice:
        return scores[0]
    best = int(np.argmax([each["per_token"] for each in scores]))
    return {"choice": best, "scores": list(scores)}


def score(parts: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    """Return the score of a text of `size` bytes, given the log-likelihood and the
    number of tokens of its parts.

    The fields are "log_likelihood" in nats, the sum over the tokens; "tokens", their
    number; "per_token" and "per_byte", the log-likelihood divided by either, or 0 for a
    text without tokens.
    """
    total = float(sum(part["log_likelihood"] for part in parts))
    tokens = sum(part["tokens"] for part in parts)
    return {
        "log_likelihood": total,
        "tokens": tokens,
        "per_token": total / max(tokens, 1),
        "per_byte": total / max(size, 1),
    }
