"""Claims of the literature as experiments with a verdict.

Each file that is named in `NAMES` states one claim: its source, the conditions that are
compared, and what is expected of them. `scripts/reproduce.py` runs them.
"""

import importlib
import sys
import types
from pathlib import Path

from transformer_jax.claims.claim import Claim
from transformer_jax.errors import UserError

# in the order in which they are listed
NAMES = (
    "warmup",
    "collapse",
    "scaling",
    "additive",
    "length",
    "reversal",
    "dot-at-small-size",
    "parallel",
    "heads",
    "key-width",
    "size",
    "dropout",
    "smoothing",
    "positions",
    "concatenated",
    "shared-maps",
    "norms",
    "activations",
    "masking",
    "next-sentence",
    "features",
    "auxiliary",
    "layers",
    "noise",
    "averaging",
    "beam",
    "composition",
    "addition",
    "induction",
    "grokking",
)


def find(name: str) -> Claim:
    """Return the claim `name`, one of NAMES or a Python file that defines CLAIM.

    Raises:
        UserError: there is no such claim, or the file does not define one.
    """
    if name in NAMES:
        ours = f"transformer_jax.claims.{name.replace('-', '_')}"
        return _checked(importlib.import_module(ours), name)
    if not name.endswith(".py"):
        raise UserError(
            f"there is no claim {name!r}: choose one of {', '.join(NAMES)}, "
            "or name a Python file that defines CLAIM"
        )
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {name!r} in {Path.cwd()}: check the name")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return _checked(module, name)


def _checked(module: types.ModuleType, name: str) -> Claim:
    claim = getattr(module, "CLAIM", None)
    if not isinstance(claim, Claim):
        raise UserError(
            f"{name} defines no CLAIM of the class transformer_jax.claims.claim.Claim: "
            "see docs/extending/claim.md"
        )
    return claim
