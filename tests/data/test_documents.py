"""Documents of sentences from SQuAD files and lines of text."""

import gzip
import json

import pytest

from transformer_jax.data.documents import Counts, sentences, write_documents
from transformer_jax.data.sources import DataError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("It cost 3.5 euros. 7 people paid.", ["It cost 3.5 euros.", "7 people paid."]),
        (
            "He said “Go.” She went (alone.) “Why?”",
            ["He said “Go.”", "She went (alone.)", "“Why?”"],
        ),
        ('It ended. "and then?" he asked.', ["It ended.", '"and then?" he asked.']),
        ("Wait... what? no. Ärger!", ["Wait... what? no.", "Ärger!"]),
        ("Yes. (No.) [Perhaps.]", ["Yes.", "(No.)", "[Perhaps.]"]),
        (
            "(Mr. Smith met J. R. Jones. In St. Louis.",
            ["(Mr. Smith met J. R. Jones.", "In St. Louis."],
        ),
        (
            "A U.S. Senator, e.g. Dr. No. Nos. 1",
            ["A U.S. Senator, e.g. Dr. No. Nos. 1"],
        ),
        (
            "A  line\nwith\tspaces . And\u2028another",
            ["A line with spaces .", "And another"],
        ),
        ("", []),
        (" \n", []),
    ],
)
def test_sentences(text, expected):
    assert list(sentences(text)) == expected


@pytest.fixture
def inputs(tmp_path):
    """Three captions, one of them blank and one repeated, and an article of two
    paragraphs.
    """
    paragraphs = [
        {"context": context, "qas": []} for context in ("One. Two.", "A\nbee. D?")
    ]
    squad = {"version": "1.1", "data": [{"title": "T", "paragraphs": paragraphs}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    (tmp_path / "captions.en.gz").write_bytes(
        gzip.compress("A dog.\n \nZwei Äpfel. Drei\nA dog.\n".encode())
    )
    return [str(tmp_path / "squad.json"), str(tmp_path / "captions.en")]


def test_documents_are_written_once_in_order(inputs, tmp_path):
    output = str(tmp_path / "train.txt")
    assert write_documents(inputs, output) == {output: Counts(4, 7, 10)}
    expected = "One.\nTwo.\n\nA bee.\nD?\n\nA dog.\n\nZwei Äpfel.\nDrei\n"
    assert (tmp_path / "train.txt").read_text() == expected
    assert write_documents(inputs * 2, output) == {output: Counts(4, 7, 10)}
    assert (tmp_path / "train.txt").read_text() == expected


def test_every_nth_document_is_held_out(inputs, tmp_path):
    train, held_out = str(tmp_path / "train.txt"), str(tmp_path / "val.txt")
    counts = write_documents(inputs, train, 3, held_out)
    assert counts == {train: Counts(3, 6, 8), held_out: Counts(1, 1, 2)}
    assert (
        tmp_path / "train.txt"
    ).read_text() == "One.\nTwo.\n\nA bee.\nD?\n\nZwei Äpfel.\nDrei\n"
    assert (tmp_path / "val.txt").read_text() == "A dog.\n"


def test_too_few_documents(inputs, tmp_path):
    train, held_out = str(tmp_path / "train.txt"), str(tmp_path / "val.txt")
    (tmp_path / "train.txt").write_text("old")
    with pytest.raises(
        DataError,
        match=r"4 documents are too few for .*train\.txt and .*val\.txt.*hold out more",
    ):
        write_documents(inputs, train, 5, held_out)
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(DataError, match="blank: 0 documents are too few"):
        write_documents([str(tmp_path / "blank")], train)
    assert (tmp_path / "train.txt").read_text() == "old"
    assert not (tmp_path / "val.txt").exists()
