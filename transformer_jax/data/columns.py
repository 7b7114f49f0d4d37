"""A column: one kind of content of the examples of a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self


class Column(Sequence[Any]):
    """Entries of a column, e.g. lines of text or arrays, read on access."""

    @abstractmethod
    def blocks(self) -> Iterator[bytes]:
        """Yield the content as bytes, for a hash of it."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Self:
        """Return the entries `start` to `stop` - 1."""


class Sourced(NamedTuple):
    """The reference or references of an example, and the text of its source."""

    texts: str | Sequence[str]
    source: str


def texts_of(entry: str | Sequence[str] | Sourced) -> Sequence[str]:
    """Return the texts of an entry, which may be a single one."""
    if isinstance(entry, Sourced):
        entry = entry.texts
    return [entry] if isinstance(entry, str) else entry


class WithSources(Sequence[Sourced]):
    """References with the text of their source beside each, for scores that compare an
    output with both.

    references: an entry for each example, a text or several.
    sources: as many texts.
    """

    def __init__(self, references: Sequence[Any], sources: Sequence[str]):
        self.references = references
        self._sources = sources

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return Sourced(self.references[i], self._sources[i])


class ArrayRecords(Sequence[dict[str, Any]]):
    """The entries of a column of arrays as records, {column: array}."""

    def __init__(self, name: str, column: Any):
        self._name = name
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def blocks(self) -> Iterator[bytes]:
        """Yield the content of a column that is read from files, for a hash of it."""
        yield from self._column.blocks()

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return {self._name: self._column[i]}
