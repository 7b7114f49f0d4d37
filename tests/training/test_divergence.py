"""Runs whose loss or parameters are not finite."""

import json

import pytest

import transformer_jax
from helpers.runs import run
from transformer_jax.training import divergence
from transformer_jax.training.checkpoint import CheckpointError
from transformer_jax.training.divergence import Diverged


@pytest.mark.usefixtures("without_search")
def test_a_run_that_diverges_is_stopped(tiny, tmp_path, caplog):
    (
        tiny.optimizer.schedule,
        tiny.optimizer.learning_rate,
        tiny.optimizer.warmup_steps,
    ) = (
        "constant",
        9e37,
        0,
    )
    tiny.checkpoint.keep_best = 0
    tiny.training.evaluate_every = 40
    message = (
        r"step 11 \(epoch 10, batch 0;.* is the 10th consecutive step .*\. There is no"
        r" earlier"
    )
    with pytest.raises(Diverged, match=message):
        run(tiny, tmp_path / "run", training__steps=40)
    assert "step 2 (epoch 1, batch 0; both from 0) skipped: loss nan" in caplog.text
    assert "step 1 (" not in caplog.text
    assert "step 10 is not saved: its loss or gradient is not finite" in caplog.text
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("without_search")
def test_ruined_parameters_are_never_a_checkpoint(tiny, tmp_path):
    """The first update is finite, but ruins the parameters.

    Only the validation loss shows this, or the loss of the next step.
    """
    (
        tiny.optimizer.schedule,
        tiny.optimizer.learning_rate,
        tiny.optimizer.warmup_steps,
    ) = (
        "constant",
        1e30,
        0,
    )
    tiny.training.evaluate_every = tiny.checkpoint.every = tiny.training.log_every = 1
    with pytest.raises(
        Diverged,
        match=r"the validation loss of step 1 is (nan|inf)\. There is no earlier",
    ):
        run(tiny, tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").glob("*"))
    constants = {"parse_constant": lambda word: pytest.fail(f"{word} is not JSON")}
    written = [
        json.loads(line, **constants)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {row["split"]: row["loss"] for row in written}["val"] is None
    with pytest.raises(CheckpointError, match="has no valid checkpoint"):
        transformer_jax.load(tmp_path / "run")


@pytest.mark.usefixtures("without_search")
def test_parameters_that_are_not_finite_are_not_saved(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "not_finite", lambda params: "encoder/kernel")
    with pytest.raises(
        Diverged,
        match=r"the parameters of step 2 are not finite: encoder/kernel\. There is no",
    ):
        run(tiny, tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").glob("*"))


def test_a_step_that_was_skipped_is_not_good_and_is_warned_of(caplog):
    assert divergence.is_good(3, {"skipped": 0.0})
    assert not caplog.records
    assert not divergence.is_good(4, {"skipped": 1.0})
    assert "step 4 is not saved: its loss or gradient is not finite" in caplog.text
