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
from transformer_jax.config import ConfigError, load_recipe, make_task, parse
from transformer_jax.training.divergence import Diverged
from transformer_jax.training.lock import InUse


def setting_in(folder):
    write_corpus(folder / "data" / "corpus")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "small.py").write_text(RECIPE)
    return Setting(
        seed=3,
        workdir=folder / "work",
        runs=folder / "runs",
        data=folder / "data",
        recipes=folder / "recipes",
    )


@pytest.fixture
def setting(tmp_path):
    return setting_in(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A setting whose trainings are those of several tests."""
    return setting_in(tmp_path_factory.mktemp("shared"))


def pretend(monkeypatch):
    """Replace training: it only makes its folder. Return the list of the configs that
    are given to it.
    """
    configs = []

    def run(config, workdir):
        configs.append(config)
        workdir.mkdir(parents=True)

    monkeypatch.setattr(experiment, "run", run)
    return configs


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


def test_a_quick_run_is_small_whatever_the_condition_says(setting, monkeypatch):
    """tests/integration/test_claims.py trains some."""
    configs = pretend(monkeypatch)
    condition = Trained(
        "small.py", {"training.steps": 50, "model.d_ff": 512}, data="corpus"
    )
    condition.train(setting._replace(quick=True))
    (config,) = configs
    assert config.training.steps == 4
    assert config.model.d_ff < 512


@pytest.mark.usefixtures("without_search")
def test_the_score_is_a_function_of_the_trained_model(shared):
    def layers(predictor, given):
        assert given == shared
        return {"layers": float(predictor.config.model.num_encoder_layers)}

    assert Trained("small.py", data="corpus", score=layers)(shared) == {"layers": 1.0}


@pytest.mark.usefixtures("without_search")
def test_a_run_that_diverges_measures_what_the_condition_says(setting, monkeypatch):
    keys = {"optimizer.learning_rate": 1e30, "optimizer.schedule": "constant"}
    measured = {"loss": 9.0, "bleu": 0.0}
    condition = Trained("small.py", keys, data="corpus", diverged=measured)
    assert condition(setting) == measured

    def diverge(config, workdir):
        raise Diverged("the loss is not finite")

    monkeypatch.setattr(experiment, "run", diverge)
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


@pytest.mark.usefixtures("without_search")
def test_conditions_that_differ_in_their_score_share_a_training(shared, monkeypatch):
    trained = Trained("small.py", data="corpus")
    workdir = trained.train(shared)
    before = (workdir / "metrics.jsonl").read_bytes()
    other = Trained("small.py", data="corpus", score=lambda *_: {"one": 1.0})
    assert other.train(shared) == workdir
    assert other(shared) == {"one": 1.0}
    assert (workdir / "metrics.jsonl").read_bytes() == before
    pretend(monkeypatch)
    for condition in (
        Trained("small.py", {"training.steps": 3}, data="corpus"),
        Trained("small.py", data="corpus", start=trained),
    ):
        assert condition.train(shared) != workdir


@pytest.mark.usefixtures("without_search")
def test_overrides_act_on_the_score_and_not_on_the_training(shared):
    def beams(predictor, given):
        return {"beams": float(predictor.config.decoding.beam_size)}

    keys = {"training.steps": 2}
    first = Trained("small.py", keys, data="corpus", score=beams)
    wide = dataclasses.replace(first, overrides={"decoding.beam_size": 3})
    assert wide(shared) == {"beams": 3.0}
    assert first(shared) != wide(shared)
    assert first.train(shared) == wide.train(shared)
    assert wide.design == {**first.design, "overrides": {"decoding.beam_size": "3"}}


@pytest.mark.usefixtures("without_search")
def test_a_training_starts_from_another_one(shared):
    first = Trained("small.py", {"training.steps": 2}, data="corpus")
    keys = {"training.steps": 2, "optimizer.learning_rate": 1e-30}
    second = Trained("small.py", keys, data="corpus", start=first)
    of_first = transformer_jax.load(first.train(shared))
    of_second = transformer_jax.load(second.train(shared))
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


def test_a_config_and_data_of_functions(setting, monkeypatch):
    def written(given):
        folder = given.runs / "data"
        write_corpus(folder)
        return folder

    def recipe():
        return load_recipe(str(setting.recipes / "small.py"))

    condition = Trained(functools.partial(recipe), {"training.steps": 1}, data=written)
    configs = pretend(monkeypatch)
    assert condition.train(setting).parent.name.startswith("recipe-")
    (config,) = configs
    assert config.data.directory == str(setting.runs / "data")
    make_task(parse(config), setting.workdir)
    assert condition.design["recipe"].endswith("recipe()")
    assert condition.design["data"].endswith("written")


def test_the_design_names_the_arguments_of_a_score():
    score = functools.partial(scores_of, split="val")
    design = Trained("dates.py", score=score).design
    assert design["score"].endswith("trained.scores_of(split='val')")
