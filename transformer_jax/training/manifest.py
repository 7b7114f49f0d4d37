"""The manifest of a checkpoint step: size and sha256 of each of its files. A step without a manifest is invalid."""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from etils import epath

from transformer_jax.files import is_inside

NAME = "manifest.json"


class Damage(NamedTuple):
    """The reason why a step is invalid. If it is not `readable`, the disk may be at fault and the step intact."""

    reason: str
    readable: bool = True

    def __str__(self) -> str:
        return self.reason


def exists(folder: epath.Path) -> bool:
    """Return True if the step was saved completely."""
    return (folder / NAME).exists()


def write(folder: epath.Path) -> None:
    """Write the manifest of all files below `folder` atomically."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().length, "sha256": _sha256(path)}
        for path in sorted(_files(folder))
    }
    unfinished = folder / f"{NAME}.tmp"
    with unfinished.open("w") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        with contextlib.suppress(io.UnsupportedOperation):  # object stores: a file appears whole or not at all
            os.fsync(file.fileno())
    unfinished.replace(folder / NAME)


def damage(folder: epath.Path) -> Damage | None:
    """Return what is wrong with a step, or None if every file matches the manifest."""
    if not folder.is_dir():
        return Damage("there is no such step")
    if not exists(folder):
        return Damage(f"{NAME} is missing: the step was not saved completely")
    try:
        files = json.loads((folder / NAME).read_text())["files"]
        for name, file in files.items():
            path = folder / name
            if not is_inside(name):
                return Damage(f"{NAME} lists {name}: {name} is not in the folder")
            if not path.is_file():
                return Damage(f"{name} is listed in {NAME} but missing")
            if path.stat().length != file["size"]:
                return Damage(f"{name} has {path.stat().length} bytes instead of {file['size']}")
            if _sha256(path) != file["sha256"]:
                return Damage(f"the sha256 of {name} differs from the one in {NAME}")
    except (ValueError, KeyError) as error:
        return Damage(f"{NAME} is damaged ({error})")
    except OSError as error:
        return Damage(f"it cannot be read ({error})", readable=False)
    return None


def _sha256(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    """Yield every file below `folder`. epath's `walk` is not used: it drops the gs:// prefix of bucket paths."""
    for path in folder.iterdir():
        yield from _files(path) if path.is_dir() else [path]
