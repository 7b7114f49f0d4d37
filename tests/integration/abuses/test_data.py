"""Invalid data for train.py.

Each error message names the file and the problem; the data stay unchanged.
"""

import gzip
import os
from pathlib import Path

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script

ZIPPED = gzip.compress(b"ek at\n" * 60)


def write(name: str, content: bytes):
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return change


def zipped(content: bytes):
    def change(folder: Path) -> None:
        (folder / "train.en").unlink()
        (folder / "train.en.gz").write_bytes(content)

    return change


def replaced(make):
    def change(folder: Path) -> None:
        (folder / "train.en").unlink()
        make(folder / "train.en")

    return change


# Files whose messages tests/data/test_files.py and test_sources.py compare.
UNREADABLE = [
    (replaced(Path.mkdir), [], ["train.en is a folder"]),
    (replaced(os.mkfifo), [], ["train.en is neither a file nor a folder"]),
    (
        replaced(lambda path: path.symlink_to("nowhere")),
        [],
        ["a broken link to nowhere ("],
    ),
    (
        replaced(lambda path: path.symlink_to("train.en")),
        [],
        ["a broken link to train.en (Too many levels"],
    ),
    (zipped(b""), [], ["train.en.gz is truncated"]),
    (zipped(b"ek at\n"), [], ["train.en.gz is not a gzip file"]),
    (zipped(ZIPPED[:-8] + bytes(8)), [], ["train.en.gz is damaged: CRC"]),
    (
        zipped(gzip.compress(ZIPPED)),
        [],
        ["train.en.gz contains gzip data instead of text"],
    ),
    (
        write("train.en", ZIPPED),
        [],
        ["train.en contains gzip data instead of text"],
    ),
    (
        write("train.en", "ek\n".encode("utf-16") * 60),
        [],
        ["looks like UTF-16", "iconv"],
    ),
    (
        write("train.en", b"ek\nol\xe9\n"),
        [],
        ["train.en:2 is not UTF-8: byte 0xe9 at offset 2"],
    ),
    (
        write("train.en", b"ek\r" * 60),
        [],
        ["train.en is one line with carriage returns in it"],
    ),
]


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (
            write("val.en", b"\n" * 11),
            [],
            ["val.en and ", "all 11 lines of en in the split val are blank"],
        ),
        (
            write("val.de", b" \t \n" * 11),
            [],
            ["all 11 lines of de in the split val are blank"],
        ),
        (
            write("train.de", b"\n" * 60),
            [],
            ["all 60 lines of de in the split train are blank"],
        ),
        (
            write("train.en.gz", ZIPPED),
            [],
            ["train.en and ", "train.en.gz both exist, but their text differs"],
        ),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in UNREADABLE),
        (zipped(ZIPPED[:-9]), [], ["train.en.gz is truncated"]),
        (
            write("train.en", b"ek\n"),
            [],
            ["same number of lines", "train.en has 1", "train.de:2"],
        ),
        (write("val.en", b""), [], ["val.en has 0"]),
        (
            lambda folder: (folder / "val.de").unlink(),
            [],
            ["neither val.de nor val.de.gz", "The folder contains"],
        ),
        (None, ["--config.data.directory={}/train.en"], ["no directory"]),
        (
            None,
            ["--config.data.directory={}/absent"],
            ["no directory", "set data.directory"],
        ),
        (
            None,
            ["--config.data.source_language=es"],
            ["neither train.es nor train.es.gz"],
        ),
        (None, ["--config.data.train_split=train[:0%]"], ["must not be empty"]),
        (None, ["--config.data.train_split=train[5:2]"], ["must not be empty"]),
        (
            None,
            ["--config.data.validation_split=val[9:99]"],
            ["must lie within the file"],
        ),
        (None, ["--config.data.train_split="], ["'' is not a split"]),
        (
            None,
            ["--config.checkpoint.best_metric=blue"],
            ["best_metric = 'blue'", "did you mean bleu?"],
        ),
    ],
)
def test_abuses(recipe, tmp_path, change, arguments, words):
    folder, workdir = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    for path in (recipe.parent / "corpus").glob("*.??"):
        (folder / path.name).write_bytes(path.read_bytes())
    if change:
        change(folder)
    given = [
        f"--config.data.directory={folder}",
        *(argument.format(folder) for argument in arguments),
    ]
    with unharmed(folder):
        refused(
            script("train", f"--config={recipe}", f"--workdir={workdir}", *given),
            *words,
        )
    assert not (workdir / "checkpoints").exists()


def test_other_languages_are_named_by_keys(tmp_path):
    result = script(
        "train", "--config=configs/multi30k.py:en-es", f"--workdir={tmp_path}/run"
    )
    refused(result, "'en-es' is unknown", "--config=configs/own_files.py:en-es")
