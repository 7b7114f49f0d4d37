"""Read annotated text: questions with answers (SQuAD), tagged words (CoNLL), and
documents of sentences.

The files of a split are called `{split}.json`, `{split}.conll` and `{split}.txt`,
optionally followed by `.gz`. A split may be a part of one, e.g. "train[:90%]", counted
in questions, sentences and documents.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from transformer_jax.data import files
from transformer_jax.data.sources import (
    DataError,
    Source,
    bounds,
    decode_lines,
    file_name,
    held,
    parse_lines,
)

log = logging.getLogger(__name__)

SQUAD_COLUMNS = ("id", "title", "question", "context", "answers")
CONLL_COLUMNS = ("words", "tags", "line")
DOCUMENT_COLUMNS = ("text", "document")

_KINDS = {str: "a string", int: "an integer", list: "a list"}


class Paragraph(NamedTuple):
    """A paragraph of a SQuAD file: its article's title, its text and its questions,
    which are not checked yet.
    """

    where: str  # file, article and paragraph, for messages
    title: str
    context: str
    questions: list[Any]


def squad_paragraphs(path: epath.Path) -> Iterator[Paragraph]:
    """Yield the paragraphs of a JSON file in the layout of SQuAD 1.1 or 2.0 (Rajpurkar
    et al., 2016 and 2018).

    Raises:
        DataError: the file is unreadable, not UTF-8 or not JSON, a key is missing, or a
            context is blank.
    """
    text = "\n".join(decode_lines(files.read(path), str(path)))
    content = files.parse_json(text, str(path))
    for i, article in enumerate(_value(content, "data", list, str(path)), 1):
        where = f"{path}, article {i}"
        for j, paragraph in enumerate(_value(article, "paragraphs", list, where), 1):
            paragraph_name = f"{where}, paragraph {j}"
            yield Paragraph(
                paragraph_name,
                _value(article, "title", str, where),
                _filled(paragraph, "context", paragraph_name),
                _value(paragraph, "qas", list, paragraph_name),
            )


def squad_file(
    directory: epath.PathLike, split: str, columns: Sequence[str] = SQUAD_COLUMNS
) -> Source:
    """Read the questions of `{split}.json`, in the layout of SQuAD 1.1 or 2.0.

    The columns are "id", "title", "question", "context" and "answers". Answers are a
    JSON list of objects with "text" and "start", in characters: context[start : start +
    len(text)] is the text. Questions without an answer have an empty list. Answers are
    read, and must be there, only if they are among the columns.

    An answer that is not at its "answer_start" gets the start of its nearest
    occurrence. One that does not occur in the context at all is dropped, if its
    question has others. A warning counts both.

    Raises:
        DataError: the file is missing or invalid (see `squad_paragraphs`), a question
            is blank, an id occurs twice, no answer to a question occurs in its context,
            or a column is unknown.
    """
    path = _find(directory, f"{file_name(split)}.json", columns, SQUAD_COLUMNS)
    rows = dict[str, dict[str, str]]()
    moved = list[str]()
    dropped = list[str]()
    for paragraph in squad_paragraphs(path):
        for i, question in enumerate(paragraph.questions, 1):
            identifier = _filled(question, "id", f"{paragraph.where}, question {i}")
            where = f"{path}, question {identifier}"
            if identifier in rows:
                raise DataError(
                    f"{where} occurs twice: "
                    "give each question an id of its own, or remove one of them."
                )
            row = {
                "id": identifier,
                "title": paragraph.title,
                "question": _filled(question, "question", where),
            }
            rows[identifier] = row | {"context": paragraph.context}
            if "answers" in columns:
                answers = _answers(question, paragraph.context, where, moved, dropped)
                rows[identifier]["answers"] = json.dumps(answers, ensure_ascii=False)
    _warn_of_answers(
        path,
        moved,
        "are not at their answer_start, and the nearest occurrence is used",
    )
    _warn_of_answers(path, dropped, "do not occur in their contexts, and are left out")
    return _part(split, list(rows.values()), columns, "questions", path)


def _warn_of_answers(path: epath.Path, names: list[str], fault: str) -> None:
    if names:
        examples = ", ".join(names[:3])
        log.warning(
            "%s: answers that %s: %d, e.g. %s", path, fault, len(names), examples
        )


def _answers(
    question: Any, context: str, where: str, moved: list[str], dropped: list[str]
) -> list[dict[str, str | int]]:
    """Return the answers to a question, and note those that are moved or dropped."""
    given = _value(question, "answers", list, where)
    impossible = question.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise DataError(
            f"{where} has is_impossible = {impossible!r}: "
            "it must be true or false, without quotes"
        )
    if impossible or not given:
        return []
    answers = list[dict[str, str | int]]()
    for i, answer in enumerate(given, 1):
        answer_name = f"{where}, answer {i}"
        text = _filled(answer, "text", answer_name)
        start = _value(answer, "answer_start", int, answer_name)
        if start < 0 or not context.startswith(text, start):
            occurrence = _nearest_occurrence(text, context, start)
            shown = f"{text[:40]!r} of {question['id']}"
            if occurrence is None:
                dropped.append(shown)
                continue
            moved.append(shown)
            start = occurrence
        answers.append({"text": text, "start": start})
    if not answers:
        text = given[0]["text"]
        composed_text = unicodedata.normalize("NFC", text)
        composed_context = unicodedata.normalize("NFC", context)
        if composed_text in composed_context:
            remedy = (
                "It does in another Unicode form: write both in the same one, "
                "e.g. with unicodedata.normalize('NFC', text)."
            )
        else:
            remedy = "Correct the answer, or remove the question."
        raise DataError(
            f"{where}: the answer {text[:80]!r} does not occur in the context, "
            f"so that the question has no answer. {remedy}"
        )
    return answers


def _nearest_occurrence(text: str, context: str, start: int) -> int | None:
    """Return the start of the occurrence of a text in its context that is nearest to
    `start`, or None if there is none.
    """
    matches = re.finditer(f"(?={re.escape(text)})", context)
    starts = [match.start() for match in matches]
    return min(starts, key=lambda x: abs(x - start), default=None)


def _value(record: Any, key: str, kind: type, where: str) -> Any:
    """Return record[key].

    Raises DataError, which names the record by `where`, if the key is missing or its
    value is of another type.
    """
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise DataError(
            f"{where} must have {key!r}, {_KINDS[kind]}, "
            f"but it is {json.dumps(record)[:80]}. "
            "Write the file in the layout of SQuAD (data, paragraphs, qas, answers)."
        )
    return value


def _filled(record: Any, key: str, where: str) -> str:
    text = _value(record, key, str, where)
    if not text.strip():
        raise DataError(f"{where} has a blank {key}: write the text, or remove it.")
    files.check_characters(text, key, where)
    return text


def conll_file(
    directory: epath.PathLike, split: str, columns: Sequence[str] = CONLL_COLUMNS
) -> Source:
    """Read the sentences of `{split}.conll`: a word per line, with its tag in the last
    column.

    Columns are separated by single tabs, or else by spaces. A blank line or a line of
    "-DOCSTART-" ends a sentence. The result has the columns "words" and "tags",
    separated by spaces, and "line", the number of the first word's line. Files without
    tags can be read if "tags" is not requested.

    Source: the format of the CoNLL-2003 shared task (Tjong Kim Sang and De Meulder,
    2003).

    Raises:
        DataError: the file is missing or unreadable, not UTF-8 or without sentences, a
            word or a tag is missing or contains white space, or a column is unknown.
    """
    path = _find(directory, f"{file_name(split)}.conll", columns, CONLL_COLUMNS)
    rows = list[dict[str, str]]()
    fields = (
        (number, _fields(line))
        for number, line in enumerate(parse_lines(files.read(path), str(path)), 1)
    )
    for in_sentence, lines in itertools.groupby(fields, lambda line: bool(line[1])):
        if not in_sentence:
            continue
        sentence = list(lines)
        for number, line in sentence:
            if "tags" in columns and len(line) == 1:
                raise DataError(
                    f"{path}:{number} has no tag after the word {line[0]!r}: "
                    "add it, separated by a tab."
                )
            if any(len(field.split()) != 1 for field in (line[0], line[-1])):
                raise DataError(
                    f"{path}:{number} has the word {line[0]!r} and the tag "
                    f"{line[-1]!r}, of which one is empty or has white space: "
                    "separate columns by single tabs, and replace other white space."
                )
        first_line, _ = sentence[0]
        words = " ".join(line[0] for _, line in sentence)
        tags = " ".join(line[-1] for _, line in sentence)
        rows.append({"words": words, "tags": tags, "line": str(first_line)})
    return _part(split, rows, columns, "sentences", path)


def _fields(line: str) -> list[str]:
    """Return the columns of a line, or none if it ends a sentence."""
    text = line.rstrip().lstrip(" ")
    fields = text.split("\t") if "\t" in text else re.split(" +", text)
    return [] if not text or fields[0] == "-DOCSTART-" else fields


def documents_file(
    directory: epath.PathLike, split: str, columns: Sequence[str] = DOCUMENT_COLUMNS
) -> Source:
    """Read the sentences of `{split}.txt`, one per line.

    Blank lines separate documents.

    The columns are "text", without white space around it, and "document", the number of
    its document in the file.

    Source: the input format of BERT's pre-training
    (https://github.com/google-research/bert#pre-training-with-bert).

    Raises:
        DataError: the file is missing or unreadable, not UTF-8 or blank, or a column is
            unknown.
    """
    path = _find(directory, f"{file_name(split)}.txt", columns, DOCUMENT_COLUMNS)
    lines = map(str.strip, parse_lines(files.read(path), str(path)))
    documents = [
        list(group) for is_text, group in itertools.groupby(lines, bool) if is_text
    ]
    start, stop = bounds(split, len(documents), "documents", str(path))
    numbered = enumerate(documents[start:stop], start + 1)
    values = {
        "text": [text for document in documents[start:stop] for text in document],
        "document": [str(number) for number, document in numbered for _ in document],
    }
    return Source({name: held(values[name]) for name in columns}, str(path))


def _find(
    directory: epath.PathLike, name: str, columns: Sequence[str], choices: Sequence[str]
) -> epath.Path:
    path = files.find(directory, name)
    if unknown := [column for column in columns if column not in choices]:
        raise DataError(
            f"{path} has no column {', '.join(unknown)}: "
            f"choose from {', '.join(choices)}."
        )
    return path


def _part(
    split: str,
    rows: Sequence[Mapping[str, str]],
    columns: Sequence[str],
    noun: str,
    path: epath.Path,
) -> Source:
    """Return columns of the rows that `split` names.

    `noun` is what the rows are called in messages, e.g. "sentences".
    """
    start, stop = bounds(split, len(rows), noun, str(path))
    return Source(
        {name: held(row[name] for row in rows[start:stop]) for name in columns},
        str(path),
    )
