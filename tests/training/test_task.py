"""The size of the interface of a task, and what it refuses."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.runs import get_config
from transformer_jax.config import ConfigError, parse
from transformer_jax.data.streams import Frames, Grid
from transformer_jax.training.task import (
    Columns,
    Embedding,
    Growing,
    Inspected,
    Mean,
    Scoring,
    Task,
    check_rows,
    streams,
)

MEMBERS = {
    *("init", "loss", "evaluate"),
    *("batches", "batches_of", "decode", "score", "metrics"),
    *("dummy_batch", "preview", "fingerprint", "work", "checks", "attention"),
}
GROWING = {"piece", "growing", "grow", "unfinished"}
SCORING = {"scorer"}
EMBEDDING = {"embedder"}
INSPECTED = {"network", "completed", "forward"}


@pytest.mark.parametrize(
    ("interface", "members"),
    [
        (Task, MEMBERS),
        (Growing, GROWING),
        (Scoring, SCORING),
        (Embedding, EMBEDDING),
        (Inspected, INSPECTED),
    ],
)
def test_the_interface_does_not_grow(interface, members):
    declared = {*vars(interface), *vars(interface).get("__annotations__", {})}
    assert {name for name in declared if not name.startswith("_")} == members
    assert len(MEMBERS) == 14
    assert len(GROWING) == 4


def test_batches_must_hold_rows_multiple_examples_of_the_longest_stream():
    config = get_config("spoken_digits", "")
    config.data.directory = "somewhere"
    config.input.max_positions = 129
    message = (
        r"batch_tokens = 1024: must have room for rows_multiple = 8 rows "
        r"of input\.max_positions = 129: set it to 1032 or more"
    )
    with pytest.raises(ConfigError, match=message):
        parse(config)


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


class Minimal(Task):
    """A task that has nothing but a loss, and two streams: six cells of width 4, and up
    to 9 frames of width 3.
    """

    metrics = {}  # noqa: RUF012
    evaluate = batches = batches_of = decode = score = None

    def __init__(self):
        config = SimpleNamespace(columns=Columns(("image", "sound")))
        image = Grid("image", (4, 6, 1), 2)
        sound = Frames("sound", 8000, 3, 1, 9)
        corpus = SimpleNamespace(
            streams={"image": image, "sound": sound},
            fingerprint=lambda training: {"of the corpus": str(training)},
        )
        super().__init__(config, corpus)

    def init(self, key):
        return {"map": jnp.zeros((4, 5))}

    def loss(self, params, batch, key, step):
        return {"loss": Mean((batch["image"] @ params["map"]).sum(), jnp.ones(()))}


def shapes(batch):
    return {name: array.shape for name, array in batch.items()}


def test_a_synthetic_batch_has_the_streams_of_the_corpus():
    batch = Minimal().dummy_batch(2, 8)
    assert shapes(batch) == {
        "index": (2,),
        "image": (2, 6, 4),  # its limit
        "image_length": (2,),
        "sound": (2, 8, 3),
        "sound_length": (2,),
    }


def test_a_synthetic_batch_without_references_has_the_inputs_only():
    batch = Minimal().dummy_batch(2, 8, references=False)
    assert batch.keys() == {"index", "image", "image_length"}


def test_a_preview_has_a_label_for_each_position():
    task = Minimal()
    assert task.preview(task.dummy_batch(2, 3)) == [
        "the first example of the first batch:",
        "  image: 1,1 1,2 1,3",
        "  sound: 0.00 s 0.01 s 0.02 s",
    ]


def test_the_work_of_a_step_leaves_out_padding():
    task = Minimal()
    batch = task.dummy_batch(2, 6)
    whole = 3 * (2 * 2 * 6 * 4 * 5)
    assert task.work(batch) == (2 * 6 * 2, whole)
    batch["sound_length"] = np.array([0, 6])
    assert task.work(batch) == (2 * 6 * 2 - 6, whole * 3 / 4)


def test_the_fingerprint_is_that_of_the_corpus():
    assert Minimal().fingerprint(training=True) == {"of the corpus": "True"}


def test_without_a_network_there_are_no_attention_weights():
    task = Minimal()
    assert task.attention({}, task.dummy_batch(2, 3)) == ({}, {})
