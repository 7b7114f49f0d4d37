"""Find and read text files, plain or gzip-compressed, in local folders and cloud
buckets.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import re
import zlib
from collections import defaultdict
from typing import IO, Any

from etils import epath

from transformer_jax.errors import UserError
from transformer_jax.files import Status, explained, is_for_user, is_lasting, status

BLOCK = 2**20  # bytes compared at a time
SURROGATE = re.compile("[\ud800-\udfff]")
GZIP_MARK = b"\x1f\x8b"
NOT_GZIP = (OSError, EOFError, zlib.error)


class DataError(UserError):
    """Missing or invalid data.

    The message names the file (and line), the rule and the remedy.
    """


def parse_json(text: str, path: str) -> Any:
    """Return the content of a JSON file.

    Raises DataError, which names `path`, if it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}, column {error.colno} is not JSON: "
            f"{error.msg}. Copy the file again, or correct it."
        ) from error
    # numbers that are too long, and lists that are too deep
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as JSON: {error}. "
            "Copy the file again, or correct it."
        ) from error


def check_characters(text: str, key: str, where: str) -> None:
    """Raise DataError if a text from JSON, the value of `key`, has characters that
    UTF-8 cannot encode.
    """
    if SURROGATE.search(text):
        raise DataError(
            f"{where} has half of a surrogate pair "
            f"(\\ud800 to \\udfff) in its {key}: correct it."
        )


def find(directory: epath.PathLike, name: str) -> epath.Path:
    """Return the path of the file `name` or `name`.gz in `directory`.

    Raises:
        DataError: neither exists, one of them is not a file, or both exist with
            different text.
    """
    directory = epath.Path(directory).expanduser()
    folder = _status(directory)
    if folder is None or not folder.is_folder:
        raise DataError(
            f"There is no directory {directory}: "
            "set data.directory to where the files are."
        )
    plain = directory / name
    zipped = directory / f"{name}.gz"
    paths = [path for path in (plain, zipped) if _is_file(path)]
    if len(paths) == 2 and not _same(plain, zipped):
        raise DataError(
            f"{plain} and {zipped} both exist, but their text differs. "
            "Remove or rename one of them."
        )
    if paths:
        return paths[0]
    raise DataError(
        f"There is neither {name} nor {name}.gz in {directory}. "
        f"The folder contains {_listing(directory)}. "
        "Set data.directory, and the keys for splits and languages, to match."
    )


def _listing(directory: epath.Path) -> str:
    """Return the names of the files in a folder, e.g. "train (en, de); val (en)"."""
    endings = defaultdict(list)
    with explained(f"{directory} cannot be listed", "check its permissions"):
        paths = sorted(directory.iterdir())
    for path in paths:
        stem, _, ending = path.name.removesuffix(".gz").rpartition(".")
        if stem and path.is_file():
            endings[stem].append(ending)
    names = [f"{stem} ({', '.join(several)})" for stem, several in endings.items()]
    return "; ".join(names) or "no text files"


def _status(path: epath.Path) -> Status | None:
    """Return the status of a file or folder of the data.

    Raises DataError if the user must act, or OSError.
    """
    try:
        return status(path)
    except OSError as error:
        if not is_lasting(error):
            raise
        raise DataError(
            f"{path} cannot be read: {error.strerror}. "
            "Check its name and its permissions, or set data.directory."
        ) from error


def _is_file(path: epath.Path) -> bool:
    """Return whether a file exists at `path`.

    Raises DataError if `path` exists but is not a file.
    """
    try:
        status_of_path = _status(path)
    except DataError:
        if not os.path.islink(path):
            raise
        status_of_path = None  # e.g. a link to itself
    is_remote = "://" in str(path)
    if status_of_path is not None and (is_remote or os.path.isfile(path)):
        return not status_of_path.is_folder
    if status_of_path is None and (is_remote or not os.path.lexists(path)):
        return False
    raise DataError(
        f"{path} is {_kind(path)}: must be a text file. "
        "Put the file there, or set data.directory."
    )


def _kind(path: epath.Path) -> str:
    """Return a description of what is at `path` instead of a file."""
    if not os.path.islink(path):
        return "a folder" if os.path.isdir(path) else "neither a file nor a folder"
    if os.path.exists(path):
        return f"a link to {os.path.realpath(path)}, which is not a file"
    try:
        os.stat(path)
    except OSError as error:
        return f"a broken link to {os.readlink(path)} ({error.strerror})"
    return "a link"  # repaired in the meantime


def _same(plain: epath.Path, zipped: epath.Path) -> bool:
    """Return whether the plain file has the same content as the compressed one."""
    try:
        with (
            plain.open("rb") as one,
            zipped.open("rb") as packed,
            gzip.open(packed) as other,
        ):
            while (block := one.read(BLOCK)) == other.read(BLOCK):
                if not block:
                    return True
    except NOT_GZIP:
        pass
    return False


def read(path: epath.Path) -> bytes | mmap.mmap:
    """Return the content of a file, decompressed if its name ends in .gz.

    Plain local files are memory-mapped.

    Raises:
        DataError: the file cannot be read, or its name ends in .gz and it is not valid
            gzip data.
    """
    content: bytes | mmap.mmap
    try:
        if path.suffix == ".gz" or "://" in str(path):
            content = path.read_bytes()
        else:
            with open(path, "rb") as file:
                content = mapped(file)
    except OSError as error:
        if not is_for_user(error):
            raise
        raise DataError(
            f"Cannot read {path}: {error}. Check its permissions, or copy it again."
        ) from error
    return _unzipped(content, path) if path.suffix == ".gz" else content


def _unzipped(content: bytes | mmap.mmap, path: epath.Path) -> bytes:
    if content and content[:2] != GZIP_MARK:
        raise DataError(
            f"{path} is not a gzip file: it starts with {bytes(content[:8])!r}. "
            "Rename it without .gz, or compress it."
        )
    try:
        if not content:
            raise EOFError
        return gzip.decompress(content)
    except EOFError as error:
        raise DataError(
            f"{path} is truncated: its gzip data has no end. "
            "Copy it or compress it again."
        ) from error
    except NOT_GZIP as error:
        raise DataError(
            f"{path} is damaged: {error}. Copy it or compress it again."
        ) from error


class Mapped(mmap.mmap):
    """A memory-mapped file, which must not change while in use.

    If it was cut, an access raises DataError.

    Without this check, the system would end the process with the signal SIGBUS and
    without a message.
    """

    name = "a file of the data"

    def __getitem__(self, at: Any) -> Any:
        if self.size() < len(self):
            raise DataError(
                f"{self.name} was cut from {len(self):,} "
                f"to {self.size():,} bytes while it was read. Restore the file, "
                "leave it unchanged while a run uses it, and start again."
            )
        return super().__getitem__(at)


def mapped(file: IO[bytes]) -> bytes | mmap.mmap:
    """Memory-map a file. Return b"" if it is empty and so cannot be mapped."""
    if not os.fstat(file.fileno()).st_size:
        return b""
    content = Mapped(file.fileno(), 0, access=mmap.ACCESS_READ)
    content.name = str(file.name)
    return content
