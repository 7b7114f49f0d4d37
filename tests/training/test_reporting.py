"""Reports of a run in progress: its first batch, its utilization and its loss."""

import itertools
import types

import pytest

from helpers.runs import rows, run, small
from transformer_jax.config import make_task, parse
from transformer_jax.training import profiling, reporting
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


@pytest.mark.parametrize(
    ("watch_every", "clip_norm", "expected"),
    [(5, 2.0, {"clipped": 0.75}), (5, 0.0, {}), (0, 2.0, {})],
)
def test_the_share_of_clipped_steps(tmp_path, watch_every, clip_norm, expected):
    config = small("classification", tmp_path)
    config.training.watch_every = watch_every
    config.optimizer.clip_norm = clip_norm
    report = object.__new__(reporting.Report)
    report._engine = types.SimpleNamespace(config=parse(config))
    steps = [{"gradient_norm": norm} for norm in (1.0, 2.0, 3.0, 9.0)]
    assert report._clipped(steps) == expected


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
