"""Conditions that train a recipe."""

import json

import pytest

from helpers import ROOT
from helpers.corpus import write_corpus
from helpers.runs import RECIPE
from transformer_jax.claims.claim import Setting
from transformer_jax.claims.trained import Trained
from transformer_jax.config import ConfigError
from transformer_jax.training.divergence import Diverged


@pytest.fixture
def setting(tmp_path):
    write_corpus(tmp_path / "data" / "corpus")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.py").write_text(RECIPE)
    return Setting(
        seed=3,
        workdir=tmp_path / "work",
        data=tmp_path / "data",
        recipes=tmp_path / "recipes",
    )


def stored(setting):
    return json.loads((setting.workdir / "run" / "config.json").read_text())


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
