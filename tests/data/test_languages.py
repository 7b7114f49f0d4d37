"""Several directions of translation: texts behind the token of a language."""

import re
from pathlib import Path

import numpy as np
import pytest

from transformer_jax.config import make_task, parse
from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.languages import (
    directions_files,
    divided,
    encode_marked,
    languages_of,
    marks_of,
)
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import TokenizerError

TEXTS = {
    "en": ["a dog", "", "a  cat "],
    "de": ["ein hund", "nichts", "eine katze"],
    "fr": ["un chien", "rien", "un chat"],
}


@pytest.fixture
def folder(tmp_path) -> Path:
    for language, lines in TEXTS.items():
        (tmp_path / f"train.{language}").write_text("\n".join(lines) + "\n")
    return tmp_path


def read(folder, split="train", directions=("en-de", "en-fr")):
    return directions_files(folder, split, ("source", "target"), directions)


def test_directions_follow_one_another_and_a_token_names_the_target(folder):
    source = read(folder)
    assert list(source.column("source")) == [
        "<2de> a dog",
        "",
        "<2de> a  cat ",
        "<2fr> a dog",
        "",
        "<2fr> a  cat ",
    ]
    assert list(source.column("target")) == TEXTS["de"] + TEXTS["fr"]
    assert len(source) == 6


def test_a_column_has_parts_and_slices(folder):
    column = read(folder).column("source")
    everything = list(column)
    assert isinstance(column, Column)
    for start, stop in ((0, 6), (1, 5), (2, 4), (3, 6), (0, 3)):
        assert list(column.part(start, stop)) == everything[start:stop]
        assert column[start:stop] == everything[start:stop]
    assert [column[i] for i in range(-6, 6)] == everything * 2
    assert column[np.int64(4)] == everything[4]
    for i in (6, -7):
        with pytest.raises(IndexError):
            column[i]


def test_the_hash_of_a_column_tells_the_directions_apart(folder):
    content = {
        directions: b"".join(read(folder, directions=directions).column(name).blocks())
        for directions in (("en-de", "en-fr"), ("en-fr", "en-de"), ("en-de",))
        for name in ("source",)
    }
    assert len(set(content.values())) == len(content)


def test_a_split_may_name_a_direction_that_is_not_trained(folder):
    source = read(folder, "train[1:]:de-fr")
    assert list(source.column("source")) == ["<2fr> nichts", "<2fr> eine katze"]
    assert list(source.column("target")) == ["rien", "un chat"]


def test_a_part_of_a_split_is_a_part_of_each_direction(folder):
    assert list(read(folder, "train[:1]").column("target")) == ["ein hund", "un chien"]


def test_files_of_other_lengths_are_refused(folder):
    (folder / "train.fr").write_text("un chien\nrien\n")
    with pytest.raises(DataError, match=r"train\.en has 3, .*train\.fr has 2"):
        read(folder)


@pytest.mark.parametrize("direction", ["en", "en-en", "en_de", "en-de-fr", "", "en-"])
def test_what_is_no_direction_is_refused(direction):
    with pytest.raises(DataError, match=re.escape(f"{direction!r} is no direction")):
        languages_of(direction)


def test_each_target_has_one_token():
    assert marks_of(("en-de", "fr-de", "de-en")) == ("<2de>", "<2en>")


def test_a_text_is_divided_at_its_token():
    marks = ("<2de>",)
    assert divided("<2de> a dog", marks) == ("<2de>", "a dog")
    assert divided("  <2de>  a", marks) == ("<2de>", " a")
    assert divided("<2de>", marks) == ("<2de>", "")
    assert divided("<2fr> a", marks) == ("", "<2fr> a")
    assert divided("a <2de>", marks) == ("", "a <2de>")


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_one_id_and_no_text_is_encoded_as_it(kind):
    lines = ["a dog barks <2", "2de>", "fr"] * 20
    marks = ("<2de>", "<2fr>")
    plain = train_tokenizer(kind, lines, 300)
    tokenizer = train_tokenizer(kind, lines, 302, marks=marks)
    assert tokenizer.size == plain.size + 2
    ids = [tokenizer.id_of(mark) for mark in marks]
    assert ids == [plain.size, plain.size + 1]
    for text in (lines, ["a <2de>", "<2fr>a"]):
        assert tokenizer.encode_batch(text) == plain.encode_batch(text)

    texts = ["<2fr> a dog <2de>", "", "<2de>"]
    rows = encode_marked(tokenizer, texts, marks, marks, end=tokenizer.eos_id)
    (text,) = plain.encode_batch(["a dog <2de>"])
    end = tokenizer.eos_id
    expected = [[ids[1], *text, end], [end], [ids[0], end]]
    assert rows.values.tolist() == [i for row in expected for i in row]
    assert rows.lengths.tolist() == [len(row) for row in expected]


