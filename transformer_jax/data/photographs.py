"""Photographs in files, read by Pillow.

A picture becomes RGB bytes of one size, whatever its file holds:

- Another size is scaled, so proportions may change. A picture of one pixel becomes a
  uniform one.
- Transparent parts become white. Palettes, greyscale and CMYK become RGB; colour
  profiles are ignored. Of an animation, the first frame is read.
- The orientation that a camera noted (EXIF) is applied.
- More than `MOST_PIXELS` pixels are refused before they are decoded, and so are values
  of more than 8 bits in a channel, files that end too early, and other formats than
  `FORMATS`.
"""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.sources import Source, file_name
from transformer_jax.data.tables import tsv_file
from transformer_jax.errors import UserError
from transformer_jax.files import is_for_user

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MOST_PIXELS = 2**26  # of a file: 8,192 × 8,192
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")  # modes of more than 8 bits
# what decoders raise for damaged files
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)

Read = Callable[[str], bytes]


def photograph(content: bytes, size: tuple[int, ...]) -> np.ndarray:
    """Return the RGB bytes (rows, columns, 3) of the content of a file.

    `size` is (rows, columns).

    Raises:
        DataError: the content is no picture of 8 bits, is damaged or is too large.
        UserError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "photographs need Pillow: pip install -c constraints.txt -e '.[images]' "
            "in the folder of transformer_jax"
        ) from error
    limit = f"has more than {MOST_PIXELS:,} pixels: scale it down"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        # only the header is read so far
        if image.width * image.height > MOST_PIXELS:
            raise DataError(f"is {image.width} × {image.height}, but {limit}")
        if _is_deep(image):
            raise DataError("has more than 8 bits in a channel: convert it to 8 bits")
        return _scaled(_rgb(image), size)
    except Image.DecompressionBombError as error:
        raise DataError(limit) from error
    except UserError:
        raise
    except DAMAGE as error:
        reason = str(error).split(" <_io.BytesIO")[0]
        raise DataError(
            f"cannot be read as a picture: {reason}. Copy it again, or save it as "
            f"one of {', '.join(FORMATS)}"
        ) from error


def _is_deep(image: Any) -> bool:
    """Return True for a picture with more than 8 bits in a channel.

    Pillow reads colours of 16 bits in a mode of 8 bits. Only the arguments of the
    decoder tell: the mode of the file, e.g. "RGB;16B", or the largest value of a PPM
    file.
    """
    if image.mode in DEEP:
        return True
    for tile in image.tile:
        arguments = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        for argument in arguments:
            if isinstance(argument, str) and ";16" in argument:
                return True
            if image.format == "PPM" and isinstance(argument, int) and argument > 255:
                return True
    return False


def _rgb(image: Any) -> Any:
    """Return a picture upright and in RGB, on white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _scaled(image: Any, size: tuple[int, ...]) -> np.ndarray:
    from PIL import Image

    rows, columns = size
    if image.size != (columns, rows):
        image = image.resize((columns, rows), Image.Resampling.LANCZOS)
    return np.asarray(image, np.uint8)


def read_photograph(path: epath.PathLike, size: tuple[int, ...]) -> np.ndarray:
    """Return `photograph` of a file.

    Raises:
        DataError: see there, or the file cannot be read. The message names the file.
    """
    try:
        return photograph(_content(epath.Path(path).expanduser()), size)
    except DataError as error:
        raise DataError(f"{path} {error}") from error


