"""Read annotated text: questions with answers (SQuAD)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from transformer_jax.data import files
from transformer_jax.data.sources import DataError, decode_lines

_KINDS = {str: "a string", int: "an integer", list: "a list"}


class Paragraph(NamedTuple):
    """A paragraph of a SQuAD file: its article's title, its text and its questions, which are not checked yet."""

    where: str  # file, article and paragraph, for messages
    title: str
    context: str
    questions: list[Any]


def squad_paragraphs(path: epath.Path) -> Iterator[Paragraph]:
    """Yield the paragraphs of a JSON file in the layout of SQuAD 1.1 or 2.0 (Rajpurkar et al., 2016 and 2018).

    Raises:
        DataError: the file is unreadable, not UTF-8 or not JSON, a key is missing, or a context is blank.
    """
    text = "\n".join(decode_lines(files.read(path), str(path)))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}, column {error.colno} is not JSON: {error.msg}. Copy the file again, or correct it."
        ) from error
    for i, article in enumerate(_value(content, "data", list, str(path)), 1):
        where = f"{path}, article {i}"
        for j, paragraph in enumerate(_value(article, "paragraphs", list, where), 1):
            place = f"{where}, paragraph {j}"
            yield Paragraph(
                place,
                _value(article, "title", str, where),
                _filled(paragraph, "context", place),
                _value(paragraph, "qas", list, place),
            )


def _value(record: Any, key: str, kind: type, where: str) -> Any:
    """Return record[key]. Raises DataError, with the place, if the key is missing or its value is of another type."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise DataError(
            f"{where} must have {key!r}, {_KINDS[kind]}, but it is {json.dumps(record)[:80]}. Write the file in the "
            "layout of SQuAD: data, paragraphs, context, qas."
        )
    return value


def _filled(record: Any, key: str, where: str) -> str:
    text = _value(record, key, str, where)
    if not text.strip():
        raise DataError(f"{where} has a blank {key}: write the text, or remove it.")
    return text
