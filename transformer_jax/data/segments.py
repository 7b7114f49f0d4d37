"""Segments of text and pairs of them, drawn from documents of sentences (Devlin et al.
2019, Appendix A.2).

Differs: A chunk holds only whole sentences; the paper's segments are cut to the room
where they exceed it. A chunk of one sentence gives no pair. A segment that does not
follow is drawn to be as long as the one that does. A shortened example loses tokens at
its ends; the paper makes more examples of the rest.
"""

from typing import NamedTuple

import numpy as np

from transformer_jax.data.examples import longest_first
from transformer_jax.data.ragged import Ragged, ranges
from transformer_jax.errors import UserError

CLOSE = 20  # fewest segments from which one that does not follow is drawn


class Segments(NamedTuple):
    """The tokens of an example, without special tokens.

    `second` is None if there is only one segment.
    """

    first: np.ndarray
    second: np.ndarray | None
    follows: bool  # the second segment follows the first one in its document


class Documents:
    """Sentences of documents, in chunks from which examples are drawn.

    Sentences without tokens are left out.

    A second segment that does not follow the first one is the second segment of a pair
    in another document, with as many tokens as the one that follows, if possible. So
    neither its length nor where it begins and ends gives it away.

    Args:
        sentences: the tokens of each sentence.
        documents: (sentences,) number of the document of each sentence, ascending.
        room: most tokens of an example, without special tokens. Longer sentences are
            cut.
        pairs: draw pairs of segments, from chunks of several sentences.
        short_rate: probability of an example shortened to a random length.

    Attributes:
        sizes: (chunks,) tokens of each chunk, the most that an example drawn from it
            has.
        paired: (chunks,) True for chunks that give pairs. A chunk of a single sentence
            does not.

    Raises:
        ValueError: pairs are requested, but fewer than two documents have chunks that
            give pairs.
    """

    def __init__(
        self,
        sentences: Ragged,
        documents: np.ndarray,
        room: int,
        pairs: bool,
        short_rate: float,
    ):
        filled = np.flatnonzero(sentences.lengths)
        self._room = room
        self._short_rate = short_rate
        self._sentences = sentences.take(filled).cut(room, end=False)
        self._documents = np.asarray(documents)[filled]
        # of each sentence's document
        ends = np.searchsorted(self._documents, self._documents, side="right")
        self._starts, self._stops = chunks_of(self._sentences.offsets, ends, room)
        offsets = self._sentences.offsets
        self.sizes = offsets[self._stops] - offsets[self._starts]
        self.paired = (self._stops - self._starts > 1) & pairs
        self._tails = _Tails.of(
            offsets,
            self._documents,
            self._starts[self.paired],
            self._stops[self.paired],
        )
        several = len(np.unique(self._tails.documents))
        if pairs and several < 2:
            raise UserError(
                f"{several} of {len(np.unique(documents))} documents "
                f"have two consecutive sentences of at most {room} tokens together, "
                "and next-sentence prediction needs at least two such documents: "
                "separate documents by blank lines and sentences by line breaks, "
                "raise data.max_length, or set masking.next_sentence = False"
            )

    def draw(self, chunk: int, draw: np.random.Generator) -> Segments:
        """Draw an example from a chunk."""
        start = self._starts[chunk]
        stop = self._stops[chunk]
        short = draw.random() < self._short_rate
        target = int(draw.integers(2, self._room + 1)) if short else self._room
        if not self.paired[chunk]:
            tokens = self._tokens(start, stop)
            tokens = _trimmed(tokens, min(target, len(tokens)), draw)
            return Segments(tokens, None, False)
        middle = draw.integers(start + 1, stop)
        first = self._tokens(start, middle)
        second = self._tokens(middle, stop)
        follows = bool(draw.random() < 0.5)
        if not follows:
            second = self._from_elsewhere(self._documents[start], len(second), draw)
        lengths = np.array([[len(first), len(second)]])
        first_size, second_size = longest_first(lengths, target)[0]
        first = _trimmed(first, first_size, draw)
        second = _trimmed(second, second_size, draw)
        return Segments(first, second, follows)

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        offsets = self._sentences.offsets
        return self._sentences.values[offsets[start] : offsets[stop]]

    def _from_elsewhere(
        self, document: int, size: int, draw: np.random.Generator
    ) -> np.ndarray:
        """Return the second segment of a pair in another document, drawn from those of
        `size` tokens.

        If there are few of them, the next shorter ones are included.
        """
        tails = self._tails
        # at least 1, as there is a tail of `size` tokens
        right = int(np.searchsorted(tails.lengths, size, side="right"))
        left = int(np.searchsorted(tails.lengths, size))
        left = max(min(left, right - CLOSE), 0)
        is_elsewhere = tails.documents != document
        weights = np.where(is_elsewhere[left:right], tails.weights[left:right], 0)
        cumulated = np.cumsum(weights)
        if cumulated[-1]:
            drawn = draw.random() * cumulated[-1]
            number = int(np.searchsorted(cumulated, drawn, side="right"))
            tail = left + min(number, len(cumulated) - 1)
        else:  # in a small corpus: the longest that fits, or else the shortest
            elsewhere = np.flatnonzero(is_elsewhere)
            longest = int(np.searchsorted(elsewhere, right)) - 1
            tail = elsewhere[max(longest, 0)]
        return self._tokens(tails.starts[tail], tails.stops[tail])[:size]


class _Tails(NamedTuple):
    """Every second segment that a pair can have, sorted by length: sentences [start,
    stop).
    """

    starts: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray  # tokens
    documents: np.ndarray
    # probability of this segment when a pair is drawn from its chunk
    weights: np.ndarray

    @classmethod
    def of(
        cls,
        offsets: np.ndarray,
        documents: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
    ) -> "_Tails":
        """Return the tails of the chunks [start, stop)."""
        counts = stops - starts - 1
        chunk = np.repeat(np.arange(len(starts)), counts)
        first = ranges(starts + 1, counts)
        lengths = offsets[stops[chunk]] - offsets[first]
        order = np.argsort(lengths, kind="stable")
        first = first[order]
        chunk = chunk[order]
        return cls(
            first, stops[chunk], lengths[order], documents[first], 1 / counts[chunk]
        )


def chunks_of(
    offsets: np.ndarray, ends: np.ndarray, room: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into chunks [start, stop) of as many sentences as fit into `room`
    tokens.

    `offsets` (sentences + 1,) are the starts of the sentences in the text; `ends`
    (sentences,) is the end of each sentence's document.
    """
    starts = []
    stops = []
    start = 0
    full = np.searchsorted(offsets, offsets[:-1] + room, side="right") - 1
    limits = np.minimum(np.maximum(full, np.arange(len(ends)) + 1), ends).tolist()
    while start < len(limits):
        starts.append(start)
        stops.append(start := limits[start])
    return np.array(starts, np.int64), np.array(stops, np.int64)


def _trimmed(tokens: np.ndarray, size: int, draw: np.random.Generator) -> np.ndarray:
    """Cut tokens off both ends, each from an end chosen by chance, until `size` are
    left.
    """
    start = draw.binomial(len(tokens) - size, 0.5) if size < len(tokens) else 0
    return tokens[start : start + size]
