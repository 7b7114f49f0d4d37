"""Word vectors: what a file gives, what is wrong with a file, and how much memory
reading one takes.
"""

import gzip
import re
import tracemalloc

import numpy as np
import pytest

from helpers.corpus import real_data
from transformer_jax.data.files import DataError
from transformer_jax.data.word_vectors import (
    LONGEST,
    VectorsConfig,
    read,
    width_of,
)

LINES = [
    "the 0.1 -2 3e-1",
    "café 4 5.25 -6",
    "\N{NO-BREAK SPACE} 7 7 7",  # a word of GloVe's, not a separator
    "Paris 1 2 3",
    ". . . 8 8 8",  # a word with spaces, of which GloVe's largest file has some
]
WORDS = ["<pad>", "café", "", "paris", "the"]
HEADER = f"{len(LINES)} 3"


def written(tmp_path, lines, name="vectors.txt", end="\n"):
    data = "".join(line + end for line in lines).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


@pytest.mark.parametrize("name", ["vectors.txt", "vectors.txt.gz"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n"], ids=["unix", "fastText", "dos"])
@pytest.mark.parametrize("first", [[], [HEADER]], ids=["GloVe", "header"])
def test_words_get_the_vectors_of_their_lines(tmp_path, first, end, name):
    """A word is looked up as it is written, and never in another case."""
    path = written(tmp_path, [*first, *LINES], name, end)
    assert width_of(path) == 3
    vectors, found = read(path, WORDS, 3)
    assert found.tolist() == [False, True, False, False, True]
    assert vectors.dtype == np.float32
    expected = np.zeros((5, 3))
    expected[1] = 4, 5.25, -6
    expected[4] = 0.1, -2, 0.3
    np.testing.assert_array_equal(vectors, expected.astype(np.float32))


def test_a_mark_before_the_first_word_and_blank_lines_are_none_of_it(tmp_path):
    path = written(tmp_path, ["\ufeffthe 1 2", "", "cat 3 4", ""])
    vectors, found = read(path, ["cat", "the"], width_of(path))
    assert found.all()
    np.testing.assert_array_equal(vectors, [[3, 4], [1, 2]])


def test_special_tokens_may_be_words_of_a_file(tmp_path):
    """fastText writes </s>, and GloVe <unk>."""
    path = written(tmp_path, ["2 1", "</s> 0.5", "the 1"])
    _, found = read(path, ["<pad>", "<s>", "</s>", "<unk>", "the"], 1)
    assert found.tolist() == [False, False, True, False, True]


def changed(number, line, first=()):
    """Return the lines with another one at `number`, from 1."""
    lines = [*first, *LINES]
    lines[number - 1] = line
    return lines


WIDTH = "but the file has vectors of 3. Correct or remove the line, or copy the file "
WIDTH += "again."
NUMBER = " in its vector: must be a number below 1e+38. Correct or remove the line, "
NUMBER += "or copy the file again."


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (changed(2, "café 4 5"), f":2 has a vector of 2 numbers, {WIDTH}"),
        (changed(4, "Paris 1 2 3 4"), f":4 has a vector of 4 numbers, {WIDTH}"),
        (changed(2, "café"), f":2 has a vector of 0 numbers, {WIDTH}"),
        (
            changed(5, "the 1 2 3", [HEADER]),
            ":5 has a second vector of 'the', whose first is in line 2. "
            "Remove one of the two lines.",
        ),
        (changed(2, "café 4 x 6"), f":2 has 'x'{NUMBER}"),
        (changed(2, "café 4 1.2.3 6"), f":2 has '1.2.3'{NUMBER}"),
        (changed(2, "café 4 1_0 6"), f":2 has '1_0'{NUMBER}"),
        (changed(2, "café 4 nan 6"), f":2 has 'nan'{NUMBER}"),
        (changed(2, "café -inf 5 6"), f":2 has '-inf'{NUMBER}"),
        (changed(2, "café 4 5 1e39"), f":2 has '1e39'{NUMBER}"),
        (changed(2, "café 4  6"), f":2 has ''{NUMBER}"),
        (changed(4, "Paris 1 2 #"), f":4 has '#'{NUMBER}"),  # not in the vocabulary
        (
            ["7 3", *LINES],
            " has 5 vectors, but 7 by its first line. "
            "Copy it again, or correct the first line.",
        ),
        (
            ["5 2", *LINES],
            ":2 has a vector of 3 numbers, but the file has vectors of 2. "
            "Correct or remove the line, or copy the file again.",
        ),
        (
            ["the"],
            ":1 has no numbers: each line must be a word and its vector, separated by "
            "single spaces. Name a file of GloVe or fastText.",
        ),
        (
            ["the\t1\t2\t3"],
            ":1 has no numbers: each line must be a word and its vector, separated by "
            "single spaces. Name a file of GloVe or fastText.",
        ),
        ([], " is empty: copy it again, or name another file."),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(tmp_path, lines, message):
    path = written(tmp_path, lines)
    with pytest.raises(DataError) as error:
        read(path, WORDS, width_of(path))
    assert str(error.value) == path + message


def test_a_word_that_is_not_in_the_vocabulary_may_be_repeated(tmp_path):
    path = written(tmp_path, [*LINES, "Paris 1 2 3"])
    assert read(path, WORDS, 3)[1].sum() == 2


def test_a_line_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_bytes("the 1 2\ncafé 3 4\n".encode("latin-1"))
    with pytest.raises(DataError) as error:
        read(str(path), ["the"], 2)
    assert str(error.value) == (
        f"{path}:2 is not UTF-8: byte 0xe9 at offset 3 of the line. "
        "Convert the file (iconv -t UTF-8), or remove the line."
    )


GZIPPED = gzip.compress("".join(f"w{i} {i} 2\n" for i in range(999)).encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.gz", GZIPPED[:-9], r"is truncated: its gzip data has no end\. Copy it"),
        ("v.gz", b"the 1 2\n", r"is damaged: Not a gzipped file .*\. Copy it again\."),
        ("v.gz", GZIPPED[:-8] + bytes(8), r"is damaged: CRC check failed .*\. Copy it"),
        (
            "v.gz",
            GZIPPED[:10] + b"\xff" * 99,
            r"is damaged: Error -3 .*\. Copy it again",
        ),
        ("v.txt", GZIPPED, r"contains gzip data: rename it so that it ends in \.gz\."),
        ("v.txt", b"PK\x03\x04", r"is a zip archive: unpack it, and name a file of it"),
        ("v.txt", bytes(LONGEST), r":1 has more than 1,048,576 bytes: it is no text"),
        ("v.txt", None, r"cannot be read: No such file or directory\. Name a file of"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))} ?{message}"):
        read(str(path), ["the"], width_of(str(path)))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: Is a directory\. Name"):
        width_of(str(tmp_path))


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_memory_holds_the_vocabulary_and_not_the_file(tmp_path, zipped):
    """The file has 32 MB; the vectors of ten words have 16 KB."""
    vector = " ".join(["-0.12345"] * 400)
    path = tmp_path / ("vectors.txt.gz" if zipped else "vectors.txt")
    opened = gzip.GzipFile if zipped else open
    with opened(path, "wb") as file:
        for i in range(9_000):
            file.write(f"word{i} {vector}\n".encode())
    words = [f"word{i}" for i in range(0, 9_000, 900)]
    tracemalloc.start()
    try:
        _, found = read(str(path), words, 400)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.all()
    assert peak < 500_000


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, None),
        ({"file": "a", "frozen": True, "missing": "mean"}, None),
        ({"missing": "unk"}, ("missing", "must be one of random, zero, mean")),
        (
            {"frozen": True},
            (
                "frozen",
                "needs a file of word vectors: set file in this section, "
                "or this to False",
            ),
        ),
    ],
)
def test_keys_are_checked(options, problem):
    assert list(VectorsConfig(**options).problems()) == ([problem] if problem else [])


def test_the_vectors_of_glove():
    path = str(real_data("glove") / "glove.6B.50d.subset.txt.gz")
    assert width_of(path) == 50
    vectors, found = read(path, ["<pad>", "the", "The", ","], 50)
    assert found.tolist() == [False, True, False, True]
    np.testing.assert_array_equal(
        vectors[1, :3], np.float32([0.418, 0.24968, -0.41242])
    )
    assert vectors[3, -1] == np.float32(0.30392)
