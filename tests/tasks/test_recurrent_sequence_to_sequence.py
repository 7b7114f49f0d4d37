"""The translation task with a recurrent model: nothing but the model is another."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import shrink

import transformer_jax
from transformer_jax.config import ConfigError, claim_workdir, defaults, parse
from transformer_jax.training.loop import train
from transformer_jax.verification import verify


@pytest.fixture
def recurrent(corpus):
    return shrink(defaults("translation", "recurrent"), corpus)


@pytest.mark.parametrize("attention", ["none", "additive", "general", "multi_head"])
def test_cached_is_whole_and_no_token_is_seen_before_its_place(recurrent, attention):
    recurrent.model.attention = attention
    task = parse(recurrent).make_task("(none)")
    params, batch = nn.unbox(task.init(jax.random.key(0))), task.made_up(4, 6, seed=1)
    for name, difference in task.exactness(params, batch).items():
        assert difference < 1e-5, name


def test_trains_resumes_and_translates(recurrent, tmp_path, caplog):
    recurrent.model.attention = "additive"
    recurrent.decoding.beam_size = 3
    for steps in (4, 6):
        recurrent.training.steps = steps
        claim_workdir(tmp_path / "run", recurrent)
        parsed = parse(recurrent)
        train(parsed.make_task(tmp_path / "run"), parsed.engine, tmp_path / "run")
    assert "resumed from step 4" in caplog.text
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert predictor.evaluate()["step"] == 6
    assert predictor.predict([""]) == [""]
    for sentence in predictor.attention(["ek at", "ut"], ["dk", "dk dk"]):
        (alignment,) = sentence.maps
        assert alignment.rows[-1] == alignment.columns[-1] == "</s>"
        assert alignment.weights.shape == (1, 1, len(alignment.rows), len(alignment.columns))
        np.testing.assert_allclose(alignment.weights.sum(axis=-1), 1, rtol=1e-5)


def test_an_architecture_that_is_not_there(recurrent):
    with pytest.raises(ConfigError, match="architecture = 'convolutional': must be one of transformer, recurrent"):
        defaults("translation", "convolutional")
    recurrent.model.architecture = "convolutional"
    with pytest.raises(ConfigError, match="architecture = 'convolutional'"):
        parse(recurrent)
    recurrent.model.architecture = "transformer"
    with pytest.raises(ConfigError, match=r"config.model has the keys of 'recurrent'; it is chosen by the recipe"):
        parse(recurrent)


def test_teacher_forcing_goes_by_the_step(recurrent):
    model = recurrent.model
    model.teacher_forcing, model.teacher_forcing_end, model.teacher_forcing_steps = 1.0, 0.0, 10
    model.dropout_rate = recurrent.training.label_smoothing = 0.0
    task = parse(recurrent).make_task("(none)")
    params, batch, key = nn.unbox(task.init(jax.random.key(0))), task.made_up(4, 6, seed=1), jax.random.key(1)
    first, last = (float(task.loss(params, batch, key, step)[0]) for step in (0, 10))
    assert first == pytest.approx(float(task.measure(params, batch)["loss"]), rel=1e-5)
    assert abs(last - first) > 1e-4 * first


@pytest.mark.slow
def test_what_must_be_equal_is(recurrent):
    recurrent.model.attention, recurrent.model.teacher_forcing = "general", 0.5
    rows = list(verify(recurrent))
    assert [row.name for row in rows if not row.held] == []
    assert "in microbatches = whole" in [row.name for row in rows]
