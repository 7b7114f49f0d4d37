"""Write files whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import IO

from etils import epath


class OutputError(ValueError):
    """A file that cannot be written; the message names it."""


@contextlib.contextmanager
def replacing(path: epath.PathLike, follow: bool = True) -> Iterator[IO[bytes]]:
    """Open a new file beside `path`, and put it in the place of `path` when the block has ended without an error.

    After an error, `path` is what it was and nothing is left beside it. Of a link, the file behind it is replaced, or
    the link itself unless `follow`. The new file has the old one's permissions. Devices and pipes, which cannot be
    replaced, are written to directly.

    Raises OutputError where it cannot be written.
    """
    name = os.fspath(path)
    local = "://" not in name
    target = epath.Path(os.path.realpath(name) if local and follow else name)
    # epath takes a device for a file.
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
        kept = "; the file that was there is unchanged" if replaceable and target.exists() else ""
        raise OutputError(
            f"{name} cannot be written: {error.strerror or error}{kept}. Make room there, or name a file elsewhere."
        ) from error


def write(path: epath.PathLike, data: bytes) -> None:
    """Write `data` to a file. Raises OutputError where that fails; the file is then what it was."""
    with replacing(path) as file:
        file.write(data)
