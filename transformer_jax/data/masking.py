"""Examples for BERT's pre-training: masked tokens in segments of documents (Devlin et
al. 2019, Section 3.1, A.1).

Documents are cut once into chunks of consecutive sentences. In every epoch, each chunk
becomes one example, with newly drawn segments and masks. The draws of a row depend only
on the seed, the number of the batch and the chunk, so a batch is the same after a
restart and on any number of hosts.

Shapes: B rows · T positions · P masked positions.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax import fields
from transformer_jax.data.batching import (
    Arrays,
    Batch,
    Batches,
    BatchPlan,
    entropy,
    ladder_lengths,
    padded_arrays,
)
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import cut
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.segments import Documents, Segments
from transformer_jax.data.tokenizer_frames import mask_takes_space
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError

log = logging.getLogger(__name__)

MASK = "[MASK]"  # stands for a token to predict in text to predict from


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """Choices of the pre-training examples. The defaults are those of the paper."""

    rate: float = 0.15  # fraction of the tokens that are predicted
    mask_share: float = 0.8  # of the predicted tokens, the fraction replaced by [MASK]
    # the fraction replaced by a random token; the rest stays as it is
    random_share: float = 0.1
    whole_word: bool = False  # choose whole words instead of pieces
    next_sentence: bool = fields.outputs(
        True
    )  # form pairs of segments, and predict whether the second one follows the first
    short_rate: float = 0.1  # probability of an example shortened to a random length

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if not 0 < self.rate < 1:
            yield "rate", "must be in (0, 1), e.g. 0.15"
        for name in ("mask_share", "random_share", "short_rate"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, "must be in [0, 1]"
        if self.mask_share + self.random_share > 1 + 1e-9:
            yield (
                "random_share",
                f"must be at most 1 - mask_share = {1 - self.mask_share:g}",
            )


class Masked(NamedTuple):
    """Masked text, and what is to be predicted.

    Row b has counts[b] predictions; the rest of its P places are zeros.
    """

    text: np.ndarray  # (B, T)
    positions: np.ndarray  # (B, P)
    labels: np.ndarray  # (B, P)
    counts: np.ndarray  # (B,)


def most_masked(length: int, rate: float) -> int:
    """Return P, the most predictions in a row of `length` positions."""
    return max(1, int(np.ceil(rate * length)))


def mask(
    text: np.ndarray,
    candidates: np.ndarray,
    draws: Sequence[np.random.Generator],
    config: MaskingConfig,
    mask_id: int,
    replacements: np.ndarray,
    continues: np.ndarray | None = None,
) -> Masked:
    """Choose tokens to predict, and replace them: 80 % by [MASK], 10 % by a random
    token, 10 % not at all (A.1).

    In each row, round(rate · candidates) tokens are chosen, at least one. Whole words
    are chosen in a random order, and one that would exceed this number is left out, so
    there may be fewer.

    Args:
        text: (B, T) token ids.
        candidates: (B, T) True at tokens that may be chosen, i.e. not at special tokens
            and padding.
        draws: the source of randomness of each row.
        config: rate and shares.
        mask_id: id of [MASK].
        replacements: ids from which random tokens are drawn.
        continues: (ids,) True for pieces that continue a word. If given, whole words
            are chosen.
    """
    positions, labels, count = _choose(text, candidates, draws, config.rate, continues)
    chosen = np.arange(labels.shape[1]) < count[:, None]
    shares = np.stack([draw.random(labels.shape[1]) for draw in draws])
    random_tokens = replacements[
        np.stack(
            [draw.integers(len(replacements), size=labels.shape[1]) for draw in draws]
        )
    ]
    becomes_mask = shares < config.mask_share
    becomes_random = shares < config.mask_share + config.random_share
    new = np.where(becomes_random, random_tokens, labels)
    new = np.where(becomes_mask, mask_id, new)
    masked = text.copy()
    rows = np.broadcast_to(np.arange(len(text))[:, None], labels.shape)
    masked[rows[chosen], positions[chosen]] = new[chosen]
    return Masked(masked, positions.astype(np.int32), labels.astype(np.int32), count)


def _choose(
    text: np.ndarray,
    candidates: np.ndarray,
    draws: Sequence[np.random.Generator],
    rate: float,
    continues: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose the tokens to predict → their positions (B, P), ascending, the tokens (B,
    P), and their number in each row (B,). Positions and tokens are 0 beyond the number.
    """
    length = text.shape[1]
    available = candidates.sum(axis=1)
    wanted = np.maximum(np.rint(rate * available), 1)
    count = np.where(available > 0, wanted, 0).astype(np.int32)
    order = np.stack([draw.random(length) for draw in draws])
    if continues is not None:
        # a segment may begin within a word
        after_candidate = np.pad(candidates[:, :-1], ((0, 0), (1, 0)))
        begins_word = candidates & ~(after_candidate & continues[text])
        order, count = _by_word(order, candidates, begins_word, count)
    ranked = np.argsort(np.where(candidates, order, 2), axis=1)
    ranked = ranked[:, : most_masked(length, rate)]
    chosen = np.arange(ranked.shape[1]) < count[:, None]
    ascending = np.sort(np.where(chosen, ranked, length), axis=1)
    positions = np.where(chosen, ascending, 0)
    labels = np.where(chosen, np.take_along_axis(text, positions, axis=1), 0)
    return positions, labels, count


