"""Reports of a run in progress: its first batch, utilization, compilations."""

import itertools
import types

import jax
import numpy as np
import pytest

from helpers.corpus import write_corpus
from helpers.runs import rows, run, small
from transformer_jax.config import make_task, parse
from transformer_jax.training import compilations, profiling, reporting
from transformer_jax.training.task import Work


def test_a_run_shows_its_first_batch_and_its_utilization(
    tiny, tmp_path, monkeypatch, caplog
):
    """Utilization is the number of useful FLOPs, divided by time and peak rate."""
    monkeypatch.setattr(profiling, "peak_flops", lambda dtype: ("mfu", 1e6))
    seconds = itertools.chain([0.0], itertools.repeat(4.0))
    monkeypatch.setattr(reporting.Pace, "seconds", lambda self: next(seconds))
    monkeypatch.setattr(profiling, "device_memory", lambda: {"device_memory_gb": 7.0})
    run(tiny, tmp_path / "run", training__steps=2)
    task = make_task(parse(tiny), tmp_path / "run")
    batches = task.batches("train", 0)
    works = [task.work(batches.load(batches.plan.batch(i))) for i in range(2)]
    row = rows(tmp_path / "run")[0]
    assert row["mfu"] == pytest.approx(
        sum(work.flops for work in works) / 4e6, abs=1e-4
    )
    assert row["tokens_per_s"] == pytest.approx(
        sum(work.tokens for work in works) / 4, abs=0.1
    )
    assert row["device_memory_gb"] == 7.0

    text = caplog.text
    assert "the first pair of the first batch:" in text
    names = ("source", "decoder input", "target")
    shown = {
        name: text.split(f"  {name} ")[1].splitlines()[0].split() for name in names
    }
    assert shown["source"][-1] == shown["target"][-1] == "</s>"
    assert shown["decoder input"] == ["<s>", *shown["target"][:-1]]


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


def test_more_compilations_than_shapes_are_warned_of(caplog):
    caplog.set_level("INFO", "transformer_jax")
    step = jax.jit(lambda state, batch: state + batch["x"].sum())
    compiled = compilations.Compilations(step, shapes=1)
    batch = {"x": np.zeros((2, 3))}
    assert compiled.compile(0.0, batch)
    step(0.0, batch)
    compiled.check()
    assert not compiled.compile(0.0, batch)
    assert not caplog.records
    step(0, batch)  # a batch of another type compiles again
    for _ in range(2):
        compiled.check()
    (warning,) = caplog.records
    assert (
        warning.getMessage()
        == "compiled the step 2 times for 1 batch shapes: check what else changes"
    )


def test_a_compilation_is_announced_and_counts_in_the_estimate(caplog):
    caplog.set_level("INFO", "transformer_jax")
    step = jax.jit(lambda state, batch: state + batch["x"].sum())
    compiled = compilations.Compilations(step, shapes=4)
    compiled.compile(0.0, {"x": np.zeros((2, 3))})
    assert compiled.left() is None  # the first was compiled ahead
    compiled.compile(0.0, {"x": np.zeros((2, 5))})
    compiled.compile(0.0, {"x": np.zeros((2, 7))})
    assert compiled.left() == sum(compiled._seconds) / 2 > 0  # one is missing
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the training step for batches of x 2 × 5, shape 2 of at most 4",
        "compiling the training step for batches of x 2 × 7, shape 3 of at most 4",
    ]


@pytest.mark.parametrize(
    ("task", "changes", "label"),
    [
        ("sequence_to_sequence", {}, "loss (with label smoothing)"),
        ("sequence_to_sequence", {"label_smoothing": 0.0}, "loss"),
        ("classification", {}, "loss"),
    ],
)
def test_a_loss_with_label_smoothing_is_called_so(
    tmp_path, caplog, task, changes, label
):
    caplog.set_level("INFO", "transformer_jax")
    config = small(task, tmp_path)
    config.training.update(changes)
    engine = types.SimpleNamespace(config=parse(config))
    compiled = types.SimpleNamespace(left=lambda: 0.0)
    report = reporting.Report(engine, None, None, None, compiled, 0, 0)
    report._show(1, 2.5, Work(10, 1e3), 1.0)
    report.close()
    assert f"  {label} 2.500  " in caplog.text


def test_no_more_than_a_few_steps_are_under_way(monkeypatch):
    """A run that is asked to stop must finish the steps under way before it can
    save.
    """
    report, waited = object.__new__(reporting.Report), []
    report._pending, report._work, report._first, report._last = [], Work(0, 0.0), -1, 9
    report._display = types.SimpleNamespace(is_due=lambda: False)
    monkeypatch.setattr(reporting.jax, "block_until_ready", waited.append)
    for i in range(1, 5):
        report.add(i, {"loss": i}, Work(2, 3.0))
    assert waited == [[], [], [{"loss": 1}], [{"loss": 2}]]
    assert report._work == Work(8, 12.0)