def test_a_text_that_has_the_token_as_a_word_is_refused():
    with pytest.raises(TokenizerError, match="the text itself has the piece <2de>,"):
        train_tokenizer("words", ["a <2de> b"], 20, marks=("<2de>", "<2fr>"))


def test_many_lines_are_encoded_by_word_as_without_the_tokens():
    """Words that repeat are looked up."""
    lines = ["a dog barks", "a cat"] * 50
    tokenizer = train_tokenizer("bpe_metaspace", lines, 40, marks=("<2de>",))
    marked = [f"<2de> {line}" for line in lines]
    rows = encode_marked(tokenizer, marked, ("<2de>",), ("<2de>",))
    mark = tokenizer.id_of("<2de>")
    expected = [[mark, *ids] for ids in tokenizer.encode_batch(lines)]
    assert rows.values.tolist() == [i for row in expected for i in row]


def test_a_line_without_a_token_is_refused_with_its_number():
    tokenizer = train_tokenizer("words", ["a b"], 9, marks=("<2de>", "<2fr>"))
    with pytest.raises(DataError) as error:
        encode_marked(tokenizer, ["<2de> a", "<2cs> b"], ("<2de>", "<2fr>"), ())
    assert str(error.value) == (
        "line 2 is '<2cs> b': it must begin with the language of the translation, "
        "which is one of <2de>, <2fr>, and a space"
    )


def test_a_tokenizer_without_a_token_is_refused():
    tokenizer = train_tokenizer("words", ["a b"], 9, marks=("<2de>",))
    marks = ("<2de>", "<2fr>", "<2cs>")
    with pytest.raises(DataError, match="the tokenizer has no token <2fr>, <2cs>: use"):
        encode_marked(tokenizer, ["<2de> a"], marks, marks)


@pytest.fixture
def several(tiny):
    tiny.data.directions = ("en-de", "de-en", "en-fr")
    return tiny


def test_batches_begin_with_the_token_and_the_tokenizer_learns_from_the_text(
    several, tmp_path, corpus
):
    task = make_task(parse(several), tmp_path / "run")
    tokenizer = task.corpus.tokenizers["source"]
    marks = {tokenizer.id_of(mark): mark for mark in ("<2de>", "<2en>", "<2fr>")}
    assert set(marks) == {tokenizer.size - 3, tokenizer.size - 2, tokenizer.size - 1}
    batches = task.batches("train", seed=0)
    seen = set()
    rows = 0
    for number in range(len(batches.plan)):
        batch = batches.load(batches.plan.batch(number))
        rows += (batch["index"] >= 0).sum()
        first = batch["source"][batch["index"] >= 0, 0]
        seen |= {marks[i] for i in first.tolist()}
        others = batch["source"][:, 1:], batch["target"]
        assert not any(np.isin(ids, list(marks)).any() for ids in others)
    assert seen == set(marks.values())
    assert rows == 3 * len((corpus / "train.en").read_text().splitlines())
    assert task.corpus.encode("target", ["<2de>"]).values[0] not in marks


def test_a_record_is_a_line_behind_its_token(several, tmp_path):
    task = make_task(parse(several), tmp_path / "run")
    record = "<2fr> " + task.corpus.open("train").column("de")[0].split(" ", 1)[1]
    batches = task.batches_of([record])
    batch = batches.load(batches.plan.batch(0))
    mark = task.corpus.tokenizers["source"].id_of("<2fr>")
    assert batch["source"][0, 0] == mark
    with pytest.raises(DataError, match="line 1 is 'eka': it must begin with"):
        task.batches_of(["eka"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"directions": ("en-de", "en_fr")}, "'en_fr' is no direction of translation"),
        ({"directions": ("en-de", "en-de")}, "must name each direction once"),
        ({"table": "a.tsv"}, "data.table = 'a.tsv': must be '' with data.directions"),
        ({"references": 2}, "data.references = 2: must be 1 with data.directions"),
    ],
)
def test_config_that_does_not_fit_is_refused(several, changes, message):
    several.data.update(changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(several)


def test_a_source_that_is_no_text_has_no_directions(several):
    several.input.modality = "grid"
    with pytest.raises(ValueError, match=r"data\.directions.*must be \(\) with input"):
        parse(several)
