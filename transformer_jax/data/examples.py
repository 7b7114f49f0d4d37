"""Examples for fine-tuning: columns of records, labels as numbers, and texts laid
out as the input of a model.
"""

import contextlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.files import DataError, check_characters
from transformer_jax.data.ragged import Ragged

log = logging.getLogger(__name__)

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def parse_record(
    line: str, where: str, columns: Sequence[str], inputs: int, most: int
) -> str | dict[str, str]:
    """Read a record from a line of text.

    If a record has one column only, the line is its text. Otherwise the line holds the
    first columns, separated by tabs. If several are needed, the line may also be a JSON
    object whose fields are columns.

    Args:
        line: the line.
        where: place of the line, for messages.
        columns: the fields of a record.
        inputs: number of columns, from the first, that the line must have.
        most: number of columns, from the first, that the line may have.

    Raises:
        DataError: the line has too few or too many columns, or is not such an object.
    """
    if most == 1:
        return line
    needed = columns[:inputs]
    example = json.dumps(dict.fromkeys(columns[:inputs], "…"), ensure_ascii=False)
    if inputs > 1 and line.lstrip().startswith("{"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is {_short(line)}, which is not JSON ({error}): "
                f"write it as {example}"
            ) from error
        _check(record, where, columns, inputs)
        return record
    texts = line.split("\t")
    if not inputs <= len(texts) <= most:
        also = "" if inputs == 1 else f", or write a JSON object, {example}"
        up_to = "" if inputs == most else f", up to {columns[most - 1]}"
        found = "1 column" if len(texts) == 1 else f"{len(texts)} columns"
        raise DataError(
            f"{where} is {_short(line)}, {found}: "
            f"separate {', '.join(needed)}{up_to} by single tabs{also}"
        )
    return dict(zip(columns, texts, strict=False))


def as_object(
    record: str | Mapping[str, Any], fields: Sequence[str], number: int
) -> Mapping[str, Any]:
    """Return the object that a record is, or that its text is as JSON. Any other text
    is that of the first field.

    A text counts as an object only if it has no other `fields`.

    Raises:
        DataError: a text in the object, which is record `number`, has characters that
            UTF-8 cannot encode.
    """
    found: Any = record
    if isinstance(record, str):
        found = None
        if record.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(record)
        if not found or not set(found) <= set(fields):
            return {fields[0]: record}
    for name, value in found.items() if isinstance(found, Mapping) else ():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_characters(text, name, f"record {number}")
    return found


def columns_of(
    records: Sequence[str | Mapping[str, Any]],
    columns: Sequence[str],
    inputs: int = 1,
    arrays: Sequence[str] = (),
) -> list[list[Any] | None]:
    """Return the entries of each column, or None for a column that some record lacks.

    A record is an object whose fields are columns, or a string, which is the entry of
    the first column. Every record must have the first `inputs` columns. Entries are
    texts, but those of the columns `arrays` may also be arrays or lists.

    Raises:
        DataError: a record has an unknown field, lacks a needed column, or has a value
            that is not text.
    """
    objects = [
        {columns[0]: record} if isinstance(record, str) else record
        for record in records
    ]
    for number, record in enumerate(objects, 1):
        _check(record, f"record {number}", columns, inputs, arrays)
    complete = [all(name in record for record in objects) for name in columns]
    return [
        [record[name] for record in objects] if there else None
        for name, there in zip(columns, complete, strict=True)
    ]


def _check(
    record: Mapping[str, Any],
    where: str,
    columns: Sequence[str],
    inputs: int,
    arrays: Sequence[str] = (),
) -> None:
    """Raise DataError, which names the record by `where`, if its fields or values
    are wrong.
    """
    needed = columns[:inputs]
    optional = columns[inputs:]
    if not set(needed) <= set(record) <= set(columns):
        raise DataError(
            f"{where} has the fields {', '.join(record) or '(none)'}: it must have "
            f"{' and '.join(needed)}, and may have {', '.join(optional) or 'no other'}"
        )
    for name, value in record.items():
        if isinstance(value, str):
            check_characters(value, name, where)
        elif name not in arrays:
            raise DataError(f"{where} has {name} = {value!r}: it must be text")


def _short(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:79] + "…")


