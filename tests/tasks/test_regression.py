"""Regression: its loss, its scores, and values that are no numbers."""

import numpy as np
import pytest

from helpers.runs import parameters, small
from transformer_jax.config import make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


def table(path, header, *rows):
    path.write_text("".join("\t".join(row) + "\n" for row in (header, *rows)))


def task_of(config, workdir):
    return make_task(parse(config), workdir)


def evaluated(task, split):
    params = parameters(task)
    return params, Evaluator(task, make_mesh(task.config.mesh)).evaluate(
        params, split, greedy=True
    )


def test_regression_by_hand(corpus, tmp_path):
    task = task_of(small("regression", corpus), tmp_path / "run")
    scores = task.score(
        {"squared_error": 2.0}, [{"value": v} for v in (1.0, 2.0, 4.0)], ["1", "3", "2"]
    )
    assert scores == pytest.approx(
        {"loss": 2.0, "pearson": 2 / np.sqrt(14 * 2) * np.sqrt(3) / 2, "spearman": 0.5}
    )
    params, scores = evaluated(task, "val")
    values = np.array(list(map(float, task.corpus.open("val").column("value"))))
    found = Evaluator(task, make_mesh(task.config.mesh)).predict(
        params, list(task.corpus.open("val").column("sentence"))
    )
    found = np.array([prediction["value"] for prediction in found])
    assert scores["loss"] == pytest.approx(((found - values) ** 2).mean(), rel=1e-4)
    assert scores["pearson"] == pytest.approx(
        np.corrcoef(found, values)[0, 1], rel=1e-3
    )


def test_a_value_that_is_no_number(corpus, tmp_path):
    table(corpus / "val.tsv", ("sentence", "value"), ("ek", "1.5"), ("at", "high"))
    task = task_of(small("regression", corpus), tmp_path / "run")
    with pytest.raises(
        DataError,
        match=r"val\.tsv, split val, row 2: the label 'high' is not a finite number",
    ):
        task.batches("val", None)
