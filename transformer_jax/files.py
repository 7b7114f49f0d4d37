"""Atomic file writes: a file is written completely or not at all. Predictions as lines of a file."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import IO, Any

from etils import epath

from transformer_jax.errors import UserError


class OutputError(UserError):
    """Raised if a file cannot be written. The message names the file."""


@contextlib.contextmanager
def replacing(path: epath.PathLike, follow: bool = True) -> Iterator[IO[bytes]]:
    """Context manager that opens a temporary file in the folder of `path`, and moves it to `path` at the end.

    If the block raises, `path` is unchanged and the temporary file is removed. The new file has the permissions of the
    old one. If `path` is a link, the file that it points to is replaced, or the link itself if `follow` is False.
    Devices and pipes cannot be replaced and are written to directly.

    Raises OutputError if the file cannot be written.
    """
    name = os.fspath(path)
    local = "://" not in name
    target = epath.Path(os.path.realpath(name) if local and follow else name)
    # os.path, because epath treats a device as a file.
    replaceable = not local or not os.path.lexists(target) or os.path.isfile(target) or os.path.islink(target)
    part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.tmp") if replaceable else target
    try:
        try:
            with part.open("wb") as file:
                yield file
                if local and replaceable:
                    file.flush()
                    os.fsync(file.fileno())
            if replaceable:
                if local and target.exists():
                    shutil.copymode(target, part)
                part.replace(target)
        finally:
            if replaceable:
                part.unlink(missing_ok=True)
    except OSError as error:
        kept = "; the existing file is unchanged" if replaceable and target.exists() else ""
        raise OutputError(
            f"{name} cannot be written: {error.strerror or error}{kept}. Free some space, or name a file elsewhere."
        ) from error


def write(path: epath.PathLike, data: bytes) -> None:
    """Write `data` to a file. Raises OutputError if that fails, and leaves an existing file unchanged."""
    with replacing(path) as file:
        file.write(data)


def write_all(folder: epath.PathLike, contents: Mapping[str, bytes]) -> None:
    """Write files, given by their names, to a folder, which is made if it is missing.

    Raises OutputError if that fails.
    """
    make_folder(folder)
    for name, data in contents.items():
        write(epath.Path(folder) / name, data)


def make_folder(path: epath.PathLike) -> None:
    """Make a folder and those above it, unless they exist. Raises OutputError if that fails."""
    try:
        epath.Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the folder {os.fspath(path)} cannot be made: {error.strerror or error}. Name a folder elsewhere."
        ) from error


def is_inside(name: str) -> bool:
    """Return True for a name of a file in the folder that lists it, or below. Use it for lists that others wrote.

    Links are not followed: a folder of links, e.g. one of the Hugging Face hub, is as good as one of files.
    """
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


# What ends a line for some program: for Python's `open`, "\r" too, and for `str.splitlines` all of these.
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
SPACES = str.maketrans(dict.fromkeys(LINE_ENDS, " "))
ESCAPES = str.maketrans({end: f"\\u{ord(end):04x}" for end in LINE_ENDS})


def one_line(value: Any) -> str:
    """Return a text, or another value as JSON, as one line for every reader.

    Characters that may end a line become spaces in a text, and are escaped in JSON.
    """
    if isinstance(value, str):
        return value.translate(SPACES)
    return json.dumps(value, ensure_ascii=False).translate(ESCAPES)
