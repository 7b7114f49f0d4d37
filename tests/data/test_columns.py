"""Columns of arrays as records."""

import numpy as np

from transformer_jax.data.arrays import Arrays
from transformer_jax.data.columns import (
    ArrayRecords,
    Sourced,
    WithSources,
    texts_of,
)

IMAGES = np.arange(12).reshape(3, 2, 2)


def test_the_records_of_a_column_are_its_entries_under_its_name():
    records = ArrayRecords("image", IMAGES)
    assert len(records) == 3
    np.testing.assert_array_equal(records[-1]["image"], IMAGES[2])
    first, last = records[::2]
    assert first.keys() == last.keys() == {"image"}
    np.testing.assert_array_equal(last["image"], IMAGES[2])


def test_records_are_hashed_as_their_column():
    column = Arrays(IMAGES)
    assert list(ArrayRecords("image", column).blocks()) == list(column.blocks())


def test_the_texts_of_an_entry_are_a_list_with_and_without_a_source():
    assert texts_of("a b") == ["a b"]
    assert texts_of(["a", "b"]) == ["a", "b"]
    assert texts_of(Sourced("a b", "c")) == ["a b"]
    assert texts_of(Sourced(["a", "b"], "c")) == ["a", "b"]


def test_references_with_sources_are_a_sequence_of_both():
    entries = WithSources(["a", ["b", "c"], "d"], ["x", "y", "z"])
    assert len(entries) == 3
    assert entries[1] == Sourced(["b", "c"], "y")
    assert list(entries) == [*entries[:1], entries[1], entries[-1]]
    assert entries[-1].source == "z"
