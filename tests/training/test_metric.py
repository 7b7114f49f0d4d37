"""Directions of metrics: which step of a run is its best."""

from typing import ClassVar

import pytest

import transformer_jax
from helpers.runs import run
from transformer_jax.config import ConfigError, parse
from transformer_jax.errors import UserError
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.metric import LOSS, Metric, label


class Recognition(SequenceToSequence):
    """A task of a user, with an error rate."""

    metrics: ClassVar = {
        **SequenceToSequence.metrics,
        "word_error_rate": Metric("word error rate (greedy)", better="lower"),
    }
    rates: ClassVar[list[float]] = []  # of the evaluations to come

    def score(self, means, predictions, references):
        scores = super().score(means, predictions, references)
        return {**scores, "word_error_rate": self.rates.pop(0)}


def test_the_best_step_of_a_users_task_has_the_lowest_error_rate(
    tiny, tmp_path, caplog
):
    tiny.task = f"{__name__}:Recognition"
    tiny.checkpoint.best_metric = "word_error_rate"
    tiny.checkpoint.keep_latest = tiny.checkpoint.keep_best = 1
    Recognition.rates = [0.5, 0.2, 0.9, 0.4]
    workdir = tmp_path / "run"
    run(tiny, workdir, training__steps=8)
    checkpoints = Checkpoints(
        workdir / "checkpoints", parse(tiny).checkpoint, Recognition.metrics
    )
    assert checkpoints.verified() == [4, 8]
    assert "word error rate (greedy) 0.2" in caplog.text
    best = transformer_jax.load(
        str(workdir), {"evaluation.checkpoint": "best"}, task=Recognition
    )
    assert best.step == 4


def test_a_metric_without_a_direction_is_refused():
    with pytest.raises(UserError, match=r"'wer', better='down'.*'higher' or 'lower'"):
        Metric("wer", better="down")  # type: ignore[arg-type]


def test_a_task_that_gives_only_a_label_is_refused():
    with pytest.raises(UserError, match=r"metrics\['bleu'\] = 'bleu': must be a Metri"):
        type("Mine", (SequenceToSequence,), {"metrics": {"bleu": "bleu"}})


@pytest.mark.parametrize(("key", "value"), [("keep_best", 1), ("checkpoint", "best")])
def test_an_unknown_score_that_chooses_a_step_is_refused(tiny, key, value):
    tiny.checkpoint.best_metric = "word_error_rate"
    tiny.checkpoint.keep_best = 0
    section = tiny.evaluation if key == "checkpoint" else tiny.checkpoint
    section[key] = value
    with pytest.raises(ConfigError, match=f"one of .* loss, .* or set .*{key} = "):
        parse(tiny)


def test_an_unknown_score_that_chooses_nothing_is_no_problem(tiny):
    tiny.checkpoint.best_metric = "word_error_rate"
    tiny.checkpoint.keep_best = 0
    assert parse(tiny).checkpoint.best_metric == "word_error_rate"


def test_a_value_that_is_no_metric_is_its_own_label():
    assert label({"loss": LOSS}, "loss") == "loss"
    assert label({"loss": LOSS}, "examples") == "examples"
