"""Translation in several directions by one model (Johnson et al. 2017).

A token before the source names the language of the target, e.g. "<2de>" for German.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.sources import Source, parallel_files
from transformer_jax.data.tokenizers import Tokenizer

DIRECTION = re.compile(r"([^\s\[\]:-]+)-([^\s\[\]:-]+)")
# A split, and the only direction that is wanted, e.g. "test:de-fr".
SPLIT_OF_DIRECTION = re.compile(rf"(.+):({DIRECTION.pattern})")


def languages_of(direction: str) -> tuple[str, str]:
    """Return the languages of source and target, e.g. "en" and "de" for "en-de".

    Raises:
        DataError: the direction is not of this form, or both languages are the same.
    """
    match = DIRECTION.fullmatch(direction)
    if match is None or match[1] == match[2]:
        raise DataError(
            f"{direction!r} is no direction of translation: "
            "write two different languages, e.g. en-de"
        )
    return match[1], match[2]


def mark_of(language: str) -> str:
    """Return the token that asks for a target in this language."""
    return f"<2{language}>"


def marks_of(directions: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of all languages of targets, each once."""
    targets = (languages_of(direction)[1] for direction in directions)
    return tuple(mark_of(language) for language in dict.fromkeys(targets))


def divided(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Return the token at the beginning of a text, or "", and the text behind it.

    `marks` are the tokens that may stand there.
    """
    first, _, rest = text.lstrip().partition(" ")
    return (first, rest) if first in marks else ("", text)


class Marked(Column):
    """The lines of a column, each behind a token and a space. A blank line is empty."""

    def __init__(self, lines: Column, mark: str):
        self._lines = lines
        self._mark = mark

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._marked(line) for line in self._lines[i]]
        return self._marked(self._lines[i])

    def _marked(self, line: str) -> str:
        return f"{self._mark} {line}" if line.strip() else ""

    def blocks(self) -> Iterator[bytes]:
        yield self._mark.encode()
        yield from self._lines.blocks()

    def part(self, start: int, stop: int) -> Self:
        return type(self)(self._lines.part(start, stop), self._mark)


class Joined(Column):
    """The entries of several columns, one column after another."""

    def __init__(self, columns: Sequence[Column]):
        self._columns = columns

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each column."""
        return [len(column) for column in self._columns]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if i < 0:
            i += len(self)
        for column in self._columns:
            if 0 <= i < len(column):
                return column[i]
            i -= len(column)
        raise IndexError(f"There is no entry {i} behind the last.")

    def __iter__(self) -> Iterator[Any]:
        for column in self._columns:
            yield from column

    def blocks(self) -> Iterator[bytes]:
        for column in self._columns:
            yield from column.blocks()

    def part(self, start: int, stop: int) -> Self:
        parts = []
        first = 0
        for column in self._columns:
            begin = max(start - first, 0)
            end = min(stop - first, len(column))
            if begin < end:
                parts.append(column.part(begin, end))
            first += len(column)
        return type(self)(parts)


def directions_files(
    directory: epath.PathLike,
    split: str,
    columns: Sequence[str],
    directions: Sequence[str],
) -> Source:
    """Read parallel texts in each direction, one after another, see `parallel_files`.

    Args:
        directory: folder of the files, one for each split and language.
        split: e.g. "val", or one direction of it, e.g. "val:de-fr". This direction may
            be one that is not in `directions`.
        columns: names for source and target.
        directions: pairs of languages, e.g. "en-de".

    Raises:
        DataError: a file is missing or unreadable, or the files of a direction differ
            in their number of lines.
    """
    if match := SPLIT_OF_DIRECTION.fullmatch(split):
        split = match[1]
        directions = (match[2],)
    marked = []
    targets = []
    places = []
    for direction in directions:
        source, target = languages_of(direction)
        read = parallel_files(directory, split, (source, target))
        marked.append(Marked(read.column(source), mark_of(target)))
        targets.append(read.column(target))
        places.append(read.where)
    joined = (Joined(marked), Joined(targets))
    return Source(dict(zip(columns, joined, strict=True)), ", ".join(places))


def groups_of(lines: Sequence[str], marks: Sequence[str]) -> np.ndarray:
    """Return the number of each line's token among `marks` (n,), 0 for a blank line."""
    numbers = {mark: number for number, mark in enumerate(marks)}
    found = (numbers.get(divided(line, marks)[0], 0) for line in lines)
    return np.fromiter(found, np.int32, len(lines))


def encode_marked(
    tokenizer: Tokenizer,
    lines: Sequence[str],
    marks: Sequence[str],
    kept: Sequence[str],
    **added: int | None,
) -> Ragged:
    """Return the ids of each line, of which the first is that of its token.

    A blank line has no token.

    Args:
        tokenizer: has an id for each of `kept`.
        lines: texts, each behind one of `marks` and a space.
        marks: the tokens that may stand there.
        kept: those of them that have an id in the result; all, or none.
        added: see `Tokenizer.encode`.

    Raises:
        DataError: a line begins with none of `marks`, or the tokenizer lacks one.
    """
    ids = {mark: i for mark in kept if (i := tokenizer.id_of(mark)) is not None}
    if missing := [mark for mark in kept if mark not in ids]:
        raise DataError(
            f"the tokenizer has no token {', '.join(missing)}: "
            "use one that was trained with the same data.directions"
        )
    first = []
    texts = []
    for number, line in enumerate(lines, 1):
        mark, text = divided(line, marks)
        if line.strip() and not mark:
            raise DataError(
                f"line {number} is {line[:60]!r}: it must begin with the language of "
                f"the translation, which is one of {', '.join(marks)}, and a space"
            )
        first.append([ids[mark]] if mark in ids else [])
        texts.append(text)
    return Ragged.beside([Ragged.of(first), tokenizer.encode(texts, **added)])
