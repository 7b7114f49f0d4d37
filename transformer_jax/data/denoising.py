"""Examples for the pre-training of encoder–decoders: span corruption (Raffel et al.
2020, Section 3.1.4) and text infilling with sentence permutation (Lewis et al. 2020,
Section 2.2).

Documents are cut once into chunks of consecutive sentences. In every epoch, each chunk
becomes one example, with newly drawn noise. The draws of a row depend only on the seed,
the number of the batch and the chunk, so a batch is the same after a restart and on any
number of hosts.

Shapes: B rows · S source positions · T target positions.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.data.batching import (
    Arrays,
    Batch,
    Batches,
    BatchPlan,
    entropy,
    ladder_lengths,
    pad,
    padded_arrays,
)
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import cut
from transformer_jax.data.files import DataError
from transformer_jax.data.progress import counted
from transformer_jax.data.ragged import Ragged, Windows
from transformer_jax.data.segments import chunks_of
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)

OBJECTIVES = ("span_corruption", "text_infilling")
MASK = "<mask>"  # stands for a span of any length, also 0, in text infilling
MARKS = re.compile(r"<extra_id_\d+>|<mask>")  # stand for missing text in a line


def sentinel_tokens(count: int) -> tuple[str, ...]:
    """Return the names of sentinels, "<extra_id_0>" and so on, as in T5."""
    return tuple(f"<extra_id_{number}>" for number in range(count))


@dataclasses.dataclass(frozen=True)
class CorruptionConfig:
    """Choices of the pre-training examples.

    The defaults are those of Raffel et al. 2020. Lewis et al. 2020 have text infilling
    with rate 0.3, mean length 3, and permuted sentences.
    """

    # "span_corruption": each missing span is a sentinel, and the target is what is
    # missing; "text_infilling": each is "<mask>", and the target is the whole text
    objective: str = "span_corruption"
    rate: float = 0.15  # fraction of the tokens that are missing
    mean_length: float = 3.0  # mean length of a missing span, in tokens
    permute_sentences: bool = False  # text_infilling: put sentences in a random order

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.objective not in OBJECTIVES:
            yield "objective", f"must be one of {', '.join(OBJECTIVES)}"
        if self.permute_sentences and self.objective == "span_corruption":
            yield (
                "permute_sentences",
                (
                    "must be False with objective = 'span_corruption', whose target "
                    "is not the whole text: use 'text_infilling', or set this to False"
                ),
            )
        may_be_zero = self.objective == "text_infilling" and self.permute_sentences
        if not (0 < self.rate < 1 or (self.rate == 0 and may_be_zero)):
            zero = "; 0 only with permuted sentences in text infilling"
            yield "rate", f"must be in (0, 1), e.g. 0.15{zero}"
        if not 1 <= self.mean_length < math.inf:
            yield "mean_length", "must be at least 1, e.g. 3.0"

    def room(self, max_length: int) -> int:
        """Return the most tokens of a text whose source and target have at most
        `max_length` positions, with the end id and the final sentinel.
        """
        return max_length - (2 if self.objective == "span_corruption" else 1)

    def sentinels(self, max_length: int) -> int:
        """Return the number of sentinels that examples of `max_length` positions need,
        with the final one.
        """
        room = self.room(max_length)
        if self.objective != "span_corruption" or room < 2:
            return 0
        _, spans = noise_sizes(np.arange(2, room + 1), self.rate, self.mean_length)
        return int(spans.max()) + 1


# Noise.


def noise_sizes(
    lengths: np.ndarray, rate: float, mean_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens of texts of `lengths` ≥ 2 are noise, and in how many
    spans.

    There are no more spans than tokens that stay.
    """
    noise = np.clip(np.rint(rate * lengths), 1, lengths - 1).astype(np.int64)
    most = np.minimum(noise, lengths - noise)
    spans = np.clip(np.rint(noise / mean_length), 1, most).astype(np.int64)
    return noise, spans