def _by_word(
    order: np.ndarray, candidates: np.ndarray, starts: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return an order in which the tokens of chosen words come first, and their
    number in each row.
    """
    by_word = np.full_like(order, 1.5)
    taken = np.zeros_like(count)
    for row, limit in enumerate(count):
        positions = np.flatnonzero(candidates[row])
        words = []
        if len(positions):
            words = np.split(positions, np.flatnonzero(starts[row, positions])[1:])
        for i in np.argsort(order[row, : len(words)]):
            if taken[row] + len(words[i]) <= limit:
                by_word[row, words[i]] = taken[row] / (1 + limit)
                taken[row] += len(words[i])
    return by_word, taken


class Specials(NamedTuple):
    """The ids of [CLS], [SEP] and [MASK]."""

    begin: int
    end: int
    mask: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Specials":
        """Return the ids of a tokenizer. Raises TokenizerError if it lacks one of
        them.
        """
        begin = tokenizer.bos_id
        end = tokenizer.eos_id
        mask = tokenizer.mask_id
        if begin is None or end is None or mask is None:
            ids = {"[CLS]": begin, "[SEP]": end, MASK: mask}
            missing = [name for name, i in ids.items() if i is None]
            raise TokenizerError(
                f"the tokenizer has no {' and no '.join(missing)}, "
                "and masked language modelling needs it: "
                "set data.tokenizer = 'bert', or use another tokenizer in a new workdir"
            )
        return cls(begin, end, mask)


def document_batches(
    corpus: Corpus,
    split: str,
    seed: int | None,
    *,
    config: MaskingConfig,
    causal: bool,
    rows: int,
) -> Batches:
    """Return batches of examples, one from each chunk of the documents, for the stream
    "text" of `corpus`.

    With a seed (training), every epoch has other segments and masks. Without one
    (evaluation), they are the same every time, with `rows` per batch.

    Args:
        corpus: the documents. The length of an example is `data.max_length`, including
            special tokens.
        split: name of the split.
        seed: the source of randomness, or None.
        config: choices of the examples.
        causal: predict every next token instead of masked tokens.
        rows: number of rows of a batch without a seed.

    Returns:
        Batches of {"text": (B, T), "text_length", "second": where the second segment
        starts, "paired" and "follows": 0 or 1, "positions" and "label": (B, P),
        "masked": the number of predictions, "index"}. Arrays without a shape here
        are (B,). All are int32.
    """
    limit = corpus.config.max_length
    tokenizer = corpus.tokenizers["text"]
    table = corpus.open(split)
    ids = Specials.of(tokenizer)
    room = limit - len(ids)
    sentences = tokenizer.encode(table.column("text"))
    numbers = np.array([int(number) for number in table.column("document")])
    if long := int((sentences.lengths > room).sum()):
        log.warning(
            "%s: %d of %d sentences cut to %d tokens", split, long, len(sentences), room
        )
    documents = Documents(
        sentences, numbers, room, config.next_sentence, config.short_rate
    )
    sizes = (documents.sizes + 2 + documents.paired)[:, None]
    if seed is None:
        plan = BatchPlan.ladder(sizes, ladder_lengths(limit), rows)
    else:
        plan = corpus.plan(sizes, seed)
    paired = documents.paired.sum()
    log.info(
        "%s: %d documents, %d chunks, %d with pairs",
        split,
        len(np.unique(numbers)),
        len(sizes),
        paired,
    )
    special = (*ids, tokenizer.pad_id, tokenizer.unk_id)
    replacements = np.setdiff1d(
        np.arange(tokenizer.size), [i for i in special if i is not None]
    )
    continues = tokenizer.continues if config.whole_word else None

    def load(batch: Batch) -> Arrays:
        number = 0 if seed is None else batch.number
        draws = [
            np.random.default_rng((seed or 0, number, i + 1)) for i in batch.indices
        ]
        segments = [
            documents.draw(i, draw) if i >= 0 else None
            for i, draw in zip(batch.indices, draws, strict=True)
        ]
        text, lengths, second, candidates = assemble(
            segments, batch.shape[0], ids.begin, ids.end
        )
        if causal:
            prediction = next_tokens(text, lengths)
        else:
            prediction = mask(
                text, candidates, draws, config, ids.mask, replacements, continues
            )
        return {
            "text": prediction.text,
            "text_length": lengths,
            "second": second,
            "paired": np.array(
                [row is not None and row.second is not None for row in segments],
                np.int32,
            ),
            "follows": np.array(
                [row is not None and row.follows for row in segments], np.int32
            ),
            "positions": prediction.positions,
            "label": prediction.labels,
            "masked": prediction.counts,
            "index": batch.indices.astype(np.int32),
        }

    if seed is None:
        return Batches(plan, load, references=[corpus.sha256(split)])
    return Batches(plan, load, baseline=functools.partial(entropy, sentences.values))


def blank_batches(
    corpus: Corpus, lines: Sequence[str], *, causal: bool, limit: int, rows: int
) -> Batches:
    """Return batches of lines in which [MASK] stands for a token to predict.

    The arrays are those of `document_batches` for single segments, without labels. A
    line is cut to `limit` tokens, and the masks after that are lost. If `causal`, a
    token is predicted at the place before it.
    """
    ids = Specials.of(corpus.tokenizers["text"])
    text = cut(encode_blanks(lines, corpus.tokenizers["text"]), limit, "input")
    most = max([1, *(line.count(MASK) for line in lines)])
    plan = BatchPlan.ladder(text.lengths, ladder_lengths(limit), rows)

    def load(batch: Batch) -> Arrays:
        arrays = padded_arrays({"text": text}, {}, batch)
        masked = arrays["text"] == ids.mask
        counts = masked.sum(axis=1, dtype=np.int32)
        order = np.argsort(~masked, axis=1, kind="stable")[:, :most]
        places = np.pad(order, ((0, 0), (0, most - order.shape[1]))) - causal
        positions = np.where(np.arange(most) < counts[:, None], places, 0).astype(
            np.int32
        )
        return arrays | {
            "second": arrays["text_length"],
            "positions": positions,
            "masked": counts,
        }

    return Batches(plan, load, lines)


def encode_blanks(lines: Sequence[str], tokenizer: Tokenizer) -> Ragged:
    """Encode lines as [CLS] line [SEP].

    Unlike elsewhere, [MASK] in a line becomes the id of that token. The tokenizer may
    drop the spaces before it.
    """
    ids = Specials.of(tokenizer)
    parts = [line.split(MASK) for line in lines]
    if mask_takes_space(tokenizer):
        parts = [[*(part.rstrip() for part in more), last] for *more, last in parts]
    pieces = iter(tokenizer.encode_batch([part for line in parts for part in line]))
    rows = []
    for _, *more in parts:
        row = [ids.begin, *next(pieces)]
        for _ in more:
            row += [ids.mask, *next(pieces)]
        rows.append([*row, ids.end])
    return Ragged.of(rows)


def assemble(
    rows: Sequence[Segments | None], length: int, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay out [CLS] first [SEP] second [SEP], or [CLS] first [SEP].

    `begin` and `end` are the ids of [CLS] and [SEP]. A row of None is a filler row.

    Returns:
        Token ids (B, length), their numbers (B,), the place at which the second segment
        starts, or the number of tokens if there is none (B,), and candidates (B,
        length) for masking.
    """
    text = np.zeros((len(rows), length), np.int32)
    sizes = np.zeros(len(rows), np.int32)
    seconds = np.zeros(len(rows), np.int32)
    candidates = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        if row is None:
            continue
        parts = [
            [begin],
            row.first,
            [end],
            *(() if row.second is None else (row.second, [end])),
        ]
        tokens = np.concatenate(parts)
        text[i, : len(tokens)], sizes[i] = tokens, len(tokens)
        seconds[i] = len(row.first) + 2
        candidates[i, 1 : len(tokens) - 1] = True
        candidates[i, len(row.first) + 1] = False
    return text, sizes, seconds, candidates


def next_tokens(text: np.ndarray, lengths: np.ndarray) -> Masked:
    """Return inputs and labels that predict each next token of `text` (B, T).

    Row b of `text` has lengths[b] tokens.
    """
    places = np.arange(text.shape[1] - 1, dtype=np.int32)
    counts = np.maximum(lengths - 1, 0)
    return Masked(text, np.tile(places, (len(text), 1)), text[:, 1:], counts)
