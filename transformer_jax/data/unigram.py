"""Encode text with a unigram model as SentencePiece and Marian do (Kudo and Richardson
2018).

The library `tokenizers` finds the most probable pieces. What it does otherwise is done
here: it replaces characters by the shortest rule that matches instead of the longest,
and gives an unknown piece the unknown id without looking it up.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tokenizers

HIDDEN = "\0"  # before tokens as which no text is encoded
# replaces HIDDEN in a text: a character that means nothing, so no model has a piece
# with it
NO_TEXT = "\U0010ffff"
SPACE = "▁"
LABEL = 0x800000FF  # the bits of a node that hold the byte leading to it


class CharacterMap:
    """Replacements of strings, compiled by SentencePiece.

    They are a trie over bytes, a double array of the library Darts-clone. Its size
    precedes it, and the replacements follow it, each with a zero byte at its end.

    Attributes:
        starts: the characters that are replaced when they stand alone, and those that
            continue a longer rule. In a text without them, nothing is replaced.

    Raises:
        ValueError or IndexError: `content` is damaged.
    """

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def cached(content: bytes) -> CharacterMap:
        """Return the map of `content`, which takes a quarter of a second to read."""
        return CharacterMap(content)

    def __init__(self, content: bytes):
        size = int.from_bytes(content[:4], "little")
        self._units = (
            np.frombuffer(content, "<u4", size // 4, offset=4)
            if content
            else np.zeros(1, "<u4")
        )
        self._list = self._units.tolist()
        self._replacements = content[4 + size :]
        nodes, first = self._characters(np.zeros(1, np.int64))
        _, second = self._characters(nodes)
        single = first[self._units[nodes] >> 8 & 1 == 1]
        self.starts = frozenset(map(chr, np.union1d(single, second).tolist()))

    def _characters(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the nodes one character below `nodes`, and the code point that
        leads to each.
        """
        starts = [nodes[:0]]
        codes = [nodes[:0]]
        points = np.zeros(len(nodes), np.int64)
        byte_values = np.arange(1, 256)
        for byte_number in range(4):
            bases = nodes ^ _offset(self._units[nodes]).astype(np.int64)
            children = bases[:, None] ^ byte_values
            children = np.where(children < len(self._units), children, 0)
            exists = (self._units[children] & LABEL) == byte_values
            rows, columns = np.nonzero(exists)
            nodes = children[rows, columns]
            values = byte_values[columns]
            if byte_number == 0:  # the first byte of a character says how many follow
                more = np.searchsorted([0xC0, 0xE0, 0xF0], values, "right")
                points = values & np.array([0x7F, 0x1F, 0x0F, 0x07])[more]
            else:
                more = more[rows] - 1
                points = points[rows] << 6 | values & 0x3F
            starts.append(nodes[more == 0])
            codes.append(points[more == 0])
            nodes = nodes[more > 0]
            points = points[more > 0]
            more = more[more > 0]
        return np.concatenate(starts), np.concatenate(codes)

    def longest(self, text: str, start: int) -> tuple[int, str] | None:
        """Return the end and the replacement of the longest string at `start` that
        is replaced, or None.
        """
        units = self._list
        node = _offset(self._list[0])
        best = None
        for end in range(start, len(text)):
            for byte in text[end].encode():
                node ^= byte
                if node >= len(units) or units[node] & LABEL != byte:
                    return best
                leaf = units[node] >> 8 & 1
                node ^= _offset(units[node])
            if leaf:
                first = units[node] & 0x7FFFFFFF
                value = self._replacements[first : self._replacements.index(0, first)]
                best = end + 1, value.decode()
        return best


def _offset(units: Any) -> Any:
    """Return the offset to the children of nodes."""
    return (units >> 10) << (units >> 6 & 8)


