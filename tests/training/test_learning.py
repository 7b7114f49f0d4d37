"""A validation loss at the entropy of the training targets is warned of."""

import logging

import pytest

from helpers.runs import rows, run, small
from transformer_jax.config import make_task, parse
from transformer_jax.data.batching import Batches
from transformer_jax.training.learning import Learning


@pytest.mark.parametrize(
    ("name", "architecture"), [("bert_pretraining", "bert"), ("classification", "bert")]
)
def test_masked_tokens_and_labels_have_a_baseline(name, architecture, corpus, tmp_path):
    task = make_task(parse(small(name, corpus, architecture)), tmp_path)
    baseline = task.batches("train", seed=0).baseline
    assert baseline is not None
    assert baseline() > 0


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        ({10: 7.0, 20: 5.0, 100: 3.0}, []),  # before a fifth of the run, and then below
        ({20: 6.0, 40: 6.0, 60: 5.0, 100: 3.0}, [20]),
        ({20: 6.0, 40: 6.0, 100: 5.99}, [20, 100]),
        ({20: 5.87, 100: 5.87}, []),
        ({10: 7.0, 20: 5.0, 60: 6.5, 100: 8.0}, []),  # overfits after learning
    ],
)
def test_a_loss_at_the_entropy_is_warned_of_once_and_at_the_end(losses, warned, caplog):
    learning = Learning(Batches(None, None, baseline=lambda: 6.0), steps=100)
    for step, loss in losses.items():
        learning.check(step, {"loss": loss})
    assert [record.args[0] for record in caplog.records] == warned


def test_long_runs_are_judged_after_two_thousand_steps(caplog):
    learning = Learning(Batches(None, None, baseline=lambda: 6.0), steps=100_000)
    learning.check(1000, {"loss": 6.0})
    assert not caplog.records
    learning.check(2000, {"loss": 6.0})
    assert (
        "step 2000: the validation loss 6 is not clearly below 6, "
        "the entropy of the training targets" in caplog.text
    )


def test_tasks_without_a_baseline_are_not_judged(caplog):
    Learning(Batches(None, None), steps=1).check(1, {"loss": 9.0})
    Learning(Batches(None, None, baseline=lambda: 6.0), steps=1).check(
        1, {"accuracy": 0.5}
    )
    assert not caplog.records


def test_a_run_that_has_learned_nothing_says_so(tiny, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "transformer_jax")
    tiny.optimizer.learning_rate = 1e-9
    run(tiny, tmp_path / "run")
    last = [row for row in rows(tmp_path / "run") if row["split"] == "val"][-1]
    messages = [
        message
        for message in caplog.messages
        if "the entropy of the training targets" in message
    ]
    assert messages[-1].startswith(
        f"step 4: the validation loss {last['loss']:.3g} is not clearly below "
    )
