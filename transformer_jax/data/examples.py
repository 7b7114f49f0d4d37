"""Read records and labels: the fields of what is predicted from, and classes as numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.sources import DataError


def columns_of(records: Sequence[str | Mapping[str, Any]], columns: Sequence[str]) -> list[list[str] | None]:
    """Return the texts of each column. A record is an object with these fields, or a line, which is the first of them.

    The first column must be there; another is None unless every record has it.

    Raises:
        DataError: a record has an unknown field, lacks the first one, or holds something other than text.
    """
    objects = [{columns[0]: record} if isinstance(record, str) else record for record in records]
    for number, record in enumerate(objects, 1):
        if columns[0] not in record or not set(record) <= set(columns):
            raise DataError(
                f"record {number} has the fields {', '.join(record) or '(none)'}: it must have {columns[0]}, and may "
                f"have {', '.join(columns[1:]) or 'no other'}"
            )
        for name, value in record.items():
            if not isinstance(value, str):
                raise DataError(f"record {number} has {name} = {value!r}: it must be text")
    complete = [all(name in record for record in objects) for name in columns]
    return [
        [record[name] for record in objects] if there else None for name, there in zip(columns, complete, strict=True)
    ]


class Labels:
    """Classes by name and number."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def encode(self, labels: Sequence[str], what: str) -> np.ndarray:
        """Return the number of each label, (n,) int32. `what` says where they are from.

        Raises:
            DataError: a label is not one of the names.
        """
        for row, label in enumerate(labels, 1):
            if label not in self._numbers:
                raise DataError(
                    f"{what}, row {row}: the label {label!r} is not one of data.labels = {', '.join(self.names)}: mend "
                    "the file, or add it to data.labels"
                )
        return np.array([self._numbers[label] for label in labels], np.int32)
