"""Images and other grids of numbers in files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax.data.arrays import Arrays, read_array
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
        where: file of the lines, for messages.
    """

    def __init__(self, lines: Sequence[str], directory: epath.PathLike, where: str):
        self._lines = lines
        self._directory = directory
        self._where = where

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        try:
            return grid_of(self._lines[i], self._directory)
        except DataError as error:
            raise DataError(f"{self._where}, example {i + 1}: {error}") from error

    def blocks(self) -> Iterator[bytes]:
        for grid in self:
            yield f"{grid.dtype.str} {grid.shape}".encode()
            yield grid.tobytes()

    def part(self, start: int, stop: int) -> Self:
        return type(self)(self._lines[start:stop], self._directory, self._where)


def grid_files(directory: epath.PathLike, split: str, columns: Sequence[str]) -> Source:
    """Read columns as `parallel_files` does. If the first is no file of arrays, its
    lines are arrays as JSON, or names of .npy files relative to `directory`.
    """
    source = parallel_files(directory, split, columns)
    read = {name: source.column(name) for name in columns}
    first = read[columns[0]]
    if not isinstance(first, Arrays):
        read[columns[0]] = Grids(first, directory, source.where)
    return Source(read, source.where, source.first_line)
