"""Examples for BERT's pre-training: pairs of segments, and masked tokens (Devlin et al. 2019, Section 3.1, Appendix A).

Documents are cut once into chunks of consecutive sentences. In every epoch, each chunk becomes one example, with newly
drawn segments and masks. All draws depend only on the seed and the number of the batch, so a batch is the same after a
restart.

Shapes: B rows · T positions · P masked positions.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.data.examples import longest_first
from transformer_jax.data.ragged import Ragged


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """Choices of the pre-training examples. The defaults are those of the paper."""

    rate: float = 0.15  # fraction of the tokens that are predicted
    mask_share: float = 0.8  # of the predicted tokens, the fraction replaced by [MASK]
    random_share: float = 0.1  # the fraction replaced by a random token; the rest stays as it is
    whole_word: bool = False  # choose whole words instead of pieces
    next_sentence: bool = True  # form pairs of segments, and predict whether the second one follows the first
    short_rate: float = 0.1  # probability of an example shortened to a random length

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if not 0 < self.rate < 1:
            yield "rate", "must be in (0, 1), e.g. 0.15"
        for name in ("mask_share", "random_share", "short_rate"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, "must be in [0, 1]"
        if self.mask_share + self.random_share > 1 + 1e-9:
            yield "random_share", f"must be at most 1 - mask_share = {1 - self.mask_share:g}"


class Segments(NamedTuple):
    """The tokens of an example, without special tokens. `second` is None if there is only one segment."""

    first: np.ndarray
    second: np.ndarray | None
    follows: bool  # the second segment follows the first one in its document


class Documents:
    """Sentences of documents, in chunks from which examples are drawn.

    Args:
        sentences: the tokens of each sentence.
        documents: (sentences,) number of the document of each sentence, ascending.
        room: most tokens of an example, without special tokens. Longer sentences are cut.
        config: choices of the examples.

    Attributes:
        sizes: (chunks,) tokens of each chunk, the most that an example drawn from it has.
        paired: (chunks,) True for chunks that give pairs. A chunk of a single sentence does not.

    Raises:
        ValueError: pairs are requested, but fewer than two documents have more than one sentence.
    """

    def __init__(self, sentences: Ragged, documents: np.ndarray, room: int, config: MaskingConfig):
        self._config, self._room = config, room
        self._sentences, self._documents = sentences.cut(room, end=False), np.asarray(documents)
        self._ends = np.searchsorted(self._documents, self._documents, side="right")  # of each sentence's document
        self._starts, self._stops = _chunks(self._sentences.offsets, self._ends, room)
        self.sizes = self._sentences.offsets[self._stops] - self._sentences.offsets[self._starts]
        self.paired = (self._stops - self._starts > 1) & config.next_sentence
        # A second segment from elsewhere comes from a document of several sentences, like one that follows. If it could
        # be a document of its own, e.g. a caption, its style would give it away.
        _, first, counts = np.unique(self._documents, return_index=True, return_counts=True)
        self._elsewhere = np.flatnonzero(np.repeat(counts > 1, counts))
        if config.next_sentence and (counts > 1).sum() < 2:
            raise ValueError(
                f"{(counts > 1).sum()} of {len(first)} documents have more than one sentence, and next-sentence "
                "prediction needs at least two: separate documents by blank lines and sentences by line breaks, or set "
                "masking.next_sentence = False"
            )

    def draw(self, chunk: int, draw: np.random.Generator) -> Segments:
        """Draw an example from a chunk."""
        start, stop = self._starts[chunk], self._stops[chunk]
        short = draw.random() < self._config.short_rate
        target = int(draw.integers(2, self._room + 1)) if short else self._room
        if not self.paired[chunk]:
            tokens = self._tokens(start, stop)
            return Segments(_trimmed(tokens, min(target, len(tokens)), draw), None, False)
        middle = draw.integers(start + 1, stop)
        first, second, follows = self._tokens(start, middle), self._tokens(middle, stop), bool(draw.random() < 0.5)
        if not follows:
            second = self._from_elsewhere(self._documents[start], len(second), draw)
        sizes = longest_first(np.array([[len(first), len(second)]]), target)[0]
        first, second = (_trimmed(part, size, draw) for part, size in zip((first, second), sizes, strict=True))
        return Segments(first, second, follows)

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        offsets = self._sentences.offsets
        return self._sentences.values[offsets[start] : offsets[stop]]

    def _from_elsewhere(self, document: int, room: int, draw: np.random.Generator) -> np.ndarray:
        """Return consecutive sentences of another document: as many as fit into `room` tokens, but at least one.

        The first sentence is drawn again, up to ten times, if it is longer than `room`: only then would a segment end
        within a sentence, and show by that that it does not follow.
        """
        offsets = self._sentences.offsets
        for _ in range(10):
            start = document_of = -1
            while start < 0 or document_of == document:
                start = int(self._elsewhere[draw.integers(len(self._elsewhere))])
                document_of = self._documents[start]
            if self._sentences.lengths[start] <= room:
                break
        stop = int(np.searchsorted(offsets, offsets[start] + room, side="right")) - 1
        return self._tokens(start, max(min(stop, self._ends[start]), start + 1))[:room]


def _chunks(offsets: np.ndarray, ends: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into chunks [start, stop) of as many sentences as fit into `room` tokens.

    `offsets` (sentences + 1,) are the places of the sentences in the text; `ends` (sentences,) is the end of each
    sentence's document.
    """
    starts, stops, start = [], [], 0
    full = np.searchsorted(offsets, offsets[:-1] + room, side="right") - 1
    limits = np.minimum(np.maximum(full, np.arange(len(ends)) + 1), ends).tolist()
    while start < len(limits):
        starts.append(start)
        stops.append(start := limits[start])
    return np.array(starts, np.int64), np.array(stops, np.int64)