def records_of(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> Sequence[Any]:
    """Return the records with these `texts` in `columns`: lines if there is one
    column, otherwise objects.
    """
    if len(columns) == 1:
        return texts[0]
    return [dict(zip(columns, row, strict=True)) for row in zip(*texts, strict=True)]


class Labels:
    """The classes of a task, numbered from 0 in the order of `names`, which the
    config key `key` determines.
    """

    def __init__(self, names: Sequence[str], key: str = "data.labels"):
        self.names = tuple(names)
        self._key = key
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def encode(self, labels: Sequence[str], what: str) -> np.ndarray:
        """Return the number of each label, (n,) int32.

        Error messages name `what` as their source.

        Raises:
            DataError: a label is not one of the names.
        """
        for row, label in enumerate(labels, 1):
            if label not in self._numbers:
                raise DataError(
                    f"{what}, row {row}: the label {label!r} is not one of "
                    f"{', '.join(self.names)}: correct the file, or change {self._key}"
                )
        return np.array([self._numbers[label] for label in labels], np.int32)


def encode_numbers(texts: Sequence[str], what: str) -> np.ndarray:
    """Return the number that each text is, (n,) float32.

    Error messages name `what` as their source.

    Raises:
        DataError: a text is not a finite number.
    """
    numbers = np.zeros(len(texts), np.float32)
    for row, text in enumerate(texts, 1):
        # Python also takes 1_000 for a number, and the digits of other scripts.
        number = float(text) if NUMBER.fullmatch(text.strip()) else math.nan
        if not abs(number) <= float(np.finfo(np.float32).max):
            raise DataError(
                f"{what}, row {row}: the label {text!r} is not a finite number: "
                "correct the file"
            )
        numbers[row - 1] = number
    return numbers


def longest_first(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Shorten pairs to at most `limit` tokens together, taking from the longer one.

    `lengths` and result are (n, 2).
    """
    first = lengths[:, 0]
    second = lengths[:, 1]
    kept = np.minimum(first, np.maximum(limit - second, limit - limit // 2))
    return np.stack([kept, np.minimum(second, limit - kept)], axis=1)


class Frame(NamedTuple):
    """The ids around texts: `begin` text `end`, or for pairs `begin` first `separator`
    second `end`.

    BERT: [CLS], [SEP], [SEP] (Devlin et al. 2019, Figure 4). GPT: [START], [DELIM],
    [EXTRACT] (Radford et al. 2018, Section 3.3). None: no id at this place.

    empty: the id that stands for a row without any other, if there is one.
    """

    begin: int | None
    separator: int | None
    end: int | None
    empty: int | None = None


def laid_out(
    first: Ragged,
    second: Ragged | None,
    *,
    limit: int,
    frame: Frame,
    what: str,
    key: str,
) -> tuple[Ragged, np.ndarray]:
    """Lay out texts or pairs in a `frame`.

    Texts that are too long lose tokens at their ends, the longer one of a pair first.
    Empty texts are kept, and a row without any id gets `frame.empty`. A warning gives
    the number of each.

    Args:
        first: the tokens of each text, or of the first text of each pair.
        second: the tokens of the second texts.
        limit: most tokens of a row, including those of the frame.
        frame: the ids around texts.
        what: source of the texts, for the warnings.
        key: config key of `limit`, for the warning.

    Returns:
        The rows, and (n,) the place at which the second text starts: the row's length
        if there is none.

    Raises:
        DataError: a row would have no id, and `frame.empty` is None.
    """
    n = len(first)
    begin, separator, end = (
        [] if i is None else [Ragged.repeated(i, n)] for i in frame[:3]
    )
    room = limit - len(begin) - len(end) - (0 if second is None else len(separator))
    lengths = np.stack(
        [
            first.lengths,
            np.zeros_like(first.lengths) if second is None else second.lengths,
        ],
        axis=1,
    )
    kept = longest_first(lengths, room)
    cut = kept.sum(axis=1) < lengths.sum(axis=1)
    empty = lengths[:, : 1 if second is None else 2].min(axis=1) == 0
    warn(what, cut, f"are cut to {key} = {limit} tokens")
    warn(what, empty, "have an empty text")
    more = [] if second is None else [*separator, second.first(kept[:, 1])]
    rows = Ragged.beside([*begin, first.first(kept[:, 0]), *more, *end])
    return _filled(rows, frame, what), kept[:, 0] + len(begin) + len(
        separator if second is not None else end
    )


def _filled(rows: Ragged, frame: Frame, what: str) -> Ragged:
    """Return the rows with `frame.empty` in those that are empty."""
    without = rows.lengths == 0
    if not without.any():
        return rows
    if frame.empty is None:
        raise DataError(
            f"{what}: row {without.argmax() + 1} has no text, and the tokenizer "
            "has no end id that could stand for it: fill it in or remove it"
        )
    return Ragged.beside(
        [rows, Ragged.repeated(frame.empty, len(rows)).first(without.astype(int))]
    )


def warn(what: str, found: np.ndarray, words: str) -> None:
    """Log a warning with the number of examples for which `found` (n,) is True, if
    there are any, and the first one.
    """
    if found.any():
        log.warning(
            "%s: %d of %d examples %s; the first is row %d",
            what,
            found.sum(),
            len(found),
            words,
            found.argmax() + 1,
        )
