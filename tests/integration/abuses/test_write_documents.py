"""Invalid uses of documents.py.

Each ends with one error message; the input and older results stay unchanged.
"""

import gzip
import json
from pathlib import Path

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Folder with captions, a SQuAD file, a link to it, an older result, and files
    that are damaged.
    """
    article = {"title": "T", "paragraphs": [{"context": "One. Two.", "qas": []}]}
    (tmp_path / "a.en").write_text("A dog.\nA cat.\n")
    (tmp_path / "b.json").write_text(json.dumps({"data": [article]}))
    (tmp_path / "link").symlink_to("b.json")
    (tmp_path / "c.en.gz").write_bytes(gzip.compress(b"A fox."))
    (tmp_path / "train.txt").write_text("old\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "blank.en").write_text("\n \n")
    (tmp_path / "latin.en").write_bytes(b"one\ncaf\xe9\n")
    (tmp_path / "cut.json").write_text('{"data":\n  [')
    (tmp_path / "list.json").write_text("[3]")
    (tmp_path / "untitled.json").write_text(
        json.dumps({"data": [{"paragraphs": article["paragraphs"]}]})
    )
    for name, paragraph in (
        ("context", {"qas": []}),
        ("empty", {"context": " ", "qas": []}),
    ):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"data": [article, {**article, "paragraphs": [paragraph]}]})
        )
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["--inputs is missing", "--help shows an example"]),
        ("--inputs=a.en,", ["name at least one file each"]),
        ("--inputs=a.en --output=", ["name at least one file each"]),
        ("--inputs=absent.en", ["there is no file absent.en: correct the inputs"]),
        ("--inputs=absent/a.en", ["there is no file absent/a.en: correct the inputs"]),
        ("--inputs=folder", ["folder is a folder: must be a text file"]),
        ("--inputs=a.en,blank.en,latin.en", ["latin.en:2 is not UTF-8"]),
        ("--inputs=blank.en", ["blank.en: 0 documents are too few for train.txt"]),
        ("--inputs=cut.json", ["cut.json:2, column 4 is not JSON"]),
        ("--inputs=list.json", ["list.json must have 'data', a list, but it is [3]"]),
        (
            "--inputs=untitled.json",
            ["untitled.json, article 1 must have 'title', a string"],
        ),
        (
            "--inputs=context.json",
            ["context.json, article 2, paragraph 1 must have 'context', a string"],
        ),
        (
            "--inputs=empty.json",
            ["empty.json, article 2, paragraph 1 has a blank context"],
        ),
        ("--inputs=a.en --output=a.en", ["a.en is named twice", "choose another file"]),
        ("--inputs=b.json --output=link", ["link is named twice"]),
        ("--inputs=c.en --output=c.en.gz", ["c.en.gz is named twice"]),
        (
            "--inputs=b.json --output=folder",
            ["--output=folder is a folder: name a file in it"],
        ),
        (
            "--inputs=b.json --output=absent/train.txt",
            ["--output=absent/train.txt: there is no folder"],
        ),
        (
            "--inputs=a.en --held_out=2 --held_out_output=./train.txt",
            ["train.txt is named twice"],
        ),
        ("--inputs=a.en --held_out=2", ["set both, the first to 2 or more, or none"]),
        (
            "--inputs=a.en --held_out=1 --held_out_output=val.txt",
            ["set both, the first to 2 or more, or none"],
        ),
        ("--inputs=a.en --held_out_output=val.txt", ["set both"]),
        ("--inputs=a.en --held_out=-1", ["--held_out=-1"]),
        (
            "--inputs=a.en --held_out=3 --held_out_output=val.txt",
            ["2 documents are too few"],
        ),
        ("--inputs=a.en b.json", ["'b.json' is not an option"]),
    ],
)
def test_abuses(text, arguments, words):
    given = arguments.split()
    output = (
        []
        if "--output" in arguments.replace("held_out_output", "")
        else ["--output=train.txt"]
    )
    with unharmed(text):
        result = script("documents", *given, *output, cwd=text)
    refused(result, *words)


def test_sizes_go_to_stderr(text):
    result = script("documents", "--inputs=a.en,b.json", "--output=train.txt", cwd=text)
    assert (result.returncode, result.stdout) == (0, b"")
    assert b"train.txt: 3 documents, 4 sentences, 6 words" in result.stderr
    assert (text / "train.txt").read_text() == "A dog.\n\nA cat.\n\nOne.\nTwo.\n"
