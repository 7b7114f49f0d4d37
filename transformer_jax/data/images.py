"""Images and other grids of numbers in files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax.data.arrays import (
    Arrays,
    array_file,
    is_array_file,
    read_array,
)
from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.sources import Source, parallel_files


def grid_of(text: str, directory: epath.PathLike = ".") -> np.ndarray:
    """Return the array that a text is, a JSON list of rows, or that of the .npy file
    which it names, relative to `directory`.

    Raises:
        DataError: the text is no array, or the file cannot be read.
    """
    if not text.lstrip().startswith("["):
        return read_array(epath.Path(directory).expanduser() / text)
    try:
        return np.asarray(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{text[:40]!r} is no array: {error}. Write it as a JSON list of rows, "
            "or name a .npy file."
        ) from error


class Grids(Column):
    """The arrays of lines of text (see `grid_of`), read on access.

    Args:
        lines: the texts.
        directory: folder of the files that they name.
        places: file and line of each text, for messages.
    """

    def __init__(
        self, lines: Sequence[str], directory: epath.PathLike, places: Sequence[str]
    ):
        self._lines = lines
        self._directory = directory
        self._places = places

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        try:
            return grid_of(self._lines[i], self._directory)
        except DataError as error:
            raise DataError(f"{self._places[i]}: {error}") from error

    def blocks(self) -> Iterator[bytes]:
        for grid in self:
            yield f"{grid.dtype.str} {grid.shape}".encode()
            yield grid.tobytes()

    def part(self, start: int, stop: int) -> Self:
        lines = self._lines[start:stop]
        return type(self)(lines, self._directory, self._places[start:stop])


def grids_of(
    directory: epath.PathLike,
    split: str,
    table: Source,
    column: str,
    shape: tuple[int, ...],
) -> Column:
    """Return the grids of a table: `{split}.{column}.npy`, whose rows are in the order
    of the table, or if there is no such file, what the table names, see `grid_of`.

    Raises:
        DataError: the file has another number of grids, or they have another shape.
    """
    name = f"{split}.{column}"
    if not is_array_file(directory, name):
        return Grids(table.column(column), directory, _places(table))
    path, grids = array_file(directory, name)
    if len(grids) != len(table):
        raise DataError(
            f"{path} has {len(grids)} rows, but {table.where} has {len(table)} "
            f"{column}s of the split {split}: they must be the same, in the same order"
        )
    *sizes, channels = shape
    of_file = grids.values.shape[1:]
    if of_file != tuple(shape) and not (channels == 1 and of_file == tuple(sizes)):
        raise DataError(
            f"{path} has grids of the shape {of_file}: "
            f"must be input.grid_shape = {shape}; make the file again or change the key"
        )
    return grids


def _places(source: Source) -> list[str]:
    """Return file and line of each entry of a source."""
    return [source.place(i) for i in range(len(source))]


def grid_files(directory: epath.PathLike, split: str, columns: Sequence[str]) -> Source:
    """Read columns as `parallel_files` does. If the first is no file of arrays, its
    lines are arrays as JSON, or names of .npy files relative to `directory`.
    """
    source = parallel_files(directory, split, columns)
    read = {name: source.column(name) for name in columns}
    first = read[columns[0]]
    if not isinstance(first, Arrays):
        read[columns[0]] = Grids(first, directory, _places(source))
    return Source(read, source.where, source.first_line)
