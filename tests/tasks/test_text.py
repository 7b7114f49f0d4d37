"""Previews of batches, which refuse what must be wrong."""

import numpy as np
import pytest

from helpers.corpus import write_corpus
from helpers.runs import small
from transformer_jax.config import make_task, parse


def pairs():
    """Return arrays of a filler row and two pairs."""
    arrays = {
        side: np.array([[0, 0, 0], [5, 6, 2], [7, 2, 0]], np.int32)
        for side in ("source", "target")
    }
    lengths = {
        f"{side}_length": np.array([0, 3, 2], np.int32) for side in ("source", "target")
    }
    return {**arrays, **lengths, "index": np.array([-1, 4, 2], np.int32)}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A task with trained tokenizers."""
    folder = tmp_path_factory.mktemp("taught")
    write_corpus(folder / "corpus")
    task = make_task(parse(small("sequence_to_sequence", folder / "corpus")), folder)
    task.fingerprint(training=False)
    return task


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            {"target_length": 0},
            "row 2 of the first batch has no position in its target",
        ),
        (
            {"target": [5, 6, 7]},
            r"row 2 of the first batch does not end in EOS in its target: \[5 6 7\]",
        ),
        (
            {"source_length": 3},
            r"row 2 of the first batch does not end in EOS in its source: \[7 2 0\]",
        ),
        (
            {"target": [304, 2, 0]},
            (
                "row 2 of the first batch has ids "
                "beyond the vocabulary of 304 in its target"
            ),
        ),
    ],
)
def test_a_batch_that_must_be_wrong_is_refused(taught, damage, message):
    arrays = pairs()
    assert len(taught.preview(arrays)) == 4
    for name, row in damage.items():
        arrays[name][2] = row
    with pytest.raises(ValueError, match=message):
        taught.preview(arrays)
    arrays["index"][2] = -1  # filler rows are not checked
    assert len(taught.preview(arrays)) == 4


def test_labels_that_could_be_read_off_are_refused(taught, monkeypatch):
    monkeypatch.setattr(
        "transformer_jax.tasks.sequence_to_sequence.shift_right",
        lambda target, begin: target,
    )
    with pytest.raises(
        ValueError, match="is not the target shifted by one: it may reveal the labels"
    ):
        taught.preview(pairs())
