"""Read tables of tab-separated values: those of users, and those of GLUE as they are
published.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from etils import epath

from transformer_jax.data import files
from transformer_jax.data.files import DataError
from transformer_jax.data.sources import (
    Source,
    bounds,
    check_endings,
    file_name,
    held,
    parse_lines,
)

# Names of columns, and those that files of GLUE have instead: QQP, MRPC, STS-B and
# MNLI.
ALIASES = {
    "label": ("is_duplicate", "Quality", "score", "gold_label"),
    "sentence1": ("#1 String",),
    "sentence2": ("#2 String",),
    "premise": ("sentence1",),
    "hypothesis": ("sentence2",),
}
# the columns of CoLA's files, which do not name them
COLA = ("source", "label", "mark", "sentence")
# some of its lines are damaged
QQP = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")

log = logging.getLogger(__name__)


def tsv_file(directory: epath.PathLike, split: str, columns: Sequence[str]) -> Source:
    """Read columns of `{split}.tsv[.gz]`.

    Fields are separated by tabs, without quoting. The first line names them.

    Files of GLUE are read as they are published (https://gluebenchmark.com/tasks). If a
    column is missing, one of its `ALIASES` is read. The files of CoLA have no names of
    columns. Lines of QQP with too few fields are left out, with a warning.

    Raises:
        DataError: the file is missing or unreadable, a line is not UTF-8 or has too few
            or too many fields, a column is missing, or there are no rows.
    """
    path = files.find(directory, f"{file_name(split)}.tsv")
    content = parse_lines(files.read(path), str(path))
    check_endings(content, path)
    first = content[0].split("\t") if len(content) else [""]
    header = list(COLA) if _of_cola(first, columns) else first
    named = {name: _name(name, header) for name in columns}
    if missing := [name for name in columns if header.count(named[name]) != 1]:
        raise DataError(
            f"{path}:1 must name these columns once each: "
            f"{', '.join(missing)}. It names: {', '.join(header) or '(none)'}. "
            "Write the names of the columns on the first line, separated by tabs."
        )
    for name in columns:
        if named[name] != name:
            log.info(
                "%s: the column %r is read as %r, as in files of GLUE",
                path,
                named[name],
                name,
            )
    above = 1 if header is first else 0
    rows = list(_rows(content, above, header, path))
    if not rows:
        raise DataError(
            f"{path} has only the line that names its columns: "
            "add a line for each example"
        )
    whole = len(rows) == len(content) - above
    start, stop = bounds(split, len(rows), "rows", str(path))
    values = {}
    for name in columns:
        index = header.index(named[name])
        values[name] = held(row[index] for row in rows[start:stop])
    return Source(values, str(path), first_line=start + above + 1 if whole else 0)


def _of_cola(fields: Sequence[str], columns: Sequence[str]) -> bool:
    """Return True if the first line of a file is an example of CoLA, and its columns
    are asked for.
    """
    return (
        len(fields) == len(COLA)
        and fields[1] in ("0", "1")
        and fields[2] in ("", "*")
        and set(columns) <= set(COLA)
    )


def _name(column: str, header: Sequence[str]) -> str:
    """Return the name that a column has in a file."""
    names = (column, *ALIASES.get(column, ()))
    return next((name for name in names if name in header), column)


def _rows(
    content: Sequence[str], above: int, header: Sequence[str], path: epath.Path
) -> Iterator[list[str]]:
    """Yield the fields of each line below the first `above` lines."""
    damaged = list[int]()
    for number, line in enumerate(content, 1):
        fields = line.split("\t")
        if number <= above:
            continue
        if len(fields) == len(header):
            yield fields
        elif tuple(header) == QQP and len(fields) < len(header):
            damaged.append(number)
        else:
            raise DataError(
                f"{path}:{number} has {len(fields)} fields, "
                f"but the first line names {len(header)}: {', '.join(header)}. "
                "Separate fields by single tabs, and leave none out."
            )
    if damaged:
        log.warning(
            "%s: %d lines with too few fields are left out, e.g. line %d",
            path,
            len(damaged),
            damaged[0],
        )
