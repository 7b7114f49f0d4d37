"""Sequence-to-sequence task with a recurrent model instead of a Transformer."""

import jax
import numpy as np
import pytest

import transformer_jax
from helpers.runs import parameters, run, shrink
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh
from transformer_jax.verification import verify


@pytest.fixture
def recurrent(corpus):
    return shrink(defaults("sequence_to_sequence", "recurrent"), corpus)


# tests/models/test_recurrent.py compares both with the equations of every attention.
@pytest.mark.parametrize(
    "attention",
    [
        *("none", "additive"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("general", "multi_head")),
    ],
)
def test_cached_is_whole_and_no_token_is_seen_before_its_place(recurrent, attention):
    recurrent.model.attention = attention
    task = make_task(parse(recurrent), None)
    params, batch = (
        parameters(task),
        task.dummy_batch(4, 6, seed=1),
    )
    for name, difference in task.checks(params, batch).items():
        assert difference < 1e-5, name


def test_without_attention_there_is_none_to_show(recurrent, tmp_path):
    recurrent.model.attention = "none"
    task = make_task(parse(recurrent), tmp_path / "run")
    params = parameters(task)
    assert Evaluator(task, make_mesh(task.config.mesh)).attention(
        params, [{"en": "ek", "de": "dk"}]
    ) == [[]]


def test_trains_resumes_and_translates(recurrent, tmp_path, caplog):
    recurrent.model.attention = "additive"
    recurrent.decoding.beam_size = 3
    for steps in (4, 6):
        run(recurrent, tmp_path / "run", training__steps=steps)
    assert "resumed from step 4" in caplog.text
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert predictor.evaluate()["step"] == 6
    assert predictor.predict([""]) == [""]
    for (alignment,) in predictor.attention(
        [{"en": "ek at", "de": "dk"}, {"en": "ut", "de": "dk dk"}]
    ):
        assert alignment.queries[-1] == alignment.keys[-1] == "</s>"
        assert alignment.weights.shape == (
            1,
            1,
            len(alignment.queries),
            len(alignment.keys),
        )
        np.testing.assert_allclose(alignment.weights.sum(axis=-1), 1, rtol=1e-5)


def test_an_architecture_that_is_not_there(recurrent):
    with pytest.raises(
        ConfigError,
        match="architecture = 'convolutional': must be one of transformer, recurrent",
    ):
        defaults("sequence_to_sequence", "convolutional")
    recurrent.model.architecture = "convolutional"
    with pytest.raises(ConfigError, match="architecture = 'convolutional'"):
        parse(recurrent)
    recurrent.model.architecture = "transformer"
    with pytest.raises(
        ConfigError,
        match=(
            r"config.model has the keys of 'recurrent'; set the architecture in the"
            r" recipe"
        ),
    ):
        parse(recurrent)


def test_teacher_forcing_goes_by_the_step(recurrent, tmp_path):
    model = recurrent.model
    model.teacher_forcing, model.teacher_forcing_end, model.teacher_forcing_steps = (
        1.0,
        0.0,
        10,
    )
    model.dropout_rate = recurrent.training.label_smoothing = 0.0
    task = make_task(parse(recurrent), tmp_path / "run")
    params, batch = (
        parameters(task),
        task.dummy_batch(4, 6, seed=1),
    )
    key = jax.random.key(1)
    loss = jax.jit(lambda step: task.loss(params, batch, key, step)["loss"].sum)
    first, last = (float(loss(step)) for step in (0, 10))
    measured = jax.jit(lambda: task.evaluate(params, batch, True)[0]["loss"].sum)()
    assert first == pytest.approx(float(measured), rel=1e-5)
    assert abs(last - first) > 5e-5 * first


@pytest.mark.slow
def test_what_must_be_equal_is(recurrent):
    recurrent.model.attention, recurrent.model.teacher_forcing = "general", 0.5
    rows = list(verify(recurrent))
    assert [row.name for row in rows if not row.held] == []
    assert "microbatches = the whole batch" in [row.name for row in rows]
