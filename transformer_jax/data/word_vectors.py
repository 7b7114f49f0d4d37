"""Word vectors from a text file of GloVe or fastText, for the words of a vocabulary.

Each line of the file is a word and its numbers, separated by single spaces: "word v1 …
vd". A first line of two integers, the number of vectors and d, is optional (fastText
and word2vec write it, GloVe does not). A file is read once, line by line, so memory
holds only the vectors of the vocabulary.
"""

import contextlib
import dataclasses
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from transformer_jax import fields
from transformer_jax.data.files import GZIP_MARK, DataError
from transformer_jax.data.progress import progress
from transformer_jax.files import is_for_user

MISSING = ("random", "zero", "mean")
LONGEST = 2**20  # bytes of a line, far more than a word and its vector need
ZIP_MARK = b"PK\x03\x04"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NUMERIC = b"0123456789+-.eE "  # all bytes of numbers and the spaces between them
LARGEST = 1e38  # the limit of float32


@dataclasses.dataclass(frozen=True)
class VectorsConfig:
    """Word vectors that an embedding starts with.

    file: a text file of GloVe or fastText, also as .gz. "": the embedding starts with
        random values. The file is read when a run begins, and never again.
    frozen: the embedding keeps its values in training, as in CNN-static of Kim 2014.
    missing: the vectors of tokens that the file lacks: "random", the values with which
        the embedding would start without a file; "zero"; "mean", the mean of the
        vectors that the vocabulary has.
    """

    file: str = fields.beginning("")
    frozen: bool = False
    missing: str = "random"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.missing not in MISSING:
            yield "missing", f"must be one of {', '.join(MISSING)}"
        if self.frozen and not self.file:
            yield (
                "frozen",
                "needs a file of word vectors: set file in this section, "
                "or this to False",
            )


def width_of(path: str) -> int:
    """Return the width d of the vectors in a file, by its first line.

    Raises DataError if the file cannot be read or does not begin like one of vectors.
    """
    for number, text in _lines(path):
        header = _header(text)
        width = header[1] if header else text.count(b" ")
        if width < 1:
            raise DataError(
                f"{path}:{number} has no numbers: each line must be a word and its "
                "vector, separated by single spaces. Name a file of GloVe or fastText."
            )
        return width
    raise DataError(f"{path} is empty: copy it again, or name another file.")


def read(path: str, words: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of some words.

    Every line of the file must be UTF-8, and have `width` numbers. The numbers of other
    words are not parsed, and may be repeated. A word with a space in it, as GloVe's
    largest file has some, is none of `words`.

    Args:
        path: the file.
        words: different words; "" is none.
        width: d, from `width_of`.

    Returns:
        The vectors (V, d), float32, 0 for words that the file lacks; and (V,), True for
        words that it has.

    Raises:
        DataError: the file cannot be read, a line is invalid, or one of `words` occurs
            twice. The message names file and line.
    """
    row_of = {word.encode(): row for row, word in enumerate(words) if word}
    vectors = np.zeros((len(words), width), np.float32)
    line_of = np.zeros(len(words), np.int64)
    announced = None
    count = 0
    with progress(f"reading {path}"):
        for number, text in _lines(path):
            if number == 1 and (header := _header(text)):
                announced, _ = header
                continue
            count += 1
            where = f"{path}:{number}"
            word, numbers = _parted(text, width, where)
            row = row_of.get(word)
            if row is None:
                continue
            if line_of[row]:
                raise DataError(
                    f"{where} has a second vector of {words[row]!r}, whose first is in "
                    f"line {line_of[row]}. Remove one of the two lines."
                )
            vectors[row] = _parsed(numbers, where)
            line_of[row] = number
    if announced is not None and count != announced:
        raise DataError(
            f"{path} has {count:,} vectors, but {announced:,} by its first line. "
            "Copy it again, or correct the first line."
        )
    return vectors, line_of > 0


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a file, decompressed if its name ends in .gz."""
    with epath.Path(path).open("rb") as file:
        if not path.endswith(".gz"):
            yield file
            return
        with gzip.open(file) as decompressed:
            yield decompressed


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, from 1, and its bytes, without spaces at the end.

    Blank lines are left out.

    Raises DataError if the file cannot be read, or if it cannot be one of vectors.
    """
    try:
        with _opened(path) as file:
            number = 0
            while line := file.readline(LONGEST):
                number += 1
                if number == 1:
                    _check_kind(path, line)
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if len(line) == LONGEST:
                    raise DataError(
                        f"{path}:{number} has more than {LONGEST:,} bytes: it is no "
                        "text file of vectors. Name one of GloVe or fastText."
                    )
                if text := line.rstrip(b"\r\n "):
                    yield number, text
    except EOFError as error:
        raise DataError(
            f"{path} is truncated: its gzip data has no end. Copy it again."
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Copy it again.") from error
    except OSError as error:
        if not is_for_user(error):
            raise
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. "
            "Name a file of word vectors."
        ) from error


def _check_kind(path: str, start: bytes) -> None:
    """Raise DataError if the first bytes are those of a compressed file."""
    if start.startswith(GZIP_MARK):
        raise DataError(f"{path} contains gzip data: rename it so that it ends in .gz.")
    if start.startswith(ZIP_MARK):
        raise DataError(f"{path} is a zip archive: unpack it, and name a file of it.")


def _header(text: bytes) -> tuple[int, int] | None:
    """Return the number and the width of vectors from a first line that has them."""
    match = re.fullmatch(rb"(\d+) (\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def _parted(text: bytes, width: int, where: str) -> tuple[bytes, bytes]:
    """Divide a line into the word and its numbers, which are not parsed yet.

    Raises DataError if the line is invalid.
    """
    if text.count(b" ") == width:
        word, _, numbers = text.partition(b" ")
    else:
        word, *parts = text.rsplit(b" ", width)
        # other words may have spaces in them; a number there belongs to the vector
        if len(parts) < width or not math.isnan(_number(word.rpartition(b" ")[2])):
            raise DataError(
                f"{where} has a vector of {text.count(b' ')} numbers, but the file has "
                f"vectors of {width}. Correct or remove the line, or copy the file "
                "again."
            )
        numbers = b" ".join(parts)
    try:
        word.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte 0x{word[error.start]:02x} at offset "
            f"{error.start} of the line. "
            "Convert the file (iconv -t UTF-8), or remove the line."
        ) from error
    if numbers.translate(None, NUMERIC):
        _parsed(numbers, where)
    return word, numbers


def _number(text: bytes) -> float:
    """Return the value of a number, or NaN for any other text."""
    if text.translate(None, NUMERIC):
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parsed(numbers: bytes, where: str) -> np.ndarray:
    """Return numbers that are separated by single spaces, in float64.

    Raises DataError if one of them is no number, or too large for float32.
    """
    texts = numbers.split(b" ")
    values = np.array([_number(text) for text in texts])
    wrong = np.flatnonzero(~(np.abs(values) < LARGEST))
    if len(wrong):
        shown = texts[wrong[0]].decode(errors="backslashreplace")
        raise DataError(
            f"{where} has {shown!r} in its vector: must be a number below "
            f"{LARGEST:g}. Correct or remove the line, or copy the file again."
        )
    return values
