"""Columns of arrays: memory-mapped .npy files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.files import is_for_user

MAPPED_AT_ONCE = 1000  # entries


class Arrays(Column):
    """Arrays of one shape, or of one shape except for the length of their first axis.

    Args:
        values: entry i is values[i].
        offsets: (entries + 1,). If given, entry i is instead values[offsets[i] :
            offsets[i + 1]].
    """

    def __init__(self, values: np.ndarray, offsets: np.ndarray | None = None):
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"There is no entry {i} in {len(self)} entries.")
        if self.offsets is None:
            return self.values[i]
        start, stop = self.offsets[i % len(self) :][:2]
        return self.values[start:stop]

    def blocks(self) -> Iterator[bytes]:
        """Yield the shapes, the type and the content."""
        values = self.values
        yield f"{values.dtype.str} {values.shape[1:]} {len(self)}".encode()
        first = 0
        last = len(values)
        if self.offsets is not None:
            yield np.diff(self.offsets).astype("<i8").tobytes()
            first, last = self.offsets[[0, -1]].tolist()
        for start in range(first, last, MAPPED_AT_ONCE):
            yield values[start : min(start + MAPPED_AT_ONCE, last)].tobytes()

    def part(self, start: int, stop: int) -> Self:
        if self.offsets is None:
            return type(self)(self.values[start:stop])
        return type(self)(self.values, self.offsets[start : stop + 1])


def is_array_file(directory: epath.PathLike, name: str) -> bool:
    """Return True if `directory` has `name`.npy."""
    return (epath.Path(directory).expanduser() / f"{name}.npy").exists()


def array_file(directory: epath.PathLike, name: str) -> tuple[epath.Path, Arrays]:
    """Read `name`.npy, with the offsets of `name`.offsets.npy if there is such a file.

    Returns:
        The path, and the arrays.

    Raises:
        DataError: a file cannot be read, or the offsets do not fit.
    """
    folder = epath.Path(directory).expanduser()
    path = folder / f"{name}.npy"
    values = read_array(path)
    if not values.ndim:
        raise DataError(f"{path} has no axes: its first axis must count the entries.")
    if not is_array_file(directory, f"{name}.offsets"):
        return path, Arrays(values)
    offsets = np.asarray(read_array(folder / f"{name}.offsets.npy"))
    if (
        offsets.ndim != 1
        or not np.issubdtype(offsets.dtype, np.integer)
        or not len(offsets)
        or offsets[0] != 0
        or offsets[-1] != len(values)
        or (np.diff(offsets) < 0).any()
    ):
        raise DataError(
            f"The offsets of {path} must be whole numbers that ascend from 0 to "
            f"{len(values)}, the length of its first axis: write {name}.offsets.npy "
            "again."
        )
    return path, Arrays(values, offsets)


def read_array(path: epath.Path) -> np.ndarray:
    """Return the array of a .npy file, memory-mapped if it is local.

    Raises:
        DataError: the file cannot be read, holds Python objects, or is another kind.
    """
    try:
        if "://" in str(path):
            values = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        else:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and not is_for_user(error):
            raise
        raise DataError(
            f"{path} cannot be read as .npy: {error}. Copy it again."
        ) from error
    if not isinstance(values, np.ndarray):  # an archive of several
        raise DataError(f"{path} is no .npy file of one array: write it with np.save.")
    return values
