"""Records to predict from, and labels as numbers."""

import numpy as np
import pytest

from transformer_jax.data.examples import Labels, columns_of
from transformer_jax.data.sources import DataError

COLUMNS = ("en", "de")


def test_a_line_is_the_first_column():
    assert columns_of(["a", {"en": "b"}, ""], COLUMNS) == [["a", "b", ""], None]
    assert columns_of(["a"], ("text",)) == [["a"]]


def test_a_column_is_there_if_every_record_has_it():
    both = [{"en": "a", "de": "x"}, {"de": "", "en": "b"}]
    assert columns_of(both, COLUMNS) == [["a", "b"], ["x", ""]]
    assert columns_of([*both, "c"], COLUMNS) == [["a", "b", "c"], None]


@pytest.mark.parametrize(
    ("record", "columns", "message"),
    [
        ({"de": "x"}, COLUMNS, "record 2 has the fields de: it must have en, and may have de"),
        ({}, COLUMNS, r"record 2 has the fields \(none\): it must have en"),
        ({"en": "a", "fr": "x"}, COLUMNS, "record 2 has the fields en, fr: it must have en, and may have de"),
        ({"en": "a", "fr": "x"}, ("en",), "may have no other"),
        ({"en": "a", "de": 3}, COLUMNS, "record 2 has de = 3: it must be text"),
        ({"en": None}, COLUMNS, "record 2 has en = None: it must be text"),
    ],
)
def test_what_is_not_a_record_is_named(record, columns, message):
    with pytest.raises(DataError, match=message):
        columns_of(["a", record], columns)


def test_labels_are_numbered_in_the_order_of_the_config():
    labels = Labels(("odd", "even"))
    found = labels.encode(["even", "odd", "even"], "here")
    np.testing.assert_array_equal(found, [1, 0, 1])
    assert found.dtype == np.int32
    assert [labels.names[i] for i in found] == ["even", "odd", "even"]


def test_an_unknown_label_is_named():
    message = r"val, row 3: the label 'none' is not one of odd, even: correct the file, or change data\.labels"
    with pytest.raises(DataError, match=message):
        Labels(("odd", "even")).encode(["even", "odd", "none"], "val")
