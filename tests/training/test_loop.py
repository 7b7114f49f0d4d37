"""Training runs: they learn, report, and continue bitwise where they were."""

import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers.runs import rows, run
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training.checkpoint import parameters_sha256
from transformer_jax.training.engine import Engine
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import schedule as make_schedule
from transformer_jax.training.task import Mean


def test_training_learns_and_leaves_what_it_should(tiny, tmp_path, caplog):
    tiny.optimizer.schedule, tiny.optimizer.learning_rate = "constant", 1e-2
    tiny.training.evaluate_every = tiny.checkpoint.every = tiny.training.log_every = 20
    run(tiny, tmp_path / "run", training__steps=40)
    train_rows = [row for row in rows(tmp_path / "run") if row["split"] == "train"]
    val_rows = [row for row in rows(tmp_path / "run") if row["split"] == "val"]
    assert (
        [row["step"] for row in train_rows]
        == [row["step"] for row in val_rows]
        == [20, 40]
    )
    assert val_rows[1]["loss"] < val_rows[0]["loss"] < np.log(304)
    assert {"loss", "learning_rate", "tokens_per_s"} <= set(train_rows[0])
    assert {
        "loss",
        "perplexity",
        "bleu",
        "bleu_signature",
        "bleu_tokenized",
        "examples",
    } <= set(val_rows[0])
    assert val_rows[0]["examples"] == 11
    assert "step 40/40  loss" in caplog.text
    assert "compiling the training step for batches of" in caplog.text
    names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
    assert names == {"config", "made", "metrics", "events", "tokenizer", "checkpoints"}


def test_resumed_run_is_bitwise_the_run_never_stopped(finished, tmp_path, caplog):
    """This is so too if its first part was watched."""
    config, workdir, hashes = finished
    run(config, tmp_path, training__steps=2, training__watch_every=2)
    resumed = run(config, tmp_path)
    watched, *others = (row for row in rows(tmp_path) if row["split"] == "train")
    assert watched["update_norm/decoder/layers/1"] > 0
    assert 0 < watched["attention_entropy/cross-attention/0"] <= np.log(32)
    assert not [name for row in others for name in row if "/" in name]
    assert "resumed from step 2" in caplog.text
    assert parameters_sha256(resumed) == hashes["state"]
    kept = ("step", "split", "loss", "gradient_norm", "bleu")
    strip = [
        [{key: row.get(key) for key in kept} for row in rows(folder)]
        for folder in (workdir, tmp_path)
    ]
    assert strip[0] == strip[1]


@pytest.mark.usefixtures("without_search")
def test_rows_have_the_steps_own_loss_and_the_mean_since_the_last(
    tiny, tmp_path, monkeypatch
):
    """Rows also have every other mean of the task, including those that are not part
    of the objective.
    """
    loss = SequenceToSequence.loss

    def with_another(self, params, batch, key, step):
        return {
            **loss(self, params, batch, key, step),
            "before": Mean(5.0 * step, 5.0, scale=0),
        }

    monkeypatch.setattr(SequenceToSequence, "loss", with_another)
    for every in (1, 2):
        tiny.training.log_every = every
        run(tiny, tmp_path / str(every), training__steps=4)
    each, pairs = (
        {row["step"]: row for row in rows(tmp_path / name) if row["split"] == "train"}
        for name in ("1", "2")
    )
    assert sorted(pairs) == [2, 4]
    for step, row in pairs.items():
        before, own = each[step - 1]["loss"], each[step]["loss"]
        assert row["loss"] == own == each[step]["mean_loss"]
        assert min(before, own) < row["mean_loss"] < max(before, own)
        assert row["before"] == step - 1


def test_an_unknown_score_cannot_be_the_best(tiny, tmp_path):
    tiny.checkpoint.best_metric = "belu"
    with pytest.raises(
        ConfigError,
        match=r"best_metric = 'belu': must be one of .* loss, .*\(did you mean bleu\?",
    ):
        run(tiny, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_search")
def test_ready_is_called_when_a_run_can_begin(tiny, tmp_path):
    told = []
    engine = Engine(make_task(parse(tiny), tmp_path))
    train(engine, tmp_path, ready=lambda: told.append("ready"))
    assert told == ["ready"]
    tiny.data.directory = str(tmp_path / "none")
    with pytest.raises(ValueError, match="There is no directory"):
        train(
            Engine(make_task(parse(tiny), tmp_path)),
            tmp_path,
            ready=lambda: told.append("again"),
        )
    assert told == ["ready"]


@pytest.mark.usefixtures("without_search")
def test_the_rate_goes_by_the_steps_that_were_not_skipped(tiny, tmp_path, monkeypatch):
    loss = SequenceToSequence.loss

    def broken_at_first(self, params, batch, key, step):
        mean = loss(self, params, batch, key, step)["loss"]
        return {"loss": mean._replace(sum=jnp.where(step < 3, jnp.nan, mean.sum))}

    monkeypatch.setattr(SequenceToSequence, "loss", broken_at_first)
    run(tiny, tmp_path / "run", training__steps=4)
    run(tiny, tmp_path / "run", training__steps=6)
    rates = {
        row["step"]: row["learning_rate"]
        for row in rows(tmp_path / "run")
        if row["split"] == "train"
    }
    schedule = make_schedule(parse(tiny).optimizer, tiny.model.d_model, 6)
    assert [rates[step] for step in (4, 6)] == pytest.approx(
        [float(schedule(n)) for n in (0, 2)]
    )
    assert rates[6] > rates[4]


@pytest.mark.usefixtures("without_search")
def test_a_profile_of_steps_that_do_not_come_is_announced_as_none(
    tiny, tmp_path, caplog
):
    engine = Engine(make_task(parse(tiny), tmp_path / "run"))
    train(engine, tmp_path / "run", trace=range(9, 11))
    assert "no profile: step 9 is not among the remaining steps, 1 to 4" in caplog.text


def test_a_run_loaded_or_asked_wrongly(finished):
    workdir = str(finished[1])
    predictor = transformer_jax.load(workdir)
    for use in (predictor.predict, predictor.attention):
        with pytest.raises(ValueError, match="'ek at' is one record, not a list"):
            use("ek at")
        with pytest.raises(
            ValueError,
            match="record 2 has the fields text: it must have en, and may have de",
        ):
            use(["ek at", {"text": "ek"}])
    message = (
        r"holds parameters of another model.*\n  config.model.norm: 'post' in the"
        r" workdir"
    )
    with pytest.raises(ConfigError, match=message):
        transformer_jax.load(workdir, {"model.norm": "pre"})
    same = transformer_jax.load(workdir, {"model.attention_implementation": "jax"})
    assert same.parameters_sha256 == predictor.parameters_sha256


def test_a_finished_run_does_nothing_more(finished, copied):
    config, workdir, hashes = finished
    assert parameters_sha256(run(config, copied)) == hashes["state"]
    assert rows(copied) == rows(workdir)
