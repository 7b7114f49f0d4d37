"""Rows, TensorBoard events and listeners."""

import json
import sys
import types

import pytest

from transformer_jax.training.logging import MetricsWriter, wandb_listener


def test_rows_are_lines_and_events(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    assert not list(tmp_path.glob("events*"))  # TensorBoard is imported for the first row
    writer.write(3, "val", {"loss": 1.5, "bleu_signature": "x"})
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "split": "val", "loss": 1.5, "bleu_signature": "x"}
    (events,) = tmp_path.glob("events*")
    assert b"val/loss" in events.read_bytes()
    MetricsWriter(tmp_path, 3).close()
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"
    MetricsWriter(tmp_path, 2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


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
        return types.SimpleNamespace(log=lambda values, step: logged.append((step, values)))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    wandb_listener("attention", tmp_path, {"task": "translation"})(7, "val", {"loss": 1.5})
    wandb_listener("attention", tmp_path, {})
    assert logged == [(7, {"val/loss": 1.5})]
    assert begun[0]["id"] == begun[1]["id"]
    assert begun[0]["project"] == "attention"
    assert begun[0]["config"] == {"task": "translation"}
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--wandb_project=attention needs wandb: pip install wandb"):
        wandb_listener("attention", tmp_path, {})
