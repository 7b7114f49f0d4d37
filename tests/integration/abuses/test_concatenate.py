"""Invalid uses of concatenate.py.

Each ends with one error message; the input and older results stay unchanged.
"""

import resource
from pathlib import Path

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script
from transformer_jax.data.concatenation import concatenate
from transformer_jax.files import OutputError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Folder with eleven lines in de and en, an older result, and a link to the
    text.
    """
    for folder, line in (("in", "new"), ("out", "old")):
        (tmp_path / folder).mkdir()
        for split in ("train", "val"):
            for language in ("de", "en"):
                (tmp_path / folder / f"{split}.{language}").write_text(
                    f"{language} {line} ä\n" * 11
                )
    (tmp_path / "link").symlink_to("in")
    return tmp_path


def nothing(folder: Path) -> None:
    pass


def written(name: str, content: bytes):
    def write(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return write


def made(name: str):
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def linked(name: str, target: str):
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return link


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (nothing, ["--longest=0"], ["--longest=0", "not a positive integer"]),
        (nothing, ["--longest=12"], ["has 11 lines: cannot join groups of 12"]),
        (nothing, ["--longest=two"], ["--longest=two"]),
        (nothing, ["--seed=1.5"], ["--seed=1.5"]),
        (
            nothing,
            ["--output={}/in"],
            ["is the folder of the input text: choose another folder"],
        ),
        (
            nothing,
            ["--output={}/link"],
            ["is the folder of the input text: choose another folder"],
        ),
        (
            nothing,
            ["--output={}/out/../in/."],
            ["is the folder of the input text: choose another folder"],
        ),
        (nothing, ["--output={}/in/train.de"], ["Cannot write to", "in/train.de"]),
        (nothing, ["--output={}/in/train.de/deeper"], ["Cannot write to", "deeper"]),
        (
            nothing,
            ["--output="],
            ["output ''", "set both; use . for the current folder"],
        ),
        (nothing, ["--directory="], ["directory ''", "set both"]),
        (nothing, ["--splits="], ["name one or more"]),
        (nothing, ["--languages="], ["name one or more"]),
        (
            nothing,
            ["--splits=train,test"],
            ["neither test.de nor test.de.gz", "contains train (de, en); val (de, en)"],
        ),
        (nothing, ["--languages=de,fr"], ["neither train.fr nor train.fr.gz"]),
        (nothing, ["--splits=train[:0]"], ["train[:0]", "must not be empty"]),
        (nothing, ["--splits=train["], ["'train[' is not a split"]),
        (nothing, ["--directory={}/absent"], ["no directory", "absent"]),
        (nothing, ["--directory={}/in/val.de"], ["no directory", "in/val.de"]),
        (nothing, ["more.txt"], ["'more.txt' is not an option"]),
        (written("in/val.en", b"one\n"), [], ["same number of lines", "val.en has 1"]),
        (written("in/val.en", b"a\n" * 10 + b"\xff\n"), [], ["val.en:11 is not UTF-8"]),
        (written("in/val.en", b""), [], ["val.en has 0"]),
        (
            written("in/val.en.gz", b"\x1f\x8b"),
            [],
            ["val.en.gz both exist, but their text differs"],
        ),
        (made("in/val.en"), [], ["val.en is a folder"]),
        (linked("in/val.en", "val.en"), [], ["val.en is a broken link to val.en ("]),
        (
            made("out/val.en"),
            [],
            ["Cannot write ", "out/val.en: a folder is in the way"],
        ),
    ],
)
def test_abuses(text, change, arguments, words):
    change(text)
    given = {
        "--directory": f"{text}/in",
        "--output": f"{text}/out",
        "--splits": "train,val",
        "--longest": "2",
    }
    named = [argument.format(text) for argument in arguments]
    given = {
        name: value
        for name, value in given.items()
        if not any(a.startswith(f"{name}=") for a in named)
    }
    with unharmed(text / "in"), unharmed(text / "out"):
        result = script(
            "concatenate", *(f"{name}={value}" for name, value in given.items()), *named
        )
    refused(result, *words)


def test_a_disk_that_fills(text):
    """The disk fills after two of four files. None of them replaces an older one."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for language in ("de", "en"):
        (text / "in" / f"val.{language}").write_text("more than the disk holds\n" * 11)
    with unharmed(text):
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, most[1]))
        try:
            with pytest.raises(
                OutputError, match=r"cannot be written: File too large.*Free some space"
            ):
                concatenate(
                    text / "in", text / "out", ["train", "val"], ["de", "en"], 2
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
