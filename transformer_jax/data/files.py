"""Find and open files of text, plain or gzipped, in local folders and in buckets."""

from __future__ import annotations

import gzip
import mmap
import os
import zlib
from collections import defaultdict
from typing import IO

from etils import epath

BLOCK = 2**20  # bytes compared at a time
GZIP_MARK = b"\x1f\x8b"
NOT_GZIP = (OSError, EOFError, zlib.error)


class DataError(ValueError):
    """Missing or broken data. The message names the file (and line), the rule and the remedy."""


def find(directory: epath.PathLike, name: str) -> epath.Path:
    """Return the path of the file `name` or `name`.gz in `directory`.

    Raises:
        DataError: neither is there, one is something else than a file, or their texts differ.
    """
    directory = epath.Path(directory).expanduser()
    if not directory.is_dir():
        raise DataError(f"There is no directory {directory}: set data.directory to where the files are.")
    plain, zipped = directory / name, directory / f"{name}.gz"
    there = [path for path in (plain, zipped) if _is_file(path)]
    if len(there) == 2 and not _same(plain, zipped):
        raise DataError(f"{plain} and {zipped} are both there, but their texts differ. Remove or rename one of them.")
    if there:
        return there[0]
    held = defaultdict(list)
    for path in sorted(directory.iterdir()):
        stem, _, end = path.name.removesuffix(".gz").rpartition(".")
        if stem and path.is_file():
            held[stem].append(end)
    listing = "; ".join(f"{stem} ({', '.join(ends)})" for stem, ends in held.items()) or "no such files"
    raise DataError(
        f"There is neither {name} nor {name}.gz in {directory}. It holds {listing}. Set data.directory, and the keys "
        "that name splits and languages, to match."
    )


def _is_file(path: epath.Path) -> bool:
    """Return whether there is a file at `path`. Raises DataError where there is something else."""
    if "://" in str(path) or os.path.isfile(path):
        return path.is_file()
    if not os.path.lexists(path):
        return False
    if not os.path.islink(path):
        what = "a folder" if os.path.isdir(path) else "neither a file nor a folder"
    elif os.path.exists(path):
        what = f"a link to {os.path.realpath(path)}, which is not a file"
    else:
        try:
            os.stat(path)
            what = "a link"  # made good meanwhile
        except OSError as error:
            what = f"a link to {os.readlink(path)} that leads nowhere ({error.strerror})"
    raise DataError(f"{path} is {what}: it must be a file of text. Put the file there, or set data.directory.")


def _same(plain: epath.Path, zipped: epath.Path) -> bool:
    """Return whether the one file is the other, unzipped."""
    try:
        with plain.open("rb") as one, zipped.open("rb") as packed, gzip.open(packed) as other:
            while (block := one.read(BLOCK)) == other.read(BLOCK):
                if not block:
                    return True
    except NOT_GZIP:
        pass
    return False


def read(path: epath.Path) -> bytes | mmap.mmap:
    """Return what is in a file, unzipped if it is called .gz; plain local files are mapped.

    Raises:
        DataError: it cannot be read, or is not gzip's.
    """
    content: bytes | mmap.mmap
    try:
        if path.suffix == ".gz" or "://" in str(path):
            content = path.read_bytes()
        else:
            with open(path, "rb") as file:
                content = mapped(file)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error}. Make it readable, or copy it again.") from error
    return _unzipped(content, path) if path.suffix == ".gz" else content


def _unzipped(content: bytes | mmap.mmap, path: epath.Path) -> bytes:
    if content and content[:2] != GZIP_MARK:
        raise DataError(
            f"{path} is not compressed by gzip: it starts with {bytes(content[:8])!r}. Rename it without .gz, or "
            "compress it."
        )
    try:
        if not content:
            raise EOFError
        return gzip.decompress(content)
    except EOFError as error:
        raise DataError(f"{path} is cut off: its gzip data have no end. Copy it or compress it again.") from error
    except NOT_GZIP as error:
        raise DataError(f"{path} is damaged: {error}. Copy it or compress it again.") from error


def mapped(file: IO[bytes]) -> bytes | mmap.mmap:
    """Map a file, which must not be changed while it is in use. (Empty files cannot be mapped.)"""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
