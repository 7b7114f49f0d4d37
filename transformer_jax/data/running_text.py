"""Running text for language models: documents, cut into windows, in batches that
predict each next token.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax import fields
from transformer_jax.data.batching import Arrays, Batch, Batches, entropy
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.packing import PackedPlan, WindowPlan
from transformer_jax.data.progress import counted
from transformer_jax.data.ragged import Ragged, Windows, ranges
from transformer_jax.data.sources import DataError, Pieces
from transformer_jax.data.text import TextData
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.data.whole_texts import Encoded, encode_texts

LAYOUTS = ("windows", "documents")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunningTextData(TextData):
    """Running text: a file {split}.txt, or the texts of a tfds data set.

    `max_length` is the length of a row.

    text_column: the feature of a tfds data set that holds the text. Each of its records
        is a document.
    layout: "windows" takes the whole split as one text and cuts it into windows.
        "documents" packs several documents, which cannot see each other, into a row; in
        a file, blank lines separate documents.
    validation_stride: in evaluation, a window starts this many tokens after the one
        before it. The tokens that the one before it has predicted are context only. 0:
        max_length, so without overlap.
    """

    text_column: str = "text"
    layout: str = "windows"
    validation_stride: int = fields.size(0, 0, free=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if not self.text_column:
            yield (
                "text_column",
                "must be the name of a feature of the data set, e.g. 'text'",
            )
        if self.layout not in LAYOUTS:
            yield "layout", f"must be one of {', '.join(LAYOUTS)}"
        if not 0 <= self.validation_stride <= self.max_length:
            yield (
                "validation_stride",
                f"must be in [1, max_length = {self.max_length}], or 0 for max_length",
            )


class Text(NamedTuple):
    """The documents of a split.

    documents: the tokens of each document. They follow the begin id, if texts have one,
        and precede the end id, unless the whole split is one text file.
    size: bytes of the text of all predicted tokens. Tokens are predicted from those
        before them, so the first one of a document without a begin id is not. The end
        of a document is predicted too, and has no size.
    """

    documents: Ragged
    size: int


@functools.lru_cache(maxsize=2)
def read_text(
    corpus: Corpus,
    stream: str,
    split: str,
    layout: str,
    begin: bool = False,
    sized: bool = True,
) -> Text:
    """Read and tokenize a split.

    The ids of a document are those of its whole text, not those of its lines.

    A record of a tfds data set is a document. In a file, the lines between blank lines
    are a document, with all of their line breaks. If the layout is "windows", a file is
    one document, and so is a data set: its records are joined, each with the end id
    after it. Documents without tokens are left out. With `begin`, the begin id precedes
    each document. Without `sized`, the size may be 0, which is faster. The latest texts
    are cached.
    """
    column = corpus.open(split).column(corpus.streams[stream].column)
    tokenizer = corpus.tokenizers[stream]
    if not isinstance(column, Pieces):
        encoded = _of_records(column, tokenizer, sized)
    elif layout == "documents":
        encoded = encode_texts(tokenizer, _between_blank_lines(column))
    else:
        encoded = encode_texts(tokenizer, [map(bytes.decode, column.blocks())])
    filled = encoded.ids.lengths > 0
    rows = Ragged(encoded.ids.values, encoded.ids.lengths[filled])
    if layout == "documents" or not isinstance(column, Pieces):
        rows = rows.framed(end=corpus.special_ids(stream).end)
    heads = encoded.heads[filled]
    if layout == "windows":
        rows = Ragged(rows.values, np.array([len(rows.values)]))
        heads = heads[:1]
    size = int(encoded.sizes[filled].sum())
    if begin:
        return Text(rows.framed(begin=corpus.begin_id(stream)), size)
    return Text(rows, size - int(heads.sum()))


def ids_sha256(text: Text) -> str:
    """Return the SHA-256 of the ids of all documents."""
    digest = hashlib.sha256(text.documents.values.astype("<i4").tobytes())
    digest.update(text.documents.lengths.astype("<i8").tobytes())
    return digest.hexdigest()


def same_by_line(corpus: Corpus, stream: str, split: str, layout: str) -> bool:
    """Return True if the ids of a split are those of its lines, one after another.

    Texts were encoded line by line when checkpoints did not yet hold the hash of the
    ids.
    """
    column = corpus.open(split).column(corpus.streams[stream].column)
    if not isinstance(column, Pieces):
        return True
    documents = read_text(corpus, stream, split, layout, False, sized=False).documents
    values = documents.values
    if layout == "documents":
        values = np.delete(values, documents.offsets[1:] - 1)
    lines = column if layout == "windows" else [line for line in column if line.strip()]
    return np.array_equal(values, corpus.encode(stream, lines, end=False).values)


def _of_records(records: Sequence[str], tokenizer: Tokenizer, sized: bool) -> Encoded:
    """Return the ids of each record that is not blank."""
    if sized:
        return encode_texts(
            tokenizer, ([record] for record in records if record.strip())
        )
    ids = tokenizer.encode(records)
    is_text = np.fromiter(
        (bool(record.strip()) for record in records), bool, len(records)
    )
    if not is_text.all():
        ids = ids.take(np.flatnonzero(is_text))
    no_sizes = np.zeros(len(ids), np.int64)
    return Encoded(ids, no_sizes, no_sizes)


def _between_blank_lines(lines: Iterable[str]) -> Iterator[list[str]]:
    for blank, document in itertools.groupby(lines, lambda line: not line.strip()):
        if not blank:
            yield list(document)


def text_batches(
    corpus: Corpus,
    stream: str,
    split: str,
    seed: int | None,
    *,
    layout: str,
    stride: int,
    rows: int,
    begin: bool = False,
) -> Batches:
    """Return batches of rows of `data.max_length` tokens, with the token that follows
    each one as its target.

    With a seed (training), the rows are shuffled, and a batch has as many as
    `data.batch_tokens` allows. The windows of a text start at another offset in each
    epoch; documents are packed, and longer ones cut into pieces.

    Without a seed (evaluation), there are `rows` per batch, and every token is
    predicted exactly once, except the first one of each document. Windows start
    `stride` tokens apart, which leaves at least `data.max_length` - `stride` tokens of
    context to each prediction after the first window.

    Args:
        corpus: the text.
        stream: name of the stream in the corpus and in the batches.
        split: name of the split.
        seed: seed of shuffling and offsets, or None.
        layout: one of LAYOUTS.
        stride: see `RunningTextData`. Not used in training.
        rows: number of rows of a batch without a seed.
        begin: the begin id precedes every document.

    Returns:
        Batches of {stream: (B, T), "target": (B, T), {stream}_length: (B,), "index":
        (B,)}, int32. Packed rows also have "segment" (B, T), the number of each token's
        document in its row, from 1, and "position" (B, T), the index of each token in
        it; both are 0 at padding. The pieces of a document that is longer than a row
        count as documents here. Where windows overlap, "counted" (B, T) is 1 at the
        tokens whose prediction counts. `references` has one item: (number of predicted
        tokens, their size in bytes, hash of the text).

    Raises:
        DataError: there is no token to predict, or too few for a window in training.
    """
    data = corpus.config
    source = corpus.open(split)
    tokenizer = corpus.tokenizers[stream]
    where = f"{source.where}, split {split}"
    length = data.max_length
    packed = layout == "documents"
    text = read_text(corpus, stream, split, layout, begin, sized=seed is None)
    positions = text.documents.lengths - 1  # a token is predicted at each of these
    if (total := int(positions.sum())) < 1:
        raise DataError(
            f"{where}: a token is predicted from those before it, "
            "so there must be two; use a longer text"
        )
    if seed is not None:
        rows = data.batch_tokens // length // data.rows_multiple * data.rows_multiple
        stride = 0
    stride = stride or length
    plan: PackedPlan | WindowPlan
    if seed is None or packed:
        plan = PackedPlan(
            Windows.over(positions, np.full(len(positions), length), stride),
            length,
            rows,
            seed,
        )
    elif total >= length:
        plan = WindowPlan(total, length, rows, seed)
    else:
        raise DataError(
            f"{where}: {total + 1} tokens are too few for training on windows "
            f"of data.max_length = {length} tokens, each with the token after it: "
            f"set data.max_length to {total} or less, or use a longer text"
        )
    tokens = counted(len(text.documents.values), "token")
    rows_of = counted(plan.count, "row" if packed else "window")
    batches = counted(len(plan), "batch", "batches")
    log.info("%s: %s in %s of %d tokens, %s", split, tokens, rows_of, length, batches)
    if packed:
        padding = 100 - 100 * plan.fill
        cut = int((positions > length).sum())
        documents = counted(len(positions), "document")
        log.info(
            "%s: %s, %d of them cut; %.1f %% padding", split, documents, cut, padding
        )
    load = functools.partial(
        _arrays, stream, text.documents, plan, length - stride, packed
    )
    if seed is not None:
        return Batches(
            plan, load, baseline=functools.partial(entropy, text.documents.values)
        )
    warn_of_unknown(text.documents, tokenizer, where)
    return Batches(plan, load, references=[(total, text.size, corpus.sha256(split))])


def warn_of_unknown(documents: Ragged, tokenizer: Tokenizer, where: str) -> None:
    """Log a warning with the number of tokens that the tokenizer does not know, if
    there are any.
    """
    if tokenizer.unk_id is not None and (
        unknown := int((documents.values == tokenizer.unk_id).sum())
    ):
        log.warning(
            "%s: %d of %d tokens are unknown to the tokenizer, "
            "which learned from the training split, and count as one symbol",
            where,
            unknown,
            len(documents.values),
        )


def _arrays(
    stream: str,
    documents: Ragged,
    plan: PackedPlan | WindowPlan,
    context: int,
    packed: bool,
    batch: Batch,
) -> Arrays:
    """Return the arrays of a batch.

    The first `context` tokens of a window that is not a document's first are seen.
    """
    windows, counts = plan.windows(batch)
    position = ranges(0, windows.lengths)
    row = np.repeat(np.arange(len(counts)), counts)
    sizes = np.bincount(row, windows.lengths, len(counts)).astype(np.int32)
    filled = np.arange(batch.shape[0]) < sizes[:, None]

    def laid_out(values: np.ndarray) -> np.ndarray:
        array = np.zeros(filled.shape, np.int32)
        array[filled] = values
        return array

    arrays = {
        stream: laid_out(documents.parts(windows).values),
        "target": laid_out(documents.parts(windows.shifted(1)).values),
        f"{stream}_length": sizes,
        "index": batch.indices.astype(np.int32),
    }
    if packed:
        number_in_row = ranges(1, counts)
        arrays["segment"] = laid_out(np.repeat(number_in_row, windows.lengths))
        arrays["position"] = laid_out(position)
    if context:
        is_first = np.repeat(windows.starts == 0, windows.lengths)
        arrays["counted"] = laid_out((position >= context) | is_first)
    return arrays
