"""What all processes of the suite share, and one of them makes."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]
) -> Path:
    """Return the folder `name`, which `make` fills when a process first asks for it.

    Other processes wait until it is filled. Nobody may change it.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    done = base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
