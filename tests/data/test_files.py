"""Files of data: plain or compressed, and what cannot be read is named."""

import gzip
import os

import pytest

from transformer_jax.data import sources
from transformer_jax.data.sources import DataError, parallel_files


def zipped(content: bytes) -> bytes:
    """gzip without the time of day, which would be part of the tests' names."""
    return gzip.compress(content, mtime=0)


def write(directory, **files):
    for name, content in files.items():
        (directory / name.replace("_", ".", 1)).write_bytes(content)


def test_gz_is_read_where_there_is_no_plain_file(tmp_path):
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"zipped\n"))
    write(tmp_path, train_de=b"plain\n")
    for same in (None, gzip.compress(b"plain\n")):
        if same:
            (tmp_path / "train.de.gz").write_bytes(same)
        assert parallel_files(tmp_path, "train", ["en", "de"])[0] == {
            "en": "zipped",
            "de": "plain",
        }


@pytest.mark.parametrize(
    "other", [zipped(b"plain\nmore\n"), zipped(b"plaim\n"), b"no gzip", b""]
)
def test_two_different_files_of_one_text_are_refused(other, tmp_path):
    write(tmp_path, train_de=b"plain\n")
    (tmp_path / "train.de.gz").write_bytes(other)
    with pytest.raises(
        DataError,
        match=r"train\.de and .*train\.de\.gz both exist, but their text differs",
    ):
        parallel_files(tmp_path, "train", ["de"])


def test_missing_directory(tmp_path):
    with pytest.raises(DataError, match=r"no directory .*absent: set data\.directory"):
        parallel_files(tmp_path / "absent", "train", ["en"])


def test_missing_file_lists_what_there_is(tmp_path):
    write(tmp_path, train_en=b"a", train_de=b"a", val_en=b"a", README=b"")
    (tmp_path / "test_2016.fr.gz").write_bytes(b"")
    (tmp_path / "tok.d").mkdir()
    with pytest.raises(DataError) as error:
        parallel_files(tmp_path, "train", ["en", "fr"])
    assert f"neither train.fr nor train.fr.gz in {tmp_path}" in str(error.value)
    assert (
        "The folder contains test_2016 (fr); "
        "train (de, en); val (en). Set data.directory" in str(error.value)
    )


def test_missing_file_in_an_empty_directory(tmp_path):
    with pytest.raises(DataError, match="The folder contains no text files"):
        parallel_files(tmp_path, "train", ["en"])


GOOD = zipped(bytes(range(256)) * 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-20], "is truncated: its gzip data has no end. Copy it"),
        (GOOD[:5], "is truncated: its gzip data has no end. Copy it"),
        (b"", "is truncated: its gzip data has no end. Copy it"),
        (GOOD[:50] + b"\0\0\0\0" + GOOD[54:], "is damaged: .*. Copy it"),
        (GOOD[:-8] + bytes(8), "is damaged: CRC check failed.*. Copy it"),
        (GOOD + b"more", "is damaged: .*. Copy it"),
        (b"plain text\n", "is not a gzip file: it starts with b'plain te'. Rename it"),
        (zipped(zipped(b"a\n")), "contains gzip data instead of text. Decompress it"),
    ],
)
def test_broken_gz_is_named(content, message, tmp_path):
    (tmp_path / "train.en.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"train\.en\.gz {message}"):
        parallel_files(tmp_path, "train", ["en"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "is a folder: must be a text file"),
        (os.mkfifo, "is neither a file nor a folder"),
        (
            lambda path: path.symlink_to("nowhere"),
            r"is a broken link to nowhere \(No such file",
        ),
        (
            lambda path: path.symlink_to(path.name),
            r"is a broken link to train.en \(Too many levels",
        ),
        (
            lambda path: path.symlink_to(path.parent),
            "is a link to .*, which is not a file",
        ),
    ],
)
def test_what_is_not_a_file_is_called_what_it_is(make, message, tmp_path):
    make(tmp_path / "train.en")
    with pytest.raises(DataError, match=rf"train\.en {message}"):
        parallel_files(tmp_path, "train", ["en"])


@pytest.mark.parametrize("name", ["loop", "x" * 300])
def test_a_folder_that_cannot_be_opened(name, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(
        DataError,
        match=rf"{name} cannot be read: (Too many|File name too).*set data\.directory",
    ):
        parallel_files(tmp_path / name, "train", ["en"])


def test_a_file_that_is_cut_while_it_is_used_is_an_error(tmp_path):
    """Without the check, the system would end the process by SIGBUS."""
    path = tmp_path / "train.txt"
    path.write_text("line\n" * 10_000)
    lines = sources.parse_lines(sources.files.read(path), str(path))
    assert lines[9_999] == "line"
    os.truncate(path, 10)
    with pytest.raises(
        DataError,
        match=r"train.txt was cut from 50,000 to 10 bytes while it was read\. Restore",
    ):
        lines[9_999]
