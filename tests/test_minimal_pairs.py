"""Minimal pairs: accuracies counted by hand, and tables that are refused."""

import gzip

import numpy as np
import pytest

from helpers.corpus import real_data
from transformer_jax import minimal_pairs
from transformer_jax.data.files import DataError
from transformer_jax.errors import UserError
from transformer_jax.minimal_pairs import (
    COLUMNS,
    accuracies,
    log_likelihoods,
    read_pairs,
)

ROWS = [
    ("syntax", "islands", "a", "x x", "x"),
    ("syntax", "islands", "a", "y y", "y"),
    ("syntax", "islands", "b", "z z", "z"),
    ("syntax", "binding", "c", "u u", "u"),
    ("semantics", "npi", "d", "v v", "v"),
    ("semantics", "npi", "d", "w w", "w"),
]


def written(path, rows, header=COLUMNS):
    text = "".join("\t".join(row) + "\n" for row in [header, *rows])
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.tsv.gz"])
def test_the_mean_is_over_paradigms_and_ties_are_wrong(tmp_path, name):
    pairs = read_pairs(written(tmp_path / name, ROWS))
    assert pairs.good == [row[3] for row in ROWS]
    good = np.array([2.0, 2.0, 2.0, 1.0, 2.0, 2.0])
    bad = np.array([1.0, 1.0, 1.0, 1.0, 2.0 - 1e-12, 1.0])
    scores = accuracies(pairs, good, bad)
    assert scores == {
        "accuracy": (1 + 1 + 0 + 0.5) / 4,
        "pairs": 6,
        "ties": 2,
        "fields": {"syntax": 2 / 3, "semantics": 0.5},
        "phenomena": {"islands": 1.0, "binding": 0.0, "npi": 0.5},
        "paradigms": {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.5},
    }
    lines = minimal_pairs.readable(scores).splitlines()
    assert lines[0].split() == ["islands", "100.0"]
    assert lines[-2].split() == ["mean", "of", "4", "paradigms", "62.5"]
    assert lines[-1].startswith("2 of 6 pairs are ties")


def test_sentences_are_scored_once_in_chunks(monkeypatch):
    monkeypatch.setattr(minimal_pairs, "CHUNK", 2)
    asked = []

    def score(sentences):
        asked.append(list(sentences))
        return [{"log_likelihood": -float(len(each))} for each in sentences]

    values = log_likelihoods(["a", "bb", "a", "ccc"], score)
    assert values.tolist() == [-1, -2, -1, -3]
    assert asked == [["a", "bb"], ["ccc"]]


def test_a_missing_column_is_named(tmp_path):
    path = written(tmp_path / "a.tsv", [row[:4] for row in ROWS], COLUMNS[:4])
    with pytest.raises(DataError, match=r"a\.tsv:1 must name .*: sentence_bad\. "):
        read_pairs(path)


@pytest.mark.parametrize("column", range(5))
def test_an_empty_field_is_named_with_its_line(tmp_path, column):
    row = list(ROWS[2])
    row[column] = " "
    path = written(tmp_path / "a.tsv", [*ROWS[:2], row])
    with pytest.raises(DataError, match=rf"a\.tsv:4 has an empty {COLUMNS[column]}: "):
        read_pairs(path)


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(UserError, match=r"there is no such file"):
        read_pairs(str(tmp_path / "none.tsv"))
    with pytest.raises(UserError, match=r"must be a table .*blimp\.tsv\.gz"):
        read_pairs(written(tmp_path / "a.txt", ROWS))


def test_blimp_is_read():
    pairs = read_pairs(str(real_data("blimp") / "blimp.tsv.gz"))
    assert len(pairs.good) == 67_000
    assert len({paradigm for _, _, paradigm in pairs.groups}) == 67