class Normalizer:
    """Normalization of text by a compiled character map, with "▁" before the text and
    for single spaces in it.

    At each position of the text, the longest rule that matches is applied; then spaces
    at both ends are removed and those in a row joined.

    Args:
        character_map: the compiled rules; b"" for none.
    """

    def __init__(self, character_map: bytes):
        self._map = CharacterMap.cached(character_map)

    def __call__(self, text: str) -> str:
        plain = "".join(part for part, _, _ in self._parts(text))
        plain = re.sub(" {2,}", " ", plain.lstrip(" "))
        return (SPACE + plain.replace(" ", SPACE)).rstrip(SPACE)

    def aligned(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the normalized text, and for each of its characters the part
        [start, end) of `text` it stands for.
        """
        characters = [SPACE]
        places = [(0, 0)]
        spaced = True
        for part, start, end in self._parts(text):
            whole = end - start == len(part)
            for i, character in enumerate(part):
                if not (spaced and character == " "):
                    characters.append(SPACE if character == " " else character)
                    places.append((start + i, start + i + 1) if whole else (start, end))
                spaced = character == " "
        normalized = "".join(characters).rstrip(SPACE)
        places[0] = places[1] if len(normalized) > 1 else (0, 0)
        return normalized, places[: len(normalized)]

    def _parts(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield parts of the result, and the start and end of the text that each
        stands for.
        """
        text = text.replace(HIDDEN, NO_TEXT)
        done = 0
        starts = self._map.starts
        start = len(text) if starts.isdisjoint(text) else 0
        while start < len(text):
            likely = not starts.isdisjoint(text[start : start + 2])
            rule = self._map.longest(text, start) if likely else None
            if rule is None:
                start += 1
                continue
            yield text[done:start], done, start
            done, replacement = rule
            yield replacement, start, done
            start = done
        yield text[done:], done, len(text)


class Encoding(NamedTuple):
    """The ids of a text, and the part [start, end) of it that each stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Encoder:
    """The ids of text in Marian's vocabulary.

    A language code at the start of a text, e.g. ">>de<<", is a token. The rest is
    normalized and divided into pieces. Characters in a row that are not pieces are one
    piece. Each piece is looked up in the vocabulary.

    Args:
        library: pieces and tokens. Those of the vocabulary have the ids below `size`.
            Tokens that are not pieces begin with `HIDDEN`.
        settings: the "character_map", in base64, and the "size" of the vocabulary.
        unknown: the id of pieces that the vocabulary lacks.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, settings: Mapping[str, Any], unknown: int
    ):
        self._library = library
        self._unknown = unknown
        self.size = settings["size"]
        self._normalizer = Normalizer(base64.b64decode(settings["character_map"]))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or None if there is none."""
        ids = (self._library.token_to_id(name) for name in (token, HIDDEN + token))
        return next((i for i in ids if i is not None and i < self.size), None)

    def encode_batch_fast(
        self, lines: Iterable[str], add_special_tokens: bool = False
    ) -> list[Encoding]:
        """Return the ids of each line, without the parts that they stand for."""
        divided = list(map(_divided, lines))
        texts = [self._normalizer(text) for _, text in divided]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        rows = [self._coded(code) for code, _ in divided]
        for row, text, encoding in zip(rows, texts, encodings, strict=True):
            ids = encoding.ids
            if max(ids, default=0) >= self.size or self._unknown in ids:
                ids = self._looked_up(
                    text, self._library.encode(text, add_special_tokens=False)
                )
            row.extend(ids)
        return [Encoding(row, []) for row in rows]

    def encode_batch(
        self, lines: Iterable[str], add_special_tokens: bool = False
    ) -> list[Encoding]:
        """Return the ids of each line, and the parts that they stand for."""
        divided = list(map(_divided, lines))
        aligned = [self._normalizer.aligned(text) for _, text in divided]
        encodings = self._library.encode_batch(
            [text for text, _ in aligned], add_special_tokens=False
        )
        rows = []
        for (code, _), (text, places), encoding in zip(
            divided, aligned, encodings, strict=True
        ):
            ids = self._coded(code)
            offsets = [(0, len(code))] * len(ids)
            for start, end in encoding.offsets:
                offsets.append(
                    (len(code) + places[start][0], len(code) + places[end - 1][1])
                )
            rows.append(Encoding(ids + self._looked_up(text, encoding), offsets))
        return rows

    def _coded(self, code: str) -> list[int]:
        return [self._looked(code)] if code else []

    def _looked_up(self, text: str, encoding: tokenizers.Encoding) -> list[int]:
        return [self._looked(text[start:end]) for start, end in encoding.offsets]

    def _looked(self, token: str) -> int:
        i = self.id_of(token)
        return self._unknown if i is None else i


def _divided(line: str) -> tuple[str, str]:
    """Return the language code of a line, or "", and the rest."""
    end = line.find("<<") + 2 if line.startswith(">>") and "<<" in line else 0
    return line[:end], line[end:]
