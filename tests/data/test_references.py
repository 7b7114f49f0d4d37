"""Several references for a source: in files, in batches, in the scores."""

import re
from pathlib import Path

import numpy as np
import pytest

from helpers import modalities
from transformer_jax.config import make_task, parse
from transformer_jax.data.files import DataError
from transformer_jax.data.references import (
    References,
    numbered_files,
    references_table,
)
from transformer_jax.data.sources import held

TABLE = """image\tsplit\tcaption
a.png\ttrain\tone
a.png\ttrain\ta "two
b.png\ttest\tthree
b.png\ttest\tfour
c.png\ttrain\tfive
c.png\ttrain\tsix
"""


def read(directory, split="train", count=2, text=TABLE):
    (directory / "captions.tsv").write_text(text)
    return references_table(
        directory,
        split,
        ("image", "caption"),
        table="captions.tsv",
        count=count,
        read=lambda directory, split, table, column: table.column(column),
    )


def test_a_table_has_an_entry_for_each_source_of_a_split(tmp_path):
    source = read(tmp_path)
    assert list(source.column("image")) == ["a.png", "c.png"]
    captions = source.column("caption")
    assert list(captions) == [["one", 'a "two'], ["five", "six"]]
    assert captions[:1] == [["one", 'a "two']]
    assert captions.size == 2
    assert list(read(tmp_path, "test").column("image")) == ["b.png"]


def test_a_part_of_a_split_is_a_part_of_its_sources(tmp_path):
    source = read(tmp_path, "train[1:]")
    assert list(source.column("image")) == ["c.png"]
    assert list(source.column("caption")) == [["five", "six"]]


def test_the_column_of_sources_knows_the_line_of_each(tmp_path):
    places = []

    def named(directory, split, table, column):
        places.extend(table.place(i) for i in range(len(table)))
        return table.column(column)

    (tmp_path / "captions.tsv").write_text(TABLE)
    columns = ("image", "caption")
    references_table(
        tmp_path, "train", columns, table="captions.tsv", count=2, read=named
    )
    assert places == [f"{tmp_path}/captions.tsv:{line}" for line in (2, 6)]


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        (TABLE, 3, "captions.tsv:2: a.png has 2 lines from here on, but data.ref"),
        (TABLE.replace("c.png\ttrain\tsix\n", ""), 2, "captions.tsv:6: c.png has 1 "),
        (TABLE.replace("c.png", "a.png"), 2, "captions.tsv:6: a.png has other lines"),
        (TABLE.replace("train", "dev"), 2, "no line of the split 'train', but of dev,"),
        (TABLE + "d.png\ttrain\n", 2, "captions.tsv:8 has 2 fields, but the first"),
        (TABLE.replace("caption", "text"), 2, "must name these columns .*: caption"),
    ],
)
def test_a_table_with_other_lines_is_refused(tmp_path, text, count, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, count=count, text=text)


def test_files_with_numbers_are_references(tmp_path):
    for name, text in {"src": "a\nb\n", "ref0": "c\nd\n", "ref1": "e\nf\n"}.items():
        (tmp_path / f"dev.{name}").write_text(text)
    source = numbered_files(tmp_path, "dev", ("src", "ref"), 2)
    assert list(source.column("src")) == ["a", "b"]
    assert list(source.column("ref")) == [["c", "e"], ["d", "f"]]
    (tmp_path / "dev.ref1").write_text("e\n")
    with pytest.raises(DataError, match=re.escape("ref1 has 1")):
        numbered_files(tmp_path, "dev", ("src", "ref"), 2)


def test_the_hash_depends_on_every_reference():
    def content(texts):
        return b"".join(References([held(["a"]), held([texts])]).blocks())

    assert content("b") == content("b") != content("c")


@pytest.fixture
def task(tmp_path: Path):
    config = modalities.small_recipe("captions", "", tmp_path / "corpus")
    return make_task(parse(config), tmp_path / "run")


def words(task, ids, length):
    return task.streams["target"].shown(ids[:length])[1]


def test_an_epoch_of_training_has_each_reference_once_with_its_source(task):
    batches = task.batches("train", seed=3)
    table = task.corpus.open("train")
    expected = {
        (number, text.lower())
        for number, texts in enumerate(table.column("caption"))
        for text in texts
    }
    images = task.corpus.encode("source", table.column("image"))
    found = []
    for number in range(len(batches.plan)):
        arrays = batches.load(batches.plan.batch(number))
        for row in np.flatnonzero(arrays["index"] >= 0):
            image = arrays["index"][row] // 5
            np.testing.assert_array_equal(arrays["source"][row], images[image])
            length = arrays["target_length"][row]
            found.append((image, words(task, arrays["target"][row], length)))
    assert len(found) == len(set(found)) == 150
    assert set(found) == expected


def test_evaluation_has_all_references_of_a_source_in_a_row(task):
    batches = task.batches("val", seed=None)
    arrays = batches.load(batches.plan.batch(0))
    rows = len(arrays["index"])
    assert arrays["target"].shape[:2] == arrays["target_length"].shape == (rows, 5)
    captions = task.corpus.open("val").column("caption")
    for row, texts in enumerate(captions):
        for number, text in enumerate(texts):
            length = arrays["target_length"][row, number]
            assert words(task, arrays["target"][row, number], length) == text.lower()
    assert (arrays["target_length"][len(captions) :] == 0).all()
    assert list(batches.references) == list(captions)
