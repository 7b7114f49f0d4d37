"""The size of the interface of a task, and what it refuses."""

import numpy as np
import pytest

from transformer_jax.training.task import Growing, Task, check_rows, streams

MEMBERS = {
    *("init", "loss", "evaluate"),
    *("batches", "batches_of", "decode", "score", "metrics"),
    *("dummy_batch", "preview", "fingerprint", "work", "checks", "attention"),
}
GROWING = {"piece", "growing", "grow", "unfinished", "scorer"}


@pytest.mark.parametrize(
    ("interface", "members"), [(Task, MEMBERS), (Growing, GROWING)]
)
def test_the_interface_does_not_grow(interface, members):
    declared = {*vars(interface), *vars(interface).get("__annotations__", {})}
    assert {name for name in declared if not name.startswith("_")} == members
    assert len(MEMBERS) == 14
    assert len(GROWING) == 5


def test_a_score_without_a_direction_is_refused():
    with pytest.raises(ValueError, match=r"must be a Metric, e.g. Metric\('error', be"):

        class Undirected(Task):
            metrics = {"error": "error"}  # noqa: RUF012


def test_an_empty_row_of_any_stream_is_refused_unless_it_only_fills_the_batch():
    arrays = {
        "index": np.array([4, 2, -1]),
        "text": np.ones((3, 2, 5), np.int32),
        "text_length": np.array([[5, 1], [3, 2], [0, 0]]),
        "second": np.zeros((3, 2), np.int32),
    }
    assert streams(arrays) == ["text"]
    check_rows(arrays)
    arrays["text_length"][1, 1] = 0
    with pytest.raises(
        ValueError, match=r"^row 1 of the first batch has no position in its text: "
    ):
        check_rows(arrays)
