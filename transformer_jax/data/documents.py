"""Write documents of sentences, the text that BERT is pre-trained on: one sentence
per line, blank lines between.
"""

import contextlib
import hashlib
import itertools
import operator
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from transformer_jax.data import files
from transformer_jax.data.annotated import squad_paragraphs
from transformer_jax.data.sources import DataError, decode_lines
from transformer_jax.files import replacing

OPENING = "\"'“‘«(["
CLOSING = "\"'”’»)]"
END = re.compile(rf"[.!?…][{re.escape(CLOSING)}]*$")
INITIALS = re.compile(r"([^\W\d_]\.)+")  # J. or U.S.
ABBREVIATIONS = re.compile(
    r"(Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Gen|Col|Capt|Lt|Sgt|Rev|Hon|Gov|Sen|Rep|"
    r"Mt|Ft|Nos?|Fig|Vol|vs|cf|ca|pp|"
    r"Jan|Feb|Mar|Apr|Aug|Sept|Oct|Nov|Dec)\."
)


class Counts(NamedTuple):
    """The size of a file of documents."""

    documents: int
    sentences: int
    words: int


def sentences(text: str) -> Iterator[str]:
    """Split text into sentences, with single spaces between words.

    A heuristic, for text in languages with capital letters. A sentence ends after ".",
    "!", "?" or "…", with closing quotes and brackets, if the next word begins with a
    capital letter, a digit or an opening quote. It does not end after initials ("J.",
    "U.S.", "e.g.") and common English abbreviations ("Dr.").
    """
    words: list[str] = []
    for word, following in itertools.pairwise([*text.split(), ""]):
        words.append(word)
        if not following or (_ends(word) and _begins(following)):
            yield " ".join(words)
            words = []


def _ends(word: str) -> bool:
    bare = word.lstrip(OPENING)
    return bool(END.search(word)) and not (
        ABBREVIATIONS.fullmatch(bare) or INITIALS.fullmatch(bare)
    )


def _begins(word: str) -> bool:
    first = word.lstrip(OPENING)[:1]
    return first.isupper() or first.isdigit() or word[0] in "\"'“‘«"


def write_documents(
    inputs: Sequence[str], output: str, held_out: int = 0, held_out_output: str = ""
) -> dict[str, Counts]:
    """Split the text of `inputs` into documents and sentences, and write them to
    `output`.

    A paragraph of a SQuAD file (`.json`) is a document, and so is a line of any other
    file. Inputs may end in `.gz`. A document that occurs several times is written once,
    so that no held-out document is also in `output`.

    Args:
        inputs: files, in the order in which they are written.
        output: file of the documents.
        held_out: every `held_out`-th document goes to `held_out_output` instead; 0:
            none.
        held_out_output: file of the documents that are held out.

    Returns:
        The size of each file written.

    Raises:
        DataError: an input cannot be read, there are too few documents, or an output is
            also an input.
        OutputError: an output cannot be written. In either case, existing files are
            unchanged.
    """
    if (held_out > 0) != bool(held_out_output) or held_out == 1 or held_out < 0:
        raise DataError(
            f"held_out = {held_out}, held_out_output = {held_out_output!r}: "
            "set both, the first to 2 or more, or none"
        )
    outputs = [output, held_out_output] if held_out else [output]
    sources = _find(inputs, outputs)
    counts = [Counts(0, 0, 0)] * len(outputs)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(replacing(epath.Path(path).expanduser()))
            for path in outputs
        ]
        for number, document in enumerate(_documents(sources), 1):
            which = 1 if held_out and number % held_out == 0 else 0
            blank = b"\n" if counts[which].documents else b""
            opened[which].writelines(
                [blank, *(line.encode() + b"\n" for line in document)]
            )
            size = Counts(
                1, len(document), sum(line.count(" ") + 1 for line in document)
            )
            counts[which] = Counts(*map(operator.add, counts[which], size))
        if not all(count.documents for count in counts):
            total = sum(count.documents for count in counts)
            raise DataError(
                f"{', '.join(inputs)}: "
                f"{total} documents are too few for {' and '.join(outputs)}, "
                "which must not be empty. Add text, or hold out more often."
            )
    return dict(zip(outputs, counts, strict=True))


def _find(inputs: Sequence[str], outputs: Sequence[str]) -> list[epath.Path]:
    """Return the paths of the inputs.

    Raises DataError if one is missing, or a name is empty or given twice.
    """
    if not inputs or not all([*inputs, *outputs]):
        raise DataError(
            f"inputs {list(inputs)} and output {', '.join(outputs)!r}: "
            "name at least one file each"
        )
    named = [epath.Path(name).expanduser() for name in inputs]
    for path in named:
        if not (path.exists() or path.with_name(f"{path.name}.gz").exists()):
            raise DataError(f"there is no file {path}: correct the inputs")
    paths = [files.find(path.parent, path.name) for path in named]
    real_inputs = [_real_path(path) for path in paths]
    real_outputs = [_real_path(path) for path in outputs]
    for path, real_path in zip(outputs, real_outputs, strict=True):
        if [*real_inputs, *real_outputs].count(real_path) > 1:
            raise DataError(
                f"{path} is named twice, and its text would be lost: "
                "choose another file for the output"
            )
    return paths


def _real_path(path: epath.PathLike) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _documents(paths: Sequence[epath.Path]) -> Iterator[list[str]]:
    """Yield the sentences of each document that differs from those before."""
    seen = set()
    for text in itertools.chain.from_iterable(map(_texts, paths)):
        document = list(sentences(text))
        digest = hashlib.blake2b("\n".join(document).encode(), digest_size=16).digest()
        if document and digest not in seen:
            seen.add(digest)
            yield document


def _texts(path: epath.Path) -> Iterator[str]:
    if path.name.removesuffix(".gz").endswith(".json"):
        yield from (paragraph.context for paragraph in squad_paragraphs(path))
    else:
        yield from decode_lines(files.read(path), str(path))
