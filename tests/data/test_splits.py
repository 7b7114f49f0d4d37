"""Config keys of every data set."""

import dataclasses

import pytest

from transformer_jax.data.splits import SplitData

GOOD = SplitData(
    directory="somewhere", max_length=32, batch_tokens=128, rows_multiple=4
)


def test_batches_that_just_hold_their_rows_are_no_problem():
    assert not list(GOOD.problems())


def test_batches_must_hold_rows_multiple_examples_of_the_greatest_length():
    longer = dataclasses.replace(GOOD, max_length=33)
    ((field, message),) = longer.problems()
    assert field == "batch_tokens"
    assert "rows_multiple = 4 rows of max_length = 33: set it to 132" in message


@pytest.mark.parametrize("field", ["max_length", "max_buckets", "rows_multiple"])
def test_sizes_are_at_least_1(field):
    wrong = dataclasses.replace(GOOD, **{field: 0})
    assert list(wrong.problems()) == [(field, "must be at least 1")]
