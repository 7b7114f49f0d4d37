"""The state of a path, and atomic file writes: a file is written completely or not at
all. Predictions as lines.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import IO, Any, NamedTuple

from etils import epath

from transformer_jax.errors import UserError


class OutputError(UserError):
    """Raised if a file cannot be written. The message names the file."""


class Status(NamedTuple):
    """The kind, size in bytes and time of change of what is at a path."""

    is_folder: bool
    size: int
    changed: float


def status(path: epath.PathLike) -> Status | None:
    """Return the status of a file or folder, or None if there is nothing at `path`.

    Links are followed.

    Raises OSError if this cannot be told, e.g. because of a failing disk. `exists`,
    `is_file` and `is_dir` return False then. So use this function wherever the answer
    decides whether something is removed, replaced or begun anew.
    """
    name = os.fspath(path)
    try:
        if "://" in name:
            remote = epath.Path(name).stat()
            return Status(remote.is_directory, remote.length or 0, remote.mtime)
        local = os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Status(stat.S_ISDIR(local.st_mode), local.st_size, local.st_mtime_ns / 1e9)


def exists(path: epath.PathLike) -> bool:
    """Return True if there is a file or folder at `path`.

    Raises OSError if this cannot be told.
    """
    return status(path) is not None


# Errors that stay until somebody frees space, grants a permission or chooses another
# path.
_LASTING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
}


_TENSORSTORE_ERROR = re.compile(r"(?:OS error |os_error_code=')(\d+)")


def is_lasting(error: BaseException) -> bool:
    """Return True for a file error that the user must fix, and False for one that may
    pass, e.g. of a network disk.

    The error may have been wrapped by others, or be one of TensorStore, which writes
    the number into its message.
    """
    chain: BaseException | None = error
    while chain is not None:
        number = chain.errno if isinstance(chain, OSError) else None
        if number is None and (match := _TENSORSTORE_ERROR.search(str(chain))):
            number = int(match[1])
        if number is not None:
            return number in _LASTING
        chain = chain.__cause__ or chain.__context__
    return False


def is_for_user(error: BaseException) -> bool:
    """Return True for a file error that the user must fix: a lasting one, or a missing
    file.

    Errors that may pass are raised as they are, so that a script which meets one is
    started again.
    """
    return is_lasting(error) or isinstance(error, FileNotFoundError)


@contextlib.contextmanager
def explained(subject: str, remedy: str) -> Iterator[None]:
    """Turn a file error that the user must fix into a UserError that says so.

    `subject` says what cannot be done, e.g. "--input=a.txt cannot be read". Errors that
    may pass, and those of missing files, stay as they are.
    """
    try:
        yield
    except OSError as error:
        if not is_lasting(error):
            raise
        where = f" ({error.filename})" if error.filename else ""
        reason = f"{error.strerror}{where}" if error.strerror else str(error)
        raise UserError(f"{subject}: {reason}; {remedy}") from error


def read_object(
    path: epath.PathLike, error: type[UserError] = UserError
) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises `error` if the file is missing or holds something else, and OSError if it
    cannot be read for a reason that may pass.
    """
    try:
        content = json.loads(epath.Path(path).read_bytes())
    except OSError as problem:
        if not is_for_user(problem):
            raise
        reason = problem.strerror or problem
        raise error(f"{path} cannot be read: {reason}; copy it again") from problem
    except (ValueError, RecursionError) as problem:
        raise error(
            f"{path} is not a JSON object ({problem}): copy it again"
        ) from problem
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise error(f"{path} is not a JSON object ({kind}): copy it again")
    return content


@contextlib.contextmanager
def replacing(path: epath.PathLike, follow: bool = True) -> Iterator[IO[bytes]]:
    """Context manager that opens a temporary file in the folder of `path`, and moves it
    to `path` at the end.

    If the block raises, `path` is unchanged and the temporary file is removed. The new
    file has the permissions of the old one. If `path` is a link, the file that it
    points to is replaced, or the link itself if `follow` is False. Devices and pipes
    cannot be replaced and are written to directly.

    Raises OutputError if the file cannot be written, and OSError if the reason may
    pass.
    """
    name = os.fspath(path)
    local = "://" not in name
    target = epath.Path(os.path.realpath(name) if local and follow else name)
    replaceable = True
    try:
        replaceable = not local or _is_replaceable(target)
        part = (
            target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.tmp")
            if replaceable
            else target
        )
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
        if not is_for_user(error):
            raise
        consequence = ""
        if replaceable and target.exists():
            consequence = "; the existing file is unchanged"
        raise OutputError(
            f"{name} cannot be written: {error.strerror or error}{consequence}. "
            "Free some space, or name a file elsewhere."
        ) from error


def _is_replaceable(path: epath.PathLike) -> bool:
    """Return True for a file, a link, or nothing, and False for e.g. a device.

    Raises OSError if this cannot be told.

    Writing directly to a file would empty it first.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def write(path: epath.PathLike, data: bytes) -> None:
    """Write `data` to a file.

    If that fails, raise the errors of `replacing` and leave an existing file unchanged.
    """
    with replacing(path) as file:
        file.write(data)


def write_all(folder: epath.PathLike, contents: Mapping[str, bytes]) -> None:
    """Write files, given by their names, to a folder, which is made if it is missing.

    Raises the errors of `write`.
    """
    make_folder(folder)
    for name, data in contents.items():
        write(epath.Path(folder) / name, data)


# in a workdir: the sha256 sums of files that the program made there, by name
MADE = "made.json"


def write_made(path: epath.PathLike, data: bytes) -> None:
    """Write a file of the program's own, and list it in made.json beforehand.

    Raises the errors of `write`.
    """
    path = epath.Path(path)
    made = _made(path.parent) | {path.name: hashlib.sha256(data).hexdigest()}
    write(path.parent / MADE, (json.dumps(made, indent=2) + "\n").encode())
    write(path, data)


def is_made(path: epath.PathLike) -> bool:
    """Return True if `write_made` wrote the file, and nobody has changed it since.

    Raises OSError.
    """
    path = epath.Path(path)
    return (
        _made(path.parent).get(path.name)
        == hashlib.sha256(path.read_bytes()).hexdigest()
    )


def _made(folder: epath.Path) -> dict[str, str]:
    """Return the content of made.json.

    If it is missing or damaged, every file counts as the user's.
    """
    try:
        made = json.loads((folder / MADE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return made if isinstance(made, dict) else {}


def ensure_folder(path: epath.PathLike) -> None:
    """Make a folder and those above it, unless they exist. Raises OSError."""
    # `mkdir` would call a folder that the disk fails to show a file
    present = status(path)
    if present is not None and present.is_folder:
        return
    try:
        epath.Path(path).mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # e.g. in /proc, where nothing can be made
        raise PermissionError(
            errno.EACCES, "No folder can be made here", os.fspath(path)
        ) from error


def make_folder(path: epath.PathLike) -> None:
    """Make a folder and those above it, unless they exist.

    Raises OutputError if the user must act, or OSError.
    """
    try:
        ensure_folder(path)
    except OSError as error:
        if not is_lasting(error):
            raise
        raise OutputError(
            f"the folder {os.fspath(path)} cannot be made: "
            f"{error.strerror or error}. Name a folder elsewhere."
        ) from error


def is_inside(name: str) -> bool:
    """Return True for a name of a file in the folder that lists it, or below.

    Use it for lists that others wrote.

    Links are not followed: a folder of links, e.g. one of the Hugging Face hub, is as
    good as one of files.
    """
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


# What ends a line for some program: for Python's `open`, "\r" too, and for
# `str.splitlines` all of these.
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
