"""Texts to score with a language model, alone or as choices after a context.

A record is a line of text, {"text": text}, {"text": text, "context": text}, or
{"choices": [text, …]} with or without a context. A line may also be such an object as
JSON.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
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
from transformer_jax.data.ragged import Ragged, Windows
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
    found = as_object(record, FIELDS, number)
    kind, context = set(found) - {"context"}, found.get("context", "")
    texts = (
        [found["text"]]
        if kind == {"text"}
        else found["choices"]
        if kind == {"choices"}
        else None
    )
    if not (
        isinstance(texts, list)
        and texts
        and all(isinstance(text, str) for text in (context, *texts))
    ):
        raise DataError(
            f'record {number} is {record!r:.80}: a text to score is a line, {{"text":'
            ' "…"} or {"choices": ["…", "…"]}, both of them also with'
            ' "context": "…"'
        )
    return Given(context, texts, choice=kind == {"choices"})


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
    texts = [text for each in given for text in each.texts]
    sizes = [len(each.texts) for each in given]
    owners = np.repeat(np.arange(len(given)), sizes)
    empty = "" if begin else "\n"
    contexts = [each.context or empty for each in given for _ in each.texts]
    written, first = encode_pairs(corpus.tokenizers[stream], contexts, texts)
    for owner, without in zip(
        owners.tolist(), (written.lengths == first).tolist(), strict=True
    ):
        if without and given[owner].choice:
            raise DataError(
                f"record {owner + 1} has a choice without tokens: "
                "there is nothing to score; leave it out"
            )
    begun = np.full(len(texts), True) if begin else first == 0
    begin_id = 0
    if begun.any():
        begin_id = (
            corpus.begin_id(stream) if begin else corpus.special_ids(stream).begin
        )
    ids = Ragged.beside(
        [Ragged.repeated(begin_id, len(texts)).first(begun.astype(int)), written]
    )
    before = begun + first

    stride = max(1, limit // 2)
    windows = Windows.over(ids.lengths - 1, np.full(len(texts), limit), stride)
    last = np.diff(windows.owners, append=len(texts)) > 0
    windows = windows.take(
        np.flatnonzero(last | (windows.stops >= before[windows.owners]))
    )
    read = ids.parts(windows)
    of = np.repeat(np.arange(len(windows.owners)), windows.lengths)
    place = np.arange(len(of)) - read.offsets[of]
    new = (place >= limit - stride) | (windows.starts[of] == 0)
    counted = new & (windows.starts[of] + place + 1 >= before[windows.owners[of]])
    others = {
        "target": ids.parts(windows.shifted(1)),
        "counted": Ragged(counted.astype(np.int32), read.lengths),
    }
    rows_before = np.searchsorted(windows.owners, np.arange(len(texts) + 1)).tolist()
    texts_before = [0, *itertools.accumulate(sizes)]

    def join(number: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        mine = range(texts_before[number], texts_before[number + 1])
        start = rows_before[mine.start]
        scores = [
            score(
                found[rows_before[i] - start : rows_before[i + 1] - start],
                len(texts[i].encode()),
            )
            for i in mine
        ]
        if not given[number].choice:
            return scores[0]
        return {
            "choice": int(np.argmax([each["per_token"] for each in scores])),
            "scores": scores,
        }

    plan = BatchPlan.ladder(read.lengths, ladder_lengths(limit), rows)
    load = functools.partial(padded_arrays, {stream: read}, others)
    return Batches(plan, load, records, owners=owners[windows.owners], join=join)


def score(parts: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    """Return the score of a text of `size` bytes, given the log-likelihood and the
    number of tokens of its parts.

    The fields are "log_likelihood" in nats, the sum over the tokens; "tokens", their
    number; "per_token" and "per_byte", the log-likelihood divided by either, or 0 for a
    text without tokens.
    """
    total, tokens = (
        float(sum(part["log_likelihood"] for part in parts)),
        sum(part["tokens"] for part in parts),
    )
    return {
        "log_likelihood": total,
        "tokens": tokens,
        "per_token": total / max(tokens, 1),
        "per_byte": total / max(size, 1),
    }
