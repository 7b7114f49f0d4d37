"""Several references for an example, e.g. the five captions of a photograph.

Training takes each of them as an example of its own, evaluation takes those of an
example together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from etils import epath

from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.sources import (
    Source,
    bounds,
    file_name,
    held,
    parallel_files,
)
from transformer_jax.data.tables import tsv_file

# (directory, split, table, column) → the column that the table has or names
ReadColumn = Callable[[epath.PathLike, str, Source, str], Column]


class References(Column):
    """Entries of several texts: entry i has text i of each of `columns`."""

    def __init__(self, columns: Sequence[Column]):
        self._columns = columns

    @property
    def size(self) -> int:
        """The number of texts of an entry."""
        return len(self._columns)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, i: Any) -> Any:
        texts = [column[i] for column in self._columns]
        if isinstance(i, slice):
            return [list(entry) for entry in zip(*texts, strict=True)]
        return texts

    def blocks(self) -> Iterator[bytes]:
        for column in self._columns:
            yield from column.blocks()

    def part(self, start: int, stop: int) -> Self:
        return type(self)([column.part(start, stop) for column in self._columns])


def numbered_files(
    directory: epath.PathLike, split: str, columns: Sequence[str], count: int
) -> Source:
    """Read a column of sources, and references in files with the numbers 0, 1, …, e.g.
    `test.src` and `test.ref0` to `test.ref3` for the columns src and ref.

    For what the files must be, see `parallel_files`.
    """
    source, target = columns
    names = [f"{target}{number}" for number in range(count)]
    read = parallel_files(directory, split, [source, *names])
    references = References([read.column(name) for name in names])
    return Source({source: read.column(source), target: references}, read.where)


def references_table(
    directory: epath.PathLike,
    split: str,
    columns: Sequence[str],
    *,
    table: str,
    count: int,
    read: ReadColumn,
) -> Source:
    """Read a table of all splits that has a line for each reference.

    It has the column "split" and `columns`: the source, e.g. the name of an image, and
    a reference. The references of a source are on adjacent lines. For what else a table
    must be, see `tsv_file`.

    Args:
        directory: folder of the table.
        split: a value of the column "split", or a part, e.g. "train[:90%]".
        columns: the columns of the source and of the references.
        table: name of the file, e.g. "captions.tsv".
        count: the number of references of each source.
        read: returns the column of sources that the table has or names.

    Raises:
        DataError: the split has no line, or a source does not have `count` references
            on adjacent lines.
    """
    source, target = columns
    rows = tsv_file(directory, table.removesuffix(".tsv"), ("split", *columns))
    wanted = file_name(split)
    splits = list(rows.column("split"))
    chosen = [i for i, name in enumerate(splits) if name == wanted]
    if not chosen:
        raise DataError(
            f"{rows.where} has no line of the split {wanted!r}, but of "
            f"{', '.join(sorted(set(splits)))}: set data.train_split, "
            "data.validation_split or data.test_split to one of them"
        )
    names = list(rows.column(source))
    firsts = _first_lines(names, chosen, count, rows)
    texts = rows.column(target)
    references = References(
        [held(texts[i + number] for i in firsts) for number in range(count)]
    )
    lines = [rows.first_line + i for i in firsts]
    whole = Source(
        {source: held(names[i] for i in firsts), target: references},
        rows.where,
        lines=lines,
    )
    sources = read(directory, wanted, whole, source)
    part = bounds(split, len(whole), f"{source}s", rows.where)
    return Source(
        {source: sources.part(*part), target: references.part(*part)}, rows.where
    )


def _first_lines(
    names: Sequence[str], chosen: Sequence[int], count: int, rows: Source
) -> list[int]:
    """Return the first row of each source, if each has `count` adjacent rows.

    `chosen` are the rows of the split, ascending.
    """
    firsts = list[int]()
    sizes = list[int]()
    for i in chosen:
        if firsts and names[i] == names[firsts[-1]] and i == firsts[-1] + sizes[-1]:
            sizes[-1] += 1
        else:
            firsts.append(i)
            sizes.append(1)
    for first, size in zip(firsts, sizes, strict=True):
        if size != count:
            raise DataError(
                f"{rows.place(first)}: {names[first]} has {size} lines from here on, "
                f"but data.references = {count}: give each source the same number of "
                "references, on adjacent lines, or change the key"
            )
    if len({names[first] for first in firsts}) < len(firsts):
        seen = set[str]()
        for first in firsts:
            if names[first] in seen:
                raise DataError(
                    f"{rows.place(first)}: {names[first]} has other lines before: "
                    "put all references of a source on adjacent lines"
                )
            seen.add(names[first])
    return firsts
