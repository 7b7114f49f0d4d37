"""Scripts and recipes: the folders scripts/ and configs/ of a clone, or the copies that
an installed package has.
"""

import os
import re
from pathlib import Path

_COPIES = Path(__file__).parent / "_clone"  # setup.py makes them


def folder() -> Path:
    """Return the folder that holds scripts/ and configs/."""
    return _COPIES if _COPIES.is_dir() else Path(__file__).parents[1]


def is_clone() -> bool:
    """Return True in a clone of the repository, and False in an installed package."""
    return folder() != _COPIES


def script(name: str) -> str:
    """Return how a user starts a script, e.g. "python scripts/train.py"."""
    if is_clone():
        return f"python scripts/{name}.py"
    return f"python -m transformer_jax {name}"


def recipe(name: str) -> Path | None:
    """Return the file of a recipe, e.g. of "dates", or None if there is none."""
    path = folder() / "configs" / f"{name}.py"
    return path if re.fullmatch(r"\w+", name) and os.path.isfile(path) else None
