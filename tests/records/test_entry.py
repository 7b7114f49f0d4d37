"""Entries of records are trained, timed and measured, and go on after a stop."""

import json

import pytest

from helpers.corpus import write_corpus
from helpers.runs import RECIPE
from transformer_jax.claims.claim import Setting
from transformer_jax.claims.running import measure_all, settings_of
from transformer_jax.config import load_recipe
from transformer_jax.errors import UserError
from transformer_jax.records.entry import (
    CONDITION,
    Clock,
    as_claim,
    processors,
    without_places,
)
from transformer_jax.records.record import Record, Rule, total_time


def measured(finished):
    return {
        "loss": finished.predictor.evaluate("val")["loss"],
        "minutes": total_time(finished),
    }


RECORD = Record(
    title="the least loss",
    measure="loss",
    better="lower",
    rules=(Rule("minutes", most=1),),
    fixed={"data.source": "files"},
    processors=1,
    data="corpus",
    recipe="small.py",
    keys={},
    measured=measured,
    cost="nothing",
)


@pytest.fixture
def config(tmp_path):
    write_corpus(tmp_path / "data" / "corpus")
    (tmp_path / "small.py").write_text(RECIPE)
    config = load_recipe(str(tmp_path / "small.py"))
    config.training.steps = 2
    return config


def tasks_of(claim, folder):
    given = Setting(0, folder, folder / "runs", folder / "data", folder)
    return settings_of(claim, folder / "work", [4], given)


def test_an_entry_is_trained_and_measured_once(config, tmp_path):
    claim = as_claim(RECORD, config)
    tasks = tasks_of(claim, tmp_path)
    found = measure_all(claim, tasks, None, jobs=1)
    ((_, setting),) = tasks
    values = found[CONDITION][0].values
    assert set(values) == {"loss", "minutes", "processors"}
    assert values["processors"] == processors() >= 1
    rows = (setting.workdir / "clock.jsonl").read_text().splitlines()
    assert values["minutes"] == json.loads(rows[-1])["seconds"] / 60 > 0
    stored = json.loads((setting.workdir / "run" / "config.json").read_text())
    assert stored["training"]["seed"] == 4
    assert stored["training"]["steps"] == 2
    assert stored["data"]["directory"] == str(tmp_path / "data" / "corpus")
    assert measure_all(claim, tasks, None, jobs=1) == found

    config.optimizer.learning_rate = 0.5
    with pytest.raises(UserError, match="name another --workdir"):
        measure_all(as_claim(RECORD, config), tasks, None, jobs=1)


def test_an_entry_that_changes_what_is_fixed(config):
    config.data.source = "tfds"
    with pytest.raises(UserError, match=r"data.source = 'tfds': must be 'files'"):
        as_claim(RECORD, config)


def test_an_entry_is_its_config_apart_from_folder_and_seed(config):
    values = without_places(config)
    assert "directory" not in values["data"]
    assert "seed" not in values["training"]
    config.training.seed = 3
    config.data.directory = "elsewhere"
    assert without_places(config) == values
    config.training.steps = 3
    assert without_places(config) != values


def test_the_time_goes_on_after_a_stop(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(tmp_path / "clock.jsonl")
    assert clock.seconds == {}
    now[0] += 5
    clock(10, "train", {"loss": 1.0})
    now[0] += 2
    clock(10, "val", {"loss": 1.0})

    now[0] = 4000.0  # an hour later, step 10 is repeated
    clock = Clock(tmp_path / "clock.jsonl")
    now[0] += 3
    clock(10, "train", {"loss": 1.0})
    assert clock.seconds == {(10, "train"): 10.0, (10, "val"): 7.0}
    assert Clock(tmp_path / "clock.jsonl").seconds == clock.seconds
