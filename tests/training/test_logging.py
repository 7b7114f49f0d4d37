"""Rows of metrics, TensorBoard events and listeners."""

import errno
import io
import json
import math
import os
import shutil
import sys
import types

import pytest

from transformer_jax.errors import UserError
from transformer_jax.training import logging
from transformer_jax.training.logging import (
    Display,
    MetricsWriter,
    Pace,
    json_line,
    wandb_listener,
)


def test_rows_are_lines_and_events(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    assert not list(tmp_path.glob("events*"))  # TensorBoard starts with the first row
    writer.write(3, "val", {"loss": 1.5, "bleu_signature": "x"})
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 3,
        "split": "val",
        "loss": 1.5,
        "bleu_signature": "x",
    }
    (events,) = tmp_path.glob("events*")
    assert b"val/loss" in events.read_bytes()
    MetricsWriter(tmp_path, 3).close()
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"
    MetricsWriter(tmp_path, 2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = MetricsWriter(tmp_path, 0)
    monkeypatch.setattr(writer, "_write", write)
    with pytest.raises(
        UserError,
        match=(
            r"metrics cannot be written to \S+: No space left on device; free some"
            r" space"
        ),
    ):
        writer.write(1, "train", {"loss": 1.0})


def test_metrics_without_permission_are_explained(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        UserError, match=r"metrics\.jsonl cannot be read: Is a directory"
    ):
        MetricsWriter(tmp_path, 0)


def test_a_damaged_id_of_weights_and_biases_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace())
    (tmp_path / "wandb.json").write_text('{"id"')
    with pytest.raises(
        UserError, match=r"wandb\.json is damaged .*: restore it, or remove it"
    ):
        wandb_listener("p", tmp_path, {})


def test_listeners_are_told_every_row(tmp_path):
    told = []
    writer = MetricsWriter(tmp_path, 0, [lambda *row: told.append(row)])
    writer.write(3, "val", {"loss": 1.5, "bleu_signature": "x"})
    writer.close()
    assert told == [(3, "val", {"loss": 1.5, "bleu_signature": "x"})]


def test_weights_and_biases_is_told_if_it_is_there(tmp_path, monkeypatch):
    begun, logged = [], []

    def init(**given):
        begun.append(given)
        return types.SimpleNamespace(
            log=lambda values, step: logged.append((step, values))
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    wandb_listener("attention", tmp_path, {"task": "translation"})(
        7, "val", {"loss": 1.5}
    )
    wandb_listener("attention", tmp_path, {})
    assert logged == [(7, {"val/loss": 1.5})]
    assert begun[0]["id"] == begun[1]["id"]
    (tmp_path / "wandb.json").unlink()
    wandb_listener("attention", tmp_path, {})(1, "val", {"loss": 1.5})
    assert begun[2]["id"] != begun[0]["id"], (
        "another run at the same path is another run"
    )
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    wandb_listener("attention", tmp_path.with_name("copy"), {})
    assert begun[3]["id"] not in {
        begun[0]["id"],
        begun[2]["id"],
    }, "a copy is another run"
    assert begun[0]["project"] == "attention"
    assert begun[0]["config"] == {"task": "translation"}
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match="--wandb_project=attention needs wandb: run pip install wandb"
    ):
        wandb_listener("attention", tmp_path, {})


def test_what_is_no_number_is_null():
    values = {
        "loss": math.nan,
        "perplexity": -math.inf,
        "bleu": 1.5,
        "signature": "x",
        "step": 3,
    }
    assert (
        json_line(values)
        == '{"loss": null, "perplexity": null, "bleu": 1.5, "signature": "x",'
        ' "step": 3}'
    )


def test_lines_come_by_time_not_by_steps(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(logging.time, "monotonic", lambda: now)
    display = Display(0, 10_000)
    shown = []
    for step in range(10_000):
        now = float(step)
        if display.is_due():
            display.show(step, "loss 1.000")
            shown.append(step)
    assert shown[:4] == [0, 10, 20, 30]  # one step takes one second
    assert shown[-1] - shown[-2] == 60
    assert f"step {shown[-1]}/10000  loss 1.000" in caplog.text


def test_a_terminal_shows_a_bar_below_what_is_logged(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    display = Display(3, 10)
    assert display.is_due()
    display.show(4, "loss 1.000")
    assert not display.is_due()
    display.close()
    assert "| step 4/10, loss 1.000" in terminal.getvalue()


def test_pace_leaves_out_what_is_not_training(monkeypatch):
    now = 100.0
    monkeypatch.setattr(logging.time, "perf_counter", lambda: now)
    pace = Pace(2, 12)
    now = 107.0
    pace.leave_out(105.0)
    assert pace.seconds() == 5.0
    assert pace.left(7) == 5.0
    now = 112.0
    pace.leave_out(107.0, recurring=True)  # an evaluation
    assert pace.seconds() == 5.0
    assert pace.left(7) == 10.0