def _trimmed(tokens: np.ndarray, size: int, draw: np.random.Generator) -> np.ndarray:
    """Cut tokens off both ends, each from an end chosen by chance, until `size` are left."""
    start = draw.binomial(len(tokens) - size, 0.5) if size < len(tokens) else 0
    return tokens[start : start + size]


class Masked(NamedTuple):
    """Masked text, and what is to be predicted. Row b has counts[b] predictions; the rest of its P places are zeros."""

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
    draw: np.random.Generator,
    config: MaskingConfig,
    mask_id: int,
    replacements: np.ndarray,
    continues: np.ndarray | None = None,
) -> Masked:
    """Choose tokens to predict, and replace them: 80 % by [MASK], 10 % by a random token, 10 % not at all (A.1).

    In each row, round(rate · candidates) tokens are chosen, at least one. Whole words are chosen in a random order, and
    one that would exceed this number is left out, so there may be fewer.

    Args:
        text: (B, T) token ids.
        candidates: (B, T) True at tokens that may be chosen, i.e. not at special tokens and padding.
        draw: the source of randomness.
        config: rate and shares.
        mask_id: id of [MASK].
        replacements: ids from which random tokens are drawn.
        continues: (ids,) True for pieces that continue a word. If given, whole words are chosen.
    """
    available = candidates.sum(axis=1)
    count = np.where(available > 0, np.maximum(np.rint(config.rate * available), 1), 0).astype(np.int32)
    order = draw.random(text.shape)
    if continues is not None:
        order, count = _by_word(order, candidates, candidates & ~continues[text], count)
    places = np.argsort(np.where(candidates, order, 2), axis=1)[:, : most_masked(text.shape[1], config.rate)]
    chosen = np.arange(places.shape[1]) < count[:, None]
    positions = np.where(chosen, places, 0)
    labels = np.where(chosen, np.take_along_axis(text, positions, axis=1), 0)
    fate, others = draw.random(places.shape), replacements[draw.integers(len(replacements), size=places.shape)]
    new = np.where(
        fate < config.mask_share, mask_id, np.where(fate < config.mask_share + config.random_share, others, labels)
    )
    masked = text.copy()
    rows = np.broadcast_to(np.arange(len(text))[:, None], places.shape)
    masked[rows[chosen], positions[chosen]] = new[chosen]
    return Masked(masked, positions.astype(np.int32), labels.astype(np.int32), count)


def _by_word(
    order: np.ndarray, candidates: np.ndarray, starts: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return an order in which the tokens of chosen words come first, and their number in each row."""
    chosen_first, found = np.full_like(order, 1.5), np.zeros_like(count)
    for row, limit in enumerate(count):
        places = np.flatnonzero(candidates[row])
        words = np.split(places, np.flatnonzero(starts[row, places])[1:]) if len(places) else []
        for i in np.argsort(order[row, : len(words)]):
            if found[row] + len(words[i]) <= limit:
                chosen_first[row, words[i]] = found[row] / (1 + limit)
                found[row] += len(words[i])
    return chosen_first, found


def assemble(
    rows: Sequence[Segments | None], length: int, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay out [CLS] first [SEP] second [SEP], or [CLS] first [SEP].

    `begin` and `end` are the ids of [CLS] and [SEP]. A row of None is a filler row.

    Returns:
        Token ids (B, length), their numbers (B,), the place at which the second segment starts, or the number of
        tokens if there is none (B,), and candidates (B, length) for masking.
    """
    text = np.zeros((len(rows), length), np.int32)
    sizes, seconds = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    candidates = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        if row is None:
            continue
        parts = [[begin], row.first, [end], *(() if row.second is None else (row.second, [end]))]
        tokens = np.concatenate(parts)
        text[i, : len(tokens)], sizes[i] = tokens, len(tokens)
        seconds[i] = len(row.first) + 2
        candidates[i, 1 : len(tokens) - 1] = True
        candidates[i, len(row.first) + 1] = False
    return text, sizes, seconds, candidates
