"""The standard streams of a script: they work when they are closed, full or in a
locale without UTF-8.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from transformer_jax.errors import UserError


class StreamError(UserError):
    """Raised if results cannot be written to stdout."""


class _Results(io.FileIO):
    """The raw stream of stdout. Its errors are StreamErrors."""

    def write(self, data: Any, /) -> int:
        with named():
            return super().write(data)


class _Messages(io.FileIO):
    """The raw stream of stderr.

    What cannot be written is dropped, because a full disk must not end a run.
    """

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Turn an OSError of stdout into a StreamError, which says so."""
    try:
        yield
    except OSError as error:
        raise StreamError(
            f"stdout cannot be written: {error.strerror or error}. Results go there: "
            "redirect it to a file or to a program that reads all of it"
        ) from error


def in_utf8() -> None:
    """Start Python again in its UTF-8 mode if names of files have another encoding,
    e.g. because of LC_ALL=C.

    In another encoding, a name such as "ñandú" cannot be passed to libraries that
    require UTF-8.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare() -> None:
    """Make stdin, stdout and stderr safe to use, also where the caller has closed them.

    The number of a closed stream would be given to the next file, e.g. a checkpoint,
    and messages of C libraries would be written into it. So the number is taken by
    /dev/null, opened such that results are refused and messages lost.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    sys.stdout = results(1)
    messages = _Messages(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        messages, "utf-8", "backslashreplace", write_through=True
    )


def results(number: int) -> io.TextIOWrapper:
    """Return a text stream that writes to the open file `number`, line by line on a
    terminal.
    """
    raw = _Results(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", line_buffering=raw.isatty()
    )


def check_results() -> None:
    """Raise StreamError if stdout was closed, before the work whose results go there
    begins.
    """
    with named():
        os.write(sys.stdout.fileno(), b"")


def keep_results() -> None:
    """Redirect output of C libraries, e.g. Gloo, from stdout to stderr.

    Python still prints results to stdout.
    """
    sys.stdout.flush()
    sys.stdout = results(os.dup(1))
    os.dup2(2, 1)


def end() -> None:
    """Flush the streams of a process that has failed.

    What stdout does not take is dropped.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # otherwise Python's own flush at the end fails
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
