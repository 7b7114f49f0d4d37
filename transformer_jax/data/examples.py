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
        count = "1 column" if len(texts) == 1 else f"{len(texts)} columns"
        raise DataError(
            f"{where} is {_short(line)}, {count}: "
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
    values: Any = record
    if isinstance(record, str):
        values = None
        if record.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                values = json.loads(record)
        if not values or not set(values) <= set(fields):
            return {fields[0]: record}
    if isinstance(values, Mapping):
        for name, value in values.items():
            texts = value if isinstance(value, list) else [value]
            for text in texts:
                if isinstance(text, str):
                    check_characters(text, name, f"record {number}")
    return values


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
    entries: list[list[Any] | None] = []
    for name in columns:
        if all(name in record for record in objects):
            entries.append([record[name] for record in objects])
        else:
            entries.append(None)
    return entries


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

    def encode(self, labels: Sequence[str], source: str) -> np.ndarray:
        """Return the number of each label, (n,) int32.

        Error messages name `source` as the source of the labels.

        Raises:
            DataError: a label is not one of the names.
        """
        for row, label in enumerate(labels, 1):
            if label not in self._numbers:
                raise DataError(
                    f"{source}, row {row}: the label {label!r} is not one of "
                    f"{', '.join(self.names)}: correct the file, or change {self._key}"
                )
        return np.array([self._numbers[label] for label in labels], np.int32)


def encode_numbers(texts: Sequence[str], source: str) -> np.ndarray:
    """Return the number that each text is, (n,) float32.

    Error messages name `source` as the source of the texts.

    Raises:
        DataError: a text is not a finite number.
    """
    numbers = np.zeros(len(texts), np.float32)
    for row, text in enumerate(texts, 1):
        # Python also takes 1_000 for a number, and the digits of other scripts.
        number = float(text) if NUMBER.fullmatch(text.strip()) else math.nan
        if not abs(number) <= float(np.finfo(np.float32).max):
            raise DataError(
                f"{source}, row {row}: the label {text!r} is not a finite number: "
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
    left_by_second = np.maximum(limit - second, limit - limit // 2)
    first_size = np.minimum(first, left_by_second)
    second_size = np.minimum(second, limit - first_size)
    return np.stack([first_size, second_size], axis=1)


class Frame(NamedTuple):
    """The ids around texts: `begin` text `end`, or for pairs `begin` first `separator`
    second `end`.

    BERT: [CLS], [SEP], [SEP] (Devlin et al. 2019, Figure 4). GPT: [START], [DELIM],
    [EXTRACT] (Radford et al. 2018, Section 3.3). None: no id.

    empty: the id that stands for a row without any other, if there is one.
    separators: the number of separators between the texts of a pair: 2 in RoBERTa.
    """

    begin: int | None
    separator: int | None
    end: int | None
    empty: int | None = None
    separators: int = 1


def laid_out(
    first: Ragged,
    second: Ragged | None,
    *,
    limit: int,
    frame: Frame,
    source: str,
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
        source: name of the source of the texts, for the warnings.
        key: config key of `limit`, for the warning.

    Returns:
        The rows, and (n,) the position at which the second text starts: the row's
        length if there is none.

    Raises:
        DataError: a row would have no id, and `frame.empty` is None.
    """
    n = len(first)
    begin, separator, end = (
        [] if i is None else [Ragged.repeated(i, n)] for i in frame[:3]
    )
    if second is None:
        room = limit - len(begin) - len(end)
        cut_first = first.first(room)
        is_cut = cut_first.lengths < first.lengths
        is_empty = first.lengths == 0
        parts = [*begin, cut_first, *end]
        after_first = end
    else:
        separator = separator * frame.separators
        room = limit - len(begin) - len(separator) - len(end)
        lengths = np.stack([first.lengths, second.lengths], axis=1)
        sizes = longest_first(lengths, room)
        cut_first = first.first(sizes[:, 0])
        cut_second = second.first(sizes[:, 1])
        is_cut = sizes.sum(axis=1) < lengths.sum(axis=1)
        is_empty = lengths.min(axis=1) == 0
        parts = [*begin, cut_first, *separator, cut_second, *end]
        after_first = separator
    warn(source, is_cut, f"are cut to {key} = {limit} tokens")
    warn(source, is_empty, "have an empty text")
    rows = _filled(Ragged.beside(parts), frame, source)
    return rows, len(begin) + cut_first.lengths + len(after_first)


def _filled(rows: Ragged, frame: Frame, source: str) -> Ragged:
    """Return the rows with `frame.empty` in those that are empty."""
    is_empty = rows.lengths == 0
    if not is_empty.any():
        return rows
    if frame.empty is None:
        raise DataError(
            f"{source}: row {is_empty.argmax() + 1} has no text, and the tokenizer "
            "has no end id that could stand for it: fill it in or remove it"
        )
    fillers = Ragged.repeated(frame.empty, len(rows)).first(is_empty.astype(int))
    return Ragged.beside([rows, fillers])


def warn(source: str, is_affected: np.ndarray, words: str) -> None:
    """Log a warning with the number of examples that are affected, and the first one.

    `is_affected` (n,) is True for these. `words` say what happens to them.
    """
    if is_affected.any():
        log.warning(
            "%s: %d of %d examples %s; the first is row %d",
            source,
            is_affected.sum(),
            len(is_affected),
            words,
            is_affected.argmax() + 1,
        )
