"""The manifest of a checkpoint step: size and sha256 of each of its files.

A step without a manifest is invalid.

With several processes, each hashes its share of the files, in parallel threads. So
every process must call `write` and `damage` together with the others, and all get the
same result.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from etils import epath

from transformer_jax import files
from transformer_jax.training import processes

NAME = "manifest.json"
THREADS = 8  # files that a process hashes at the same time


class Damage(NamedTuple):
    """The reason why a step is invalid.

    If it is not `readable`, the disk may be at fault and the step intact.

    `lasting` is True if the user must act before it can be read, e.g. grant a
    permission.
    """

    reason: str
    readable: bool = True
    lasting: bool = False

    def __str__(self) -> str:
        return self.reason


def exists(folder: epath.Path) -> bool:
    """Return True if the step was saved completely.

    Raises OSError if this cannot be told.
    """
    return files.exists(folder / NAME)


def write(folder: epath.Path) -> None:
    """Write the manifest of all files below `folder` atomically.

    Raises OSError if a file cannot be read or written.
    """
    sizes = processes.first_says(lambda: dict(_sizes(folder, folder)))
    sums, failures = _hash(folder, sizes)
    for name, failure in failures.items():
        raise OSError(
            errno.EACCES if failure.lasting else errno.EIO,
            failure.reason,
            str(folder / name),
        )
    listing = {
        name: {"size": sizes[name], "sha256": sums[name]} for name in sorted(sizes)
    }
    processes.first(
        lambda: _replace(folder / NAME, json.dumps({"files": listing}, indent=1))
    )


def add(folder: epath.Path, name: str, text: str) -> None:
    """Write another file of a step, and list it in the manifest.

    Only the first process may call it.
    """
    _replace(folder / name, text)
    listing = json.loads((folder / NAME).read_text())
    data = text.encode()
    listing["files"][name] = {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    _replace(folder / NAME, json.dumps(listing, indent=1))


def damage(folder: epath.Path, alone: bool = False) -> Damage | None:
    """Return what is wrong with a step, or None if every file matches the manifest.

    Set `alone` if only this process calls the function. It then hashes all files.
    """
    listing = (
        _listing(folder) if alone else processes.first_says(lambda: _listing(folder))
    )
    if "files" not in listing:
        return Damage(**listing)
    listed = listing["files"]
    sums, failures = _hash(
        folder, {name: file["size"] for name, file in listed.items()}, alone
    )
    for name, file in listed.items():
        if name in failures:
            return failures[name]
        if sums[name] != file["sha256"]:
            return Damage(f"the sha256 of {name} differs from the one in {NAME}")
    return None


def stamp(folder: epath.Path) -> str:
    """Return a text that changes if a file of the step is written: names, sizes and
    times of change.
    """
    names = [name for name, _ in sorted(_sizes(folder, folder))]
    return json.dumps([(name, files.status(folder / name)) for name in names])


def _listing(folder: epath.Path) -> dict[str, Any]:
    """Return {"files": …} of the manifest if all of them have the right size,
    otherwise the fields of the damage.
    """
    try:
        status = files.status(folder)
        if status is None or not status.is_folder:
            return {"reason": "there is no such step"}
        if not exists(folder):
            return {"reason": f"{NAME} is missing: the step was not saved completely"}
        listed = json.loads((folder / NAME).read_text())["files"]
        for name, file in listed.items():
            if reason := _wrong(folder, name, file["size"], file["sha256"]):
                return {"reason": reason}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {"reason": f"{NAME} is damaged ({error})"}
    except OSError as error:
        return _unreadable(error)._asdict()
    return {"files": listed}


def _wrong(folder: epath.Path, name: str, size: int, sha256: str) -> str:
    """Return what is wrong with the entry of a file and with the file's size, or ""."""
    if not files.is_inside(name):
        return f"{NAME} lists {name}: {name} is not in the folder"
    if not isinstance(sha256, str):
        return f"{NAME} is damaged (the sha256 of {name} is no text)"
    status = files.status(folder / name)
    if status is None or status.is_folder:
        return f"{name} is listed in {NAME} but missing"
    if status.size != size:
        return f"{name} has {status.size} bytes instead of {size}"
    return ""


def _unreadable(error: OSError) -> Damage:
    return Damage(f"it cannot be read ({error})", False, files.is_lasting(error))


def _hash(
    folder: epath.Path, sizes: Mapping[str, int], alone: bool = False
) -> tuple[dict[str, str], dict[str, Damage]]:
    """Return the sha256 sums of files by name, and the reasons why others cannot be
    read.
    """
    count = 1 if alone else jax.process_count()
    mine = _shares(sizes, count)[0 if alone else jax.process_index()]
    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(
            zip(
                mine,
                pool.map(lambda name: _sha256_or_damage(folder / name), mine),
                strict=True,
            )
        )
    sums: dict[str, str] = {}
    failures: dict[str, Damage] = {}
    for part in [results] if alone else processes.everyone(results):
        sums |= {
            name: result for name, result in part.items() if isinstance(result, str)
        }
        failures |= {
            name: Damage(*result)
            for name, result in part.items()
            if not isinstance(result, str)
        }
    return sums, failures


def _shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide files into `count` shares of about equal size: the largest file first,
    each to the smallest share.
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    totals = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        shares[smallest].append(name)
        totals[smallest] += sizes[name]
    return shares


def _sha256_or_damage(path: epath.Path) -> str | Damage:
    try:
        return _sha256(path)
    except OSError as error:
        return _unreadable(error)


def _sha256(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: epath.Path, text: str) -> None:
    """Replace a file atomically."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        # object stores: a file appears whole or not at all
        with contextlib.suppress(io.UnsupportedOperation):
            os.fsync(file.fileno())
    unfinished.replace(path)


def _sizes(folder: epath.Path, top: epath.Path) -> Iterator[tuple[str, int]]:
    """Yield (name, size) of every file below `folder`. epath's `walk` drops the
    gs:// prefix of bucket paths.
    """
    for path in folder.iterdir():
        status = files.status(path)
        if status is not None and status.is_folder:
            yield from _sizes(path, top)
        elif status is not None:
            yield str(path.relative_to(top)), status.size
