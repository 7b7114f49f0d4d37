"""What a run tells while it goes on: its first batch, utilisation, profiles, compilations, listeners."""

import json
import types

import numpy as np
import pytest
from test_loop import run

from transformer_jax.config import parse
from transformer_jax.training import loop, profiling


def test_a_run_tells_its_first_batch_and_utilisation(tiny, tmp_path, monkeypatch, caplog):
    """mfu: useful FLOPs over time and peak."""
    monkeypatch.setattr(profiling, "peak_flops", lambda dtype: ("mfu", 1e6))
    monkeypatch.setattr(loop.Progress, "report", lambda self, step: (4.0, 0.0))
    monkeypatch.setattr(profiling, "device_memory", lambda: {"device_memory_gb": 7.0})
    run(tiny, tmp_path / "run", training__steps=2)
    batches = (task := parse(tiny).make_task(tmp_path / "run")).batches("train", 0)
    flops = sum(task.flops(batches.load(batches.plan.batch(i))) for i in range(2))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["mfu"] == pytest.approx(flops / 4e6, abs=1e-4)
    assert row["device_memory_gb"] == 7.0

    text = caplog.text
    assert "the first pair of the first batch:" in text
    names = ("source", "decoder input", "target")
    shown = {name: text.split(f"  {name} ")[1].splitlines()[0].split() for name in names}
    assert shown["source"][-1] == shown["target"][-1] == "</s>"
    assert shown["decoder input"] == ["<s>", *shown["target"][:-1]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"target": [[0, 0, 0]]}, "row 2 of the first batch has no token in its target"),
        ({"source": [[5, 0, 2]]}, "row 2 of the first batch has padding between tokens in its source"),
        ({"target": [[5, 6, 7]]}, r"row 2 of the first batch does not end in </s> in its target: \[5 6 7\]"),
        ({"target": [[5, 300, 2]]}, "row 2 of the first batch has ids beyond the vocabulary of 300 in its target"),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(tiny, tmp_path, damage, message):
    task = parse(tiny).make_task(tmp_path)
    good = {side: np.array([[0, 0, 0], [5, 6, 2], [7, 2, 0]]) for side in ("source", "target")}
    task.prepare()
    assert len(task.show(good, np.array([False, True, True]))) == 4
    for side, row in damage.items():
        good[side][2:] = row
    with pytest.raises(ValueError, match=message):
        task.show(good, np.array([False, True, True]))


def test_labels_that_could_be_read_off_are_refused(tiny, tmp_path, monkeypatch):
    task = parse(tiny).make_task(tmp_path)
    monkeypatch.setattr("transformer_jax.tasks.translation.shift_right", lambda target, bos_id: target)
    arrays = {side: np.array([[5, 6, 2]]) for side in ("source", "target")}
    with pytest.raises(ValueError, match="is not the target shifted by one: its labels could be read off it"):
        task.show(arrays, np.array([True]))


def test_more_compilations_than_shapes_are_warned_of(caplog):
    step = types.SimpleNamespace(_cache_size=lambda: step.size, size=1)
    count = loop._CompileCount(step, shapes=1)
    assert count.has_grown({"x": np.zeros(2)})
    assert not count.has_grown({"x": np.zeros(2)})
    assert "WARNING" not in caplog.text
    step.size = 2
    assert count.has_grown({"x": np.zeros(2)})
    assert "compiled the step 2 times for 1 shapes: what else changes?" in caplog.text


def test_no_more_than_a_few_steps_are_under_way(monkeypatch):
    """Else a run that is told to stop has to compute all that it has called before it can save."""
    report, waited = object.__new__(loop._Report), []
    report._pending, report._flops = [], 0.0
    monkeypatch.setattr(loop.jax, "block_until_ready", waited.append)
    for i in range(4):
        report.add({"loss": i}, 1.0)
    assert waited == [[], [], [{"loss": 0}], [{"loss": 1}]]
