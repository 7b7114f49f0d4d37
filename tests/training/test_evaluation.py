"""Parameters of a checkpoint that are evaluated."""

import jax
import jax.numpy as jnp
import pytest

import transformer_jax
from helpers.runs import rows
from transformer_jax.training.checkpoint import (
    CheckpointError,
    Checkpoints,
)
from transformer_jax.workdir import claim


def test_parameters_that_are_not_finite_predict_nothing(finished, monkeypatch):
    restored = Checkpoints.restore_params

    def ruined(*arguments):
        params = restored(*arguments)
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(
            structure, [leaves[0], leaves[1].at[0].set(jnp.nan), *leaves[2:]]
        )

    monkeypatch.setattr(Checkpoints, "restore_params", ruined)
    message = r"step 8 in .*: the parameters are not finite \(.*\), so the run diverged"
    with pytest.raises(CheckpointError, match=message):
        transformer_jax.load(finished[1])


def test_a_renamed_checkpoint_is_not_evaluated(finished, copied):
    steps = copied / "checkpoints"
    (steps / "8").rename(steps / "900")
    with pytest.raises(
        CheckpointError, match="900 holds step 8: rename the folder to 8"
    ):
        transformer_jax.load(copied)


def test_evaluation_takes_latest_best_or_average(finished, caplog):
    _, workdir, hashes = finished
    load = {
        name: transformer_jax.load(
            str(workdir), {"evaluation.checkpoint": name, "evaluation.average_last": 2}
        )
        for name in ("latest", "best", "average")
    }
    assert "averaging the parameters of steps 6, 8" in caplog.text
    losses = {
        row["step"]: row["loss"] for row in rows(workdir) if row["split"] == "val"
    }
    assert load["latest"].step == load["average"].step == 8
    assert load["best"].step == min(losses, key=lambda step: losses[step])
    assert load["latest"].parameters_sha256 == hashes["params"]
    assert load["average"].parameters_sha256 != load["latest"].parameters_sha256
    first = load["latest"].evaluate("val")
    assert first["loss"] == pytest.approx(losses[8], rel=1e-6)
    assert first["parameters_sha256"] == load["latest"].parameters_sha256


def test_no_such_checkpoint(tiny, tmp_path):
    claim(tmp_path / "run", tiny)
    with pytest.raises(
        CheckpointError, match="has no valid checkpoint: train there first"
    ):
        transformer_jax.load(str(tmp_path / "run"))
