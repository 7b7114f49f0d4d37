"""Encode texts of any length as wholes, in bounded memory.

The ids of a text are not those of its lines, one after another: a tokenizer may put a
space before a text, and may have pieces that span line breaks. So a long text is
encoded in parts that overlap, several at a time in parallel threads.

Two parts are joined at a position that no token can span: between two of the words into
which the tokenizer divides a text, or, if it does not divide texts, between two
characters that no piece of its vocabulary holds side by side. In the middle of their
overlap, both must have the same tokens in the same words. This shows that the cut ends
of the parts change nothing there. Parts without such a position are encoded as one.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.progress import progress
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizers import Tokenizer, dtype_of

PART = 2**14  # characters from the start of a part to that of the next one
OVERLAP = 2**10  # characters that a part shares with the next one
EDGE = OVERLAP // 4  # characters at both ends of an overlap that are not compared
BATCH = 2**19  # characters encoded at a time
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece that stands for a byte


class Encoded(NamedTuple):
    """Texts as ids.

    ids: the ids of each text.
    sizes: (texts,) bytes of each text.
    heads: (texts,) bytes of the text before the second token, or of all of it if there
        is none.
    """

    ids: Ragged
    sizes: np.ndarray
    heads: np.ndarray


class _Row(NamedTuple):
    ids: np.ndarray
    size: int
    head: int


class _Part(NamedTuple):
    """A part of a text. `last` is True at the end of the text."""

    text: str
    last: bool
    encoding: Any = None

    @property
    def size(self) -> int:
        """Bytes of the text up to where the next part starts."""
        text = self.text if self.last else self.text[:-OVERLAP]
        return len(text.encode())


def encode_texts(tokenizer: Tokenizer, texts: Iterable[Iterable[str]]) -> Encoded:
    """Return the ids that the tokenizer gives to each whole text.

    A text is an iterable of strings that follow one another, e.g. lines with their
    line endings.
    """
    rows = _by_character if tokenizer.by_character else _by_part
    ids: list[np.ndarray] = [np.zeros(0, dtype_of(tokenizer))]
    sizes: list[int] = []
    heads: list[int] = []
    with progress("encoding text"):
        for row in rows(tokenizer, texts):
            ids.append(row.ids)
            sizes.append(row.size)
            heads.append(row.head if len(row.ids) > 1 else row.size)
    lengths = np.fromiter(map(len, ids[1:]), np.int64, len(sizes))
    joined = Ragged(np.concatenate(ids), lengths)
    return Encoded(joined, np.array(sizes, np.int64), np.array(heads, np.int64))


def _by_character(
    tokenizer: Tokenizer, texts: Iterable[Iterable[str]]
) -> Iterator[_Row]:
    """Yield the row of each text, in which every character is a token."""
    cut = functools.partial(_parts, overlap=0)
    parts = itertools.chain.from_iterable(map(cut, texts))
    before: list[np.ndarray] = []
    size = head = 0
    while batch := list(_first(parts, BATCH)):
        rows = tokenizer.encode([part.text for part in batch])
        for number, part in enumerate(batch):
            head = head if before else len(part.text[:1].encode())
            before.append(rows[number])
            size += len(part.text.encode())
            if part.last:
                yield _Row(np.concatenate(before), size, head)
                before = []
                size = 0


def _by_part(tokenizer: Tokenizer, texts: Iterable[Iterable[str]]) -> Iterator[_Row]:
    """Yield the row of each text, whose parts are encoded and joined."""
    parts = _encoded(tokenizer, itertools.chain.from_iterable(map(_parts, texts)))
    joints = _Joints(tokenizer)
    dtype = dtype_of(tokenizer)

    def ids(part: _Part, start: int, stop: int | None) -> np.ndarray:
        return np.array(part.encoding.ids[start:stop], dtype)

    for part in parts:
        rows: list[np.ndarray] = []
        size = head = begin = 0
        while not part.last:
            following = next(parts)
            shift = len(part.text) - OVERLAP
            joint = joints.find(part.encoding, following.encoding, shift)
            if joint is None:
                part = _fused(tokenizer, part, following, parts)
                continue
            head = head if rows else _head(part)
            first = _tokens_before(part.encoding, begin)
            stop = _tokens_before_end(part.encoding, shift + joint)
            rows.append(ids(part, first, stop))
            size += part.size
            part = following
            begin = joint
        head = head if rows else _head(part)
        first = _tokens_before(part.encoding, begin)
        rows.append(ids(part, first, None))
        yield _Row(np.concatenate(rows), size + part.size, head)


def _parts(text: Iterable[str], overlap: int = OVERLAP) -> Iterator[_Part]:
    """Cut a text into parts. An empty text is one empty part."""
    held = ""
    for string in text:
        held += string
        start = 0
        while len(held) - start > PART + overlap:
            yield _Part(held[start : start + PART + overlap], last=False)
            start += PART
        held = held[start:]
    yield _Part(held, last=True)


def _first(parts: Iterator[_Part], characters: int) -> Iterator[_Part]:
    """Yield parts until they have `characters` characters together."""
    while characters > 0 and (part := next(parts, None)) is not None:
        characters -= len(part.text) + 1
        yield part


def _encoded(tokenizer: Tokenizer, parts: Iterator[_Part]) -> Iterator[_Part]:
    while batch := list(_first(parts, BATCH)):
        encodings = tokenizer.encodings([part.text for part in batch])
        for part, encoding in zip(batch, encodings, strict=True):
            yield part._replace(encoding=encoding)


def _fused(
    tokenizer: Tokenizer, part: _Part, following: _Part, parts: Iterator[_Part]
) -> _Part:
    """Return a part with `following` and more, at least twice as long as `part`.

    Doubling keeps the total cost linear, even if a text cannot be cut at all.
    """
    strings = [part.text, following.text[OVERLAP:]]
    missing = len(part.text) - len(strings[1])
    while missing > 0 and not following.last:
        following = next(parts)
        strings.append(following.text[OVERLAP:])
        missing -= len(strings[-1])
    text = "".join(strings)
    (encoding,) = tokenizer.encodings([text])
    return _Part(text, following.last, encoding)


def _head(part: _Part) -> int:
    """Return the bytes of the text before the second token."""
    text = part.text
    if len(part.encoding) > 1:
        text = text[: _start(part.encoding, 1)]
    return len(text.encode())


def _start(encoding: Any, token: int) -> int:
    """Return the position of the first character that a token stands for."""
    return encoding.token_to_chars(token)[0]


def _tokens_before(encoding: Any, position: int) -> int:
    """Return the number of tokens that start before the character at `position`.

    The search begins at the first token.
    """
    count = 0
    while count < len(encoding) and _start(encoding, count) < position:
        count += 1
    return count


def _tokens_before_end(encoding: Any, position: int) -> int:
    """Return the number of tokens that start before the character at `position`.

    The search begins at the last token.
    """
    count = len(encoding)
    while count > 0 and _start(encoding, count - 1) >= position:
        count -= 1
    return count


class _Token(NamedTuple):
    start: int
    id: int
    begins_word: bool


class _Joints:
    """The positions at which the parts of a text can be joined."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def find(self, left: Any, right: Any, shift: int) -> int | None:
        """Return the position in the text of `right` at which it continues `left`, or
        None if there is none.

        Of several, it is the one nearest to the middle of the overlap. `shift` is the
        position in the text of `left` at which that of `right` starts.
        """
        start = EDGE
        stop = OVERLAP - EDGE
        left_tokens = self._tokens(
            left,
            _tokens_before_end(left, shift + start),
            _tokens_before_end(left, shift + stop),
            shift,
        )
        right_tokens = self._tokens(
            right, _tokens_before(right, start), _tokens_before(right, stop), 0
        )
        if left_tokens != right_tokens:
            return None
        joints = [
            token.start
            for before, token in itertools.pairwise(right_tokens)
            if self._can_be_cut(before, token)
        ]
        return min(joints, key=lambda x: abs(x - OVERLAP // 2), default=None)

    def _can_be_cut(self, before: _Token, token: _Token) -> bool:
        """Return True if two parts can be joined between adjacent tokens."""
        if token.start <= before.start:
            return False
        return token.begins_word or self._apart(before.id, token.id)

    @staticmethod
    def _tokens(encoding: Any, first: int, stop: int, shift: int) -> list[_Token]:
        """Return the tokens `first` to `stop` - 1, whose starts count from `shift`."""
        ids = encoding.ids
        tokens = []
        word = encoding.token_to_word(first - 1) if first > 0 else None
        for i in range(first, stop):
            word_before = word
            word = encoding.token_to_word(i)
            start = _start(encoding, i) - shift
            tokens.append(_Token(start, ids[i], begins_word=word != word_before))
        return tokens

    def _apart(self, left: int, right: int) -> bool:
        """Return True if no piece holds the end of `left` and the start of `right`.

        Texts are then cut between them, whatever surrounds them: no pieces merge into
        one that spans the cut, and no path of likely pieces passes over it.
        """
        if self._pairs is None:
            return False
        unknown_id = self._tokenizer.unk_id
        left_piece, right_piece = self._tokenizer.tokens([left, right])
        if left == right == unknown_id:  # may be one
            return False
        if self._likely:
            hidden = unknown_id in (left, right)
            hidden |= any(map(BYTE.fullmatch, (left_piece, right_piece)))
            if hidden:  # the pieces do not show the characters that they stand for
                return False
        return left_piece[-1:] + right_piece[:1] not in self._pairs

    @functools.cached_property
    def _likely(self) -> bool:
        return self._model["type"] == "Unigram"

    @functools.cached_property
    def _model(self) -> dict[str, Any]:
        return json.loads(self._tokenizer.to_json())["model"]

    @functools.cached_property
    def _pairs(self) -> set[str] | None:
        """All pairs of characters in pieces. None: pieces do not show what merges."""
        model = self._model
        marks = ("continuing_subword_prefix", "end_of_word_suffix")
        if model["type"] not in ("BPE", "Unigram") or any(map(model.get, marks)):
            return None
        pairs: set[str] = set()
        for entry in model["vocab"]:
            piece = entry if isinstance(entry, str) else entry[0]
            pairs.update(a + b for a, b in itertools.pairwise(piece))
        return pairs
