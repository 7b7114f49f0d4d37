"""Records: boards of results with fixed data and fixed rules, which anyone can enter.

Each file that is named in `NAMES` states one record. `scripts/reproduce.py record:NAME`
runs its best entry, or one of your own, and says whether it keeps the rules.
"""

import importlib

from transformer_jax.errors import UserError
from transformer_jax.records.record import Record

# in the order in which they are listed
NAMES = ("multi30k-22", "shakespeare-1.47", "scan-26")


def file_of(name: str) -> str:
    """Return the name of the module of a record."""
    return name.replace("-", "_").replace(".", "_")


def find(name: str) -> Record:
    """Return the record `name`, one of NAMES.

    Raises UserError if there is no such record.
    """
    if name not in NAMES:
        raise UserError(
            f"there is no record {name!r}: choose one of {', '.join(NAMES)}"
        )
    module = importlib.import_module(f"transformer_jax.records.{file_of(name)}")
    return module.RECORD