def _content(path: epath.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if not is_for_user(error):
            raise
        reason = error.strerror or str(error)
        raise DataError(
            f"cannot be read: {reason}. Check the name, or copy the file"
        ) from error


class Photographs(Column):
    """The RGB bytes (rows, columns, 3) of pictures in files, decoded on access.

    Args:
        names: the files.
        places: file and line of each name, for messages.
        read: returns the content of a file.
        size: (rows, columns) of the result.
    """

    def __init__(
        self,
        names: Sequence[str],
        places: Sequence[str],
        read: Read,
        size: tuple[int, ...],
    ):
        self._names = names
        self._places = places
        self._read = read
        self._size = size

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        with self._placed(i):
            return photograph(self._read(self._names[i]), self._size)

    def blocks(self) -> Iterator[bytes]:
        for i, name in enumerate(self._names):
            yield f"{name}\0".encode()
            with self._placed(i):
                content = self._read(name)
            yield content

    @contextlib.contextmanager
    def _placed(self, i: int) -> Iterator[None]:
        """Add the file and the line that name picture i, and its name, to errors."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._places[i]}: {self._names[i]} {error}") from error

    def part(self, start: int, stop: int) -> Self:
        return type(self)(
            self._names[start:stop], self._places[start:stop], self._read, self._size
        )


def photographs_of(
    directory: epath.PathLike,
    split: str,
    table: Source,
    column: str,
    size: tuple[int, ...],
) -> Photographs:
    """Return the pictures that a table names: those in `{split}.zip` if there is such a
    file, otherwise files in `directory`.

    Raises:
        DataError: a name is not that of a picture there, or the archive cannot be read.
            The message has the line of the name.
    """
    folder = epath.Path(directory).expanduser()
    archive = folder / f"{split}.zip"
    names = list(table.column(column))
    places = [table.place(i) for i in range(len(names))]
    for name, place in zip(names, places, strict=True):
        if _leaves(name):
            raise DataError(
                f"{place}: {column} = {name!r} leads out of the folder: "
                f"name a file in {folder}, without '..'"
            )
    if archive.exists():
        where, known, read = _archive(archive)
    else:
        where, known, read = _folder(folder, names)
    for name, place in zip(names, places, strict=True):
        if name not in known:
            raise DataError(
                f"{place}: there is no {column} {name!r} in {where}: "
                "correct the name, or add the file"
            )
    return Photographs(names, places, read, size)


def _leaves(name: str) -> bool:
    """Return True for a name that is no path of a file below a folder."""
    path = PurePosixPath(name)
    windows = PureWindowsPath(name)
    return (
        not path.name
        or path.is_absolute()
        or bool(windows.anchor)
        or "://" in name
        or "\0" in name
        or ".." in (*path.parts, *windows.parts)
    )


def _folder(path: epath.Path, names: Sequence[str]) -> tuple[str, set[str], Read]:
    """Return the name of a folder, those of `names` that are files in it, and how to
    read one.
    """

    def read(name: str) -> bytes:
        return _content(path / name)

    return str(path), {name for name in names if (path / name).is_file()}, read


def _archive(path: epath.Path) -> tuple[str, set[str], Read]:
    """Return the name of an archive, the names of its files, and how to read one.

    Files are read in memory, so nothing is written wherever a name leads.
    """
    try:
        if "://" in str(path):
            content = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
        else:
            content = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError) and not is_for_user(error):
            raise
        raise DataError(
            f"{path} cannot be read as a zip file: {error}. Copy it again"
        ) from error

    def read(name: str) -> bytes:
        try:
            return content.read(name)
        # RuntimeError: it is encrypted
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise DataError(f"in {path} is damaged: {error}. Copy it again") from error

    return str(path), set(content.namelist()), read


def photographs_table(
    directory: epath.PathLike,
    split: str,
    columns: Sequence[str],
    size: tuple[int, ...],
) -> Source:
    """Read columns of `{split}.tsv`, the first of which names pictures in `directory`
    or in `{split}.zip`, see `photographs_of`.

    For what else a table must be, see `tsv_file`.
    """
    table = tsv_file(directory, split, columns)
    whole = file_name(split)
    values = {name: table.column(name) for name in columns}
    first = columns[0]
    values[first] = photographs_of(directory, whole, table, first, size)
    return Source(values, table.where, table.first_line)
