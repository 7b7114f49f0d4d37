"""Conditions that train a recipe."""

import dataclasses
import functools
import json

import pytest

import transformer_jax
from helpers import ROOT
from helpers.corpus import write_corpus
from helpers.runs import RECIPE
from transformer_jax import experiment
from transformer_jax.claims import trained as trained_module
from transformer_jax.claims.claim import Setting
from transformer_jax.claims.trained import Trained, scores_of
from transformer_jax.config import ConfigError, load_recipe
from transformer_jax.training.divergence import Diverged
from transformer_jax.training.lock import InUse


@pytest.fixture
def setting(tmp_path):
    write_corpus(tmp_path / "data" / "corpus")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.py").write_text(RECIPE)
    return Setting(
        seed=3,
        workdir=tmp_path / "work",
        runs=tmp_path / "runs",
        data=tmp_path / "data",
        recipes=tmp_path / "recipes",
    )


def stored(setting):
    (path,) = setting.runs.glob("small-*/*/config.json")
    return json.loads(path.read_text())


def test_a_recipe_is_trained_with_the_keys_and_the_seed(setting):
    condition = Trained("small.py:norm=pre", {"training.steps": 2}, data="corpus")
    measured = condition(setting)
    assert measured["loss"] > 0
    assert 0 <= measured["bleu"] <= 100
    assert "step" not in measured
    config = stored(setting)
    assert config["training"]["steps"] == 2
    assert config["training"]["seed"] == 3
    assert config["model"]["norm"] == "pre"
    assert config["data"]["directory"] == str(setting.data / "corpus")


def test_a_quick_run_is_small_whatever_the_condition_says(setting):
    condition = Trained(
        "small.py", {"training.steps": 50, "model.d_ff": 512}, data="corpus"
    )
    condition(setting._replace(quick=True))
    config = stored(setting)
    assert config["training"]["steps"] == 4
    assert config["model"]["d_ff"] < 512


def test_the_score_is_a_function_of_the_trained_model(setting):
    def layers(predictor, given):
        assert given == setting
        return {"layers": float(predictor.config.model.num_encoder_layers)}

    assert Trained("small.py", data="corpus", score=layers)(setting) == {"layers": 1.0}


def test_a_run_that_diverges_measures_what_the_condition_says(setting):
    keys = {"optimizer.learning_rate": 1e30, "optimizer.schedule": "constant"}
    measured = {"loss": 9.0, "bleu": 0.0}
    condition = Trained("small.py", keys, data="corpus", diverged=measured)
    assert condition(setting) == measured
    with pytest.raises(Diverged):
        Trained("small.py", keys, data="corpus")(setting)


def test_a_key_that_does_not_exist(setting):
    with pytest.raises(ConfigError, match=r"model\.width"):
        Trained("small.py", {"model.width": 3}, data="corpus")(setting)


def test_the_design_names_recipe_keys_and_score():
    design = Trained("dates.py:additive", {"model.d_model": 32}).design
    assert design["recipe"] == "dates.py:additive"
    assert design["keys"] == {"model.d_model": "32"}
    assert design["score"].endswith("trained.validation_scores")
    assert json.loads(json.dumps(design)) == design
    assert (ROOT / "configs" / "dates.py").exists()


def test_conditions_that_differ_in_their_score_share_a_training(setting):
    trained = Trained("small.py", data="corpus")
    workdir = trained.train(setting)
    before = (workdir / "metrics.jsonl").read_bytes()
    other = Trained("small.py", data="corpus", score=lambda *_: {"one": 1.0})
    assert other.train(setting) == workdir
    assert other(setting) == {"one": 1.0}
    assert (workdir / "metrics.jsonl").read_bytes() == before
    for condition in (
        Trained("small.py", {"training.steps": 2}, data="corpus"),
        Trained("small.py", data="corpus", start=trained),
    ):
        assert condition.train(setting) != workdir


def test_overrides_act_on_the_score_and_not_on_the_training(setting):
    def beams(predictor, given):
        return {"beams": float(predictor.config.decoding.beam_size)}

    keys = {"training.steps": 2}
    first = Trained("small.py", keys, data="corpus", score=beams)
    wide = dataclasses.replace(first, overrides={"decoding.beam_size": 3})
    assert wide(setting) == {"beams": 3.0}
    assert first(setting) != wide(setting)
    assert first.train(setting) == wide.train(setting)
    assert wide.design == {**first.design, "overrides": {"decoding.beam_size": "3"}}


def test_a_training_starts_from_another_one(setting):
    first = Trained("small.py", {"training.steps": 2}, data="corpus")
    keys = {"training.steps": 2, "optimizer.learning_rate": 1e-30}
    second = Trained("small.py", keys, data="corpus", start=first)
    of_first = transformer_jax.load(first.train(setting))
    of_second = transformer_jax.load(second.train(setting))
    assert of_second.parameters_sha256 == of_first.parameters_sha256


def test_a_training_of_another_process_is_waited_for(setting, monkeypatch):
    runs = []

    def busy_once(config, workdir):
        runs.append(workdir)
        if len(runs) == 1:
            raise InUse("another process trains there")
        workdir.mkdir(parents=True)

    monkeypatch.setattr(experiment, "run", busy_once)
    monkeypatch.setattr(trained_module, "POLL", 0.0)
    workdir = Trained("small.py", data="corpus").train(setting)
    assert runs == [workdir, workdir]


def test_a_config_and_data_of_functions(setting):
    def written(given):
        folder = given.runs / "data"
        write_corpus(folder)
        return folder

    def recipe():
        return load_recipe(str(setting.recipes / "small.py"))

    condition = Trained(functools.partial(recipe), {"training.steps": 1}, data=written)
    config = condition.config(setting)
    assert condition.train(setting).parent.name.startswith("recipe-")
    assert config.data.directory == str(setting.runs / "data")
    assert condition.design["recipe"].endswith("recipe()")
    assert condition.design["data"].endswith("written")


def test_the_design_names_the_arguments_of_a_score():
    score = functools.partial(scores_of, split="val")
    design = Trained("dates.py", score=score).design
    assert design["score"].endswith("trained.scores_of(split='val')")
