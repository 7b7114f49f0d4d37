"""Columns of the records to predict from, and the numbering of class labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.sources import DataError


def columns_of(records: Sequence[str | Mapping[str, Any]], columns: Sequence[str]) -> list[list[str] | None]:
    """Return the texts of each column, or None for a column that some record lacks.

    A record is an object whose fields are columns, or a string, which is the text of the first column. Every record
    must have the first column.

    Raises:
        DataError: a record has an unknown field, lacks the first column, or has a value that is not text.
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
    """The classes of a task, numbered from 0 in the order of `names`."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def encode(self, labels: Sequence[str], what: str) -> np.ndarray:
        """Return the number of each label, (n,) int32. Error messages name `what` as their source.

        Raises:
            DataError: a label is not one of the names.
        """
        for row, label in enumerate(labels, 1):
            if label not in self._numbers:
                raise DataError(
                    f"{what}, row {row}: the label {label!r} is not one of data.labels = {', '.join(self.names)}: "
                    "correct the file, or add the label to data.labels"
                )
        return np.array([self._numbers[label] for label in labels], np.int32)