def composition(total: int, parts: int, draw: np.random.Generator) -> np.ndarray:
    """Return `parts` positive integers with the sum `total`, (parts,). All such
    sequences are equally likely.
    """
    cuts = 1 + np.sort(draw.choice(total - 1, parts - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total)


def noise_mask(
    length: int, rate: float, mean_length: float, draw: np.random.Generator
) -> np.ndarray:
    """Return which tokens of a text of `length` ≥ 2 are noise, (length,) bool.

    Their number is round(rate · length), and that of their spans is this number divided
    by `mean_length`, rounded; both are at least 1. All masks with these numbers are
    equally likely.

    Source: `random_spans_noise_mask` of the authors' code, `t5/data/preprocessors.py`.
    Differs: There, a text begins with a token that stays, and ends with noise. So a
    text with a single span, e.g. one of 20 tokens, has the same mask in every epoch.
    """
    noise, spans = map(int, noise_sizes(np.array(length), rate, mean_length))
    # the first and the last run of tokens that stay may be empty
    kept = composition(length - noise + 2, spans + 1, draw)
    kept[[0, -1]] -= 1
    runs = np.zeros(2 * spans + 1, np.int64)
    runs[::2] = kept
    runs[1::2] = composition(noise, spans, draw)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def span_corruption(
    row: np.ndarray, mask: np.ndarray, sentinels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and the target of a text (Raffel et al. 2020, Figure 2).

    The source has one sentinel in place of each span of noise. The target has the
    sentinels, each followed by its span, and a final sentinel. The authors' code leaves
    the final sentinel out; the figure has it.

    Args:
        row: (length,) ids of the text.
        mask: (length,) True for noise.
        sentinels: ids of the sentinels, one more than there are spans of noise.

    Raises:
        ValueError: there are fewer sentinels.
    """
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    spans = int(begins.sum())
    if len(sentinels) <= spans:
        raise UserError(
            f"there are {len(sentinels)} sentinels for {spans} spans of noise: "
            f"pass at least {spans + 1}, one for each and a final one"
        )
    number = np.cumsum(begins) - 1  # of the span, at its tokens
    marked = np.where(begins, sentinels[number], row)
    source = marked[~mask | begins]
    places = np.flatnonzero(begins[mask])
    target = np.insert(row[mask].astype(np.int64), places, sentinels[:spans])
    return source, np.append(target, sentinels[spans])


def poisson_lengths(
    total: int, mean_length: float, draw: np.random.Generator
) -> np.ndarray:
    """Return lengths with the sum `total`, drawn from Poisson(mean_length).

    The last one is cut to reach the sum. There are at most `total`: surplus zeros are
    left out.
    """
    if not total:
        return np.zeros(0, np.int64)
    lengths = draw.poisson(mean_length, total)
    while lengths.sum() < total:
        lengths = np.append(lengths, draw.poisson(mean_length, total))
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, total)) + 1
    lengths = lengths[:count]
    lengths[-1] -= ends[count - 1] - total
    surplus = max(count - total, 0)
    return np.delete(lengths, np.flatnonzero(lengths == 0)[:surplus])


def text_infilling(
    row: np.ndarray,
    rate: float,
    mean_length: float,
    draw: np.random.Generator,
    mask_id: int,
) -> np.ndarray:
    """Replace spans of a text by one mask each (Lewis et al. 2020, Section 2.2).

    round(rate · length) tokens are missing, at least one unless the rate is 0. The
    lengths of spans are drawn from a Poisson distribution. A span of length 0 inserts a
    mask. All arrangements of spans and other tokens are equally likely.

    Differs: The authors' code lets spans overlap, and begins them at words. Here they
    begin at any token, and do not overlap, and there are never more masks than missing
    tokens.

    Args:
        row: (length,) ids of the text.
        rate: fraction of the tokens that are missing.
        mean_length: λ of the Poisson distribution.
        draw: the source of randomness.
        mask_id: id of the mask.
    """
    missing = max(1, round(rate * len(row))) if rate else 0
    spans = draw.permutation(poisson_lengths(missing, mean_length, draw))
    size = len(row) - missing + len(spans)
    is_span = np.zeros(size, bool)
    is_span[draw.choice(size, len(spans), replace=False)] = True
    lengths = np.ones(size, np.int64)
    lengths[is_span] = spans
    starts = np.cumsum(lengths) - lengths
    source = np.full(size, mask_id, np.int64)
    source[~is_span] = row[starts[~is_span]]
    return source


def permuted(
    sentences: Sequence[np.ndarray], draw: np.random.Generator
) -> Sequence[np.ndarray]:
    """Return sentences in a random order (Lewis et al. 2020, Section 2.2)."""
    return [sentences[i] for i in draw.permutation(len(sentences))]


# Examples.


class Corruption(NamedTuple):
    """Makes examples of texts, with the ids of a tokenizer.

    marks: ids of the sentinels, or only that of the mask in text infilling.
    end: id that ends a source and a target.
    """

    config: CorruptionConfig
    marks: np.ndarray
    end: int

    @classmethod
    def of(cls, config: CorruptionConfig, corpus: Corpus) -> Corruption:
        """Return the corruption for the tokenizer of the stream "target".

        Raises:
            TokenizerError: the tokenizer lacks sentinels or the mask.
        """
        names: Sequence[str] = (MASK,)
        remedy = "start from"
        if config.objective == "span_corruption":
            max_length = corpus.config.max_length
            names = sentinel_tokens(config.sentinels(max_length))
            remedy = f"lower data.max_length = {max_length}, start from"
        tokenizer = corpus.tokenizers["target"]
        ids = {name: tokenizer.id_of(name) for name in names}
        missing = [name for name, i in ids.items() if i is None]
        if missing:
            raise TokenizerError(
                f"the tokenizer has no {missing[0]}, and denoising.objective = "
                f"{config.objective!r} needs {counted(len(names), 'token')} that "
                f"stand for missing text, of which it lacks {len(missing)}: {remedy} "
                "a run of this task, or train a tokenizer in a new workdir, "
                "without init_from"
            )
        end = corpus.special_ids("target").end
        return cls(config, np.array(list(ids.values()), np.int64), end)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Return the most positions of source and target for texts of `lengths` (n,):
        (n, 2).
        """
        config = self.config
        if config.objective == "text_infilling":
            return np.stack([lengths, lengths], axis=1) + 1
        noise, spans = noise_sizes(lengths, config.rate, config.mean_length)
        source = lengths - noise + spans + 1
        return np.stack([source, noise + spans + 2], axis=1)

    def example(
        self, sentences: Sequence[np.ndarray], draw: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the source (S,) and the target (T,) of a text, each with its end id."""
        rate = self.config.rate
        mean_length = self.config.mean_length
        text = np.concatenate(sentences)
        if self.config.objective == "span_corruption":
            mask = noise_mask(len(text), rate, mean_length, draw)
            source, target = span_corruption(text, mask, self.marks)
        else:
            if self.config.permute_sentences:
                sentences = permuted(sentences, draw)
            shuffled = np.concatenate(sentences)
            mask_id = int(self.marks[0])
            source = text_infilling(shuffled, rate, mean_length, draw, mask_id)
            target = text
        return np.append(source, self.end), np.append(target, self.end)


class Chunks(NamedTuple):
    """Documents, cut into chunks of consecutive sentences.

    Chunk i has the sentences starts[i] to stops[i] - 1.
    """

    sentences: Ragged
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, sentences: Ragged, documents: np.ndarray, room: int) -> Chunks:
        """Return chunks of at least 2 and at most `room` tokens.

        A longer sentence is divided. Chunks of a single token are left out.

        Args:
            sentences: the tokens of each sentence.
            documents: (sentences,) number of the document of each sentence, ascending.
            room: most tokens of a chunk.
        """
        filled = np.flatnonzero(sentences.lengths)
        whole = sentences.take(filled)
        parts = Windows.over(whole.lengths, np.full(len(whole), room), room)
        pieces = whole.parts(parts)
        of_piece = documents[filled][parts.owners]
        ends = np.searchsorted(of_piece, of_piece, side="right")
        starts, stops = chunks_of(pieces.offsets, ends, room)
        kept = pieces.offsets[stops] - pieces.offsets[starts] >= 2
        return cls(pieces, starts[kept], stops[kept])

    @property
    def sizes(self) -> np.ndarray:
        """(chunks,) tokens of each chunk."""
        offsets = self.sentences.offsets
        return offsets[self.stops] - offsets[self.starts]

    def text(self, chunk: int) -> list[np.ndarray]:
        """Return the sentences of a chunk."""
        return [self.sentences[i] for i in range(self.starts[chunk], self.stops[chunk])]


def separates(tokenizer: Tokenizer) -> bool:
    """Return True if there is a space between texts that are encoded one by one, when
    their ids are decoded together.
    """
    (ids,) = tokenizer.encode_batch(["a"])
    return tokenizer.decode(ids + ids) != 2 * tokenizer.decode(ids)


def read_chunks(corpus: Corpus, split: str, room: int) -> Chunks:
    """Return the chunks of a split, which has the columns "text" and "document".

    Where the tokenizer does not put a space between sentences, each begins with one,
    except the first of a document. In a permuted text, that one has no space before it,
    wherever it stands.

    Raises:
        DataError: no document has two tokens.
    """
    table = corpus.open(split)
    tokenizer = corpus.tokenizers["target"]
    numbers = np.array([int(number) for number in table.column("document")])
    lines: Sequence[str] = table.column("text")
    if not separates(tokenizer):
        follows = np.diff(numbers, prepend=-1) == 0
        lines = [" " * int(i) + line for i, line in zip(follows, lines, strict=True)]
    sentences = tokenizer.encode(lines)
    chunks = Chunks.of(sentences, numbers, room)
    count = counted(len(np.unique(numbers)), "document")
    if not len(chunks.starts):
        raise DataError(
            f"{table.where}: none of {count} in the split {split} has two tokens, "
            "and an example needs at least one that stays and one that is missing: "
            "choose a file or a split with more text"
        )
    left_out = int(sentences.lengths.sum() - chunks.sizes.sum())
    log.info(
        "%s: %s, %s; %s left out, each of which is a chunk of its own",
        split,
        count,
        counted(len(chunks.starts), "chunk"),
        counted(left_out, "token"),
    )
    return chunks


def denoising_batches(
    corpus: Corpus,
    split: str,
    seed: int | None,
    *,
    config: CorruptionConfig,
    rows: int,
) -> Batches:
    """Return batches of examples, one from each chunk of the documents.

    With a seed (training), every epoch has other noise. Without one (evaluation), it is
    the same every time, with `rows` per batch.

    Args:
        corpus: the documents, with the streams "source" and "target", which share a
            tokenizer.
        split: name of the split.
        seed: the source of randomness, or None.
        config: choices of the examples.
        rows: number of rows of a batch without a seed.

    Returns:
        Batches of {"source": (B, S), "target": (B, T), "source_length",
        "target_length" and "index": (B,)}, all int32. Sources and targets end with the
        end id.

    Raises:
        DataError: no document has two tokens.
        TokenizerError: the tokenizer lacks sentinels or the mask.
    """
    limit = corpus.config.max_length
    corruption = Corruption.of(config, corpus)
    chunks = read_chunks(corpus, split, config.room(limit))
    sizes = corruption.sizes(chunks.sizes)
    if seed is None:
        plan = BatchPlan.ladder(sizes, ladder_lengths(limit), rows)
    else:
        plan = corpus.plan(sizes, seed)

    def load(batch: Batch) -> Arrays:
        number = 0 if seed is None else batch.number
        nothing = np.zeros(0, np.int64)
        sources = [nothing] * len(batch.indices)
        targets = [nothing] * len(batch.indices)
        for row in np.flatnonzero(batch.indices >= 0):
            chunk = int(batch.indices[row])
            draw = np.random.default_rng((seed or 0, number, chunk))
            sources[row], targets[row] = corruption.example(chunks.text(chunk), draw)
        source, source_length = _padded(sources, batch.shape[0])
        target, target_length = _padded(targets, batch.shape[1])
        return {
            "source": source,
            "source_length": source_length,
            "target": target,
            "target_length": target_length,
            "index": batch.indices.astype(np.int32),
        }

    if seed is None:
        return Batches(plan, load, references=[corpus.sha256(split)])
    baseline = None
    if config.objective == "text_infilling":
        baseline = functools.partial(entropy, chunks.sentences.values)
    return Batches(plan, load, baseline=baseline)


def _padded(rows: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, padded with zeros to `length`, and their lengths."""
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    ragged = Ragged(np.concatenate(rows), lengths)
    return pad(ragged, np.arange(len(rows)), length), lengths


# Text to fill in.


def gap_batches(
    corpus: Corpus, lines: Sequence[str], *, limit: int, rows: int
) -> Batches:
    """Return batches of lines in which sentinels or masks stand for missing text.

    The arrays are those of `denoising_batches` without the target. A line is cut to
    `limit` tokens.

    Raises:
        DataError: the tokenizer lacks a sentinel or the mask of a line.
    """
    end = corpus.special_ids("target").end
    encoded = encode_gaps(lines, corpus.tokenizers["target"], end)
    source = cut(encoded, limit, "input")
    plan = BatchPlan.ladder(source.lengths, ladder_lengths(limit), rows)
    load = functools.partial(padded_arrays, {"source": source}, {})
    return Batches(plan, load, lines)


def encode_gaps(lines: Sequence[str], tokenizer: Tokenizer, end: int) -> Ragged:
    """Return the ids of each line and its end id. Unlike elsewhere, "<extra_id_0>" and
    so on, and "<mask>", become the ids of these tokens.

    Spaces before such a token are dropped, and those after it, too, where the tokenizer
    puts a space itself. A blank line is empty.

    Raises:
        DataError: the tokenizer lacks such a token.
    """
    puts_space = separates(tokenizer)
    marks = [MARKS.findall(line) for line in lines]
    texts = []
    for line in lines:
        first, *more = MARKS.split(line if line.strip() else "")
        parts = [first, *(map(str.lstrip, more) if puts_space else more)]
        texts += [part.rstrip() for part in parts[:-1]] + parts[-1:]
    pieces = iter(tokenizer.encode_batch(texts))
    rows = []
    for number, of_line in enumerate(marks, 1):
        row = list(next(pieces))
        for mark in of_line:
            row += [_mark_id(mark, tokenizer, number), *next(pieces)]
        rows.append([*row, end])
    return Ragged.of(rows)


def _mark_id(mark: str, tokenizer: Tokenizer, line: int) -> int:
    mark_id = tokenizer.id_of(mark)
    if mark_id is None:
        raise DataError(
            f"line {line} has {mark}, which is no token of this run's tokenizer: "
            "write <extra_id_0>, <extra_id_1>, … where text is missing after training "
            "with denoising.objective = 'span_corruption', and <mask> after "
            "'text_infilling'"
        )
    return mark_id
