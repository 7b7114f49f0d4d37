"""Joined lines: every line is used, and joined pairs still belong together."""

import collections

import pytest

from transformer_jax.data.concatenation import concatenate, concatenations
from transformer_jax.data.sources import DataError


@pytest.fixture
def text(tmp_path):
    (tmp_path / "in").mkdir()
    for language in ("de", "en"):
        lines = [f"{language}{i} ä" for i in range(11)]
        (tmp_path / "in" / f"train.{language}").write_text("\n".join(lines) + "\n")
    return tmp_path / "in"


def test_every_size_takes_all_lines_once():
    groups = list(concatenations(11, 4, seed=0))
    assert collections.Counter(len(group) for group in groups) == {
        1: 11,
        2: 5,
        3: 3,
        4: 2,
    }
    for size in range(1, 5):
        taken = [i for group in groups if len(group) == size for i in group]
        assert len(set(taken)) == len(taken) == 11 // size * size
    assert groups == list(concatenations(11, 4, seed=0))
    assert groups != list(concatenations(11, 4, seed=1))


def test_languages_stay_together(text, tmp_path):
    counts = concatenate(text, tmp_path / "out", ["train"], ["de", "en"], 3)
    de, en = (
        (tmp_path / "out" / f"train.{language}").read_text().splitlines()
        for language in ("de", "en")
    )
    assert len(de) == len(en) == counts["train"] == 11 + 5 + 3
    assert [line.replace("de", "en") for line in de] == en
    assert de[-1].count("ä") == 3
    assert sorted(de[:11]) == sorted((text / "train.de").read_text().splitlines())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "train.de",
        "train.en",
    ]


def test_what_the_output_is_a_link_to_stays(text, tmp_path):
    before = (text / "train.de").read_text()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.de").symlink_to(text / "train.de")
    concatenate(text, tmp_path / "out", ["train"], ["de", "en"], 2)
    assert (text / "train.de").read_text() == before
    assert len((tmp_path / "out" / "train.de").read_text().splitlines()) == 11 + 5


def test_what_cannot_be_joined(text, tmp_path, monkeypatch):
    for longest in (0, 12):
        with pytest.raises(
            DataError,
            match=rf"train in .* has 11 lines: cannot join groups of {longest}",
        ):
            concatenate(text, tmp_path / "out", ["train"], ["de", "en"], longest)
    for splits, languages in (([], ["de"]), (["train"], [])):
        with pytest.raises(DataError, match="name one or more of each"):
            concatenate(text, tmp_path / "out", splits, languages, 2)
    with pytest.raises(DataError, match="val"):
        concatenate(text, tmp_path / "out", ["train", "val"], ["de", "en"], 2)
    assert not (tmp_path / "out").exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(text)
    for same in (text, "in", "./in/../in", "link"):
        with pytest.raises(DataError, match="is the folder of the input text"):
            concatenate(text, same, ["train"], ["de", "en"], 2)


def test_a_joined_line_is_one_line_for_every_reader(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.de").write_bytes("a\rb\u2028c\nd\x85e\n".encode())
    concatenate(tmp_path / "in", tmp_path / "out", ["train"], ["de"], 2)
    lines = (tmp_path / "out" / "train.de").read_text(encoding="utf-8").splitlines()
    assert sorted(lines[:2]) == ["a b c", "d e"]
    assert len(lines) == 3
