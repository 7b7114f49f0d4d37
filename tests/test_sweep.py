"""Sweeps: grids that are read or refused, runs that are kept, and the table."""

import json
import math
import types

import pytest

from helpers.runs import rows, small
from transformer_jax import sweep
from transformer_jax.claims import running
from transformer_jax.config import share
from transformer_jax.errors import UserError
from transformer_jax.training.divergence import Diverged
from transformer_jax.workdir import read

RATES = "optimizer.learning_rate=1e-3,3e-4;training.seed=0,1"


@pytest.fixture
def tiny(corpus):
    return small("classification", corpus)


def test_values_have_the_types_of_their_keys(tiny):
    assert sweep.parse_grid(
        " optimizer.learning_rate = 1, 1e-4; training.seed=7;"
        "data.labels=('a','b'),('c','d')",
        tiny,
    ) == {
        "optimizer.learning_rate": [1.0, 1e-4],
        "training.seed": [7],
        "data.labels": [("a", "b"), ("c", "d")],
    }


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ("", "--grid is empty: name keys and their values"),
        ("optimizer.learning_rate", "'optimizer.learning_rate' is not KEY=VALUE,VALUE"),
        ("=1", "'=1' is not KEY=VALUE,VALUE"),
        ("optimizer.rate=1", "config.optimizer.rate is not a key"),
        ("learning_rate=1", "did you mean optimizer.learning_rate"),
        ("optimizer=1", "config.optimizer is a section"),
        ("training.seed=", "training.seed has an empty value"),
        ("training.seed=1,,2", "training.seed has an empty value"),
        ("training.seed=0.5", "config.training.seed = '0.5': must be of type int"),
        ("training.seed=1;training.seed=2", "--grid has training.seed twice"),
        ("optimizer.learning_rate=1e-3,0.001", "learning_rate = 0.001 twice"),
        ("training.microbatches=3", "--grid, microbatches-3: config.training.micro"),
        ("training.seed=0,-1", "config.training.seed = -1: must be in"),
        ("data.directory=/none", "config.data.directory = '/none': there is no such"),
    ],
)
def test_grids_that_are_refused(tiny, tmp_path, grid, words):
    with pytest.raises(UserError) as refused:
        sweep.make_sweep(tiny, grid, tmp_path / "sweep")
    assert words in str(refused.value)
    assert not (tmp_path / "sweep").exists()


def test_runs_have_readable_names(tiny, tmp_path):
    made = sweep.make_sweep(tiny, RATES, tmp_path)
    assert [run.name for run in made.runs] == [
        "learning_rate-0.001_seed-0",
        "learning_rate-0.0003_seed-0",
        "learning_rate-0.001_seed-1",
        "learning_rate-0.0003_seed-1",
    ]
    assert sweep.single(made.runs, made.runs[2].name) == made.runs[2]
    with pytest.raises(UserError, match="--run=x: choose one of learning_rate"):
        sweep.single(made.runs, "x")
    (run,) = sweep.make_sweep(tiny, "training.seed=3", tmp_path).runs
    assert run.name == "seed-3"
    wide = sweep.make_sweep(tiny, "optimizer.learning_rate=1e20,1e-20", tmp_path)
    assert [run.name for run in wide.runs] == [
        "learning_rate-1e20_seed-0",
        "learning_rate-1e-20_seed-0",
    ]
    alike = "data.max_length=16,24;model.max_length=24,32"
    (first, *_) = sweep.make_sweep(tiny, alike, tmp_path).runs
    assert first.name == "data.max_length-16_model.max_length-24_seed-0"


def test_keys_that_follow_the_steps_do_so_in_each_run(tiny):
    tiny.optimizer.warmup_steps = share(tiny, 2)
    changed = sweep.with_choices(tiny, {"training.steps": 100})
    assert (changed.optimizer.warmup_steps, tiny.optimizer.warmup_steps) == (50, 2)


@pytest.fixture
def trained(monkeypatch):
    """Replace training. Return the folders that were trained."""
    folders = []

    def run(config, workdir):
        folders.append(workdir.name)
        rate = config.optimizer.learning_rate
        if rate == 1 and config.training.seed == 1:
            raise Diverged("the loss is not finite")
        loss = rate + config.training.seed
        task = types.SimpleNamespace(config=config)
        return types.SimpleNamespace(task=task, scores={"loss": loss, "examples": 9})

    monkeypatch.setattr(sweep.experiment, "run", run)
    return folders


def measured(made):
    return running.measure_all(made.claim, made.tasks, None, 1)


def test_a_run_that_diverges_has_a_row_and_the_others_go_on(tiny, tmp_path, trained):
    grid = "optimizer.learning_rate=1,2,3;training.seed=0,1"
    made = sweep.make_sweep(tiny, grid, tmp_path)
    found = measured(made)
    assert len(trained) == 6
    assert sweep.as_text(made, found).splitlines() == [
        "| optimizer.learning_rate | seeds | diverged | loss | best loss |",
        "|---|---|---|---|---|",
        "| 1.0 | 2 | 1 | 1 |  |",
        "| 2.0 | 2 | 0 | 2.5 ± 0.71 | * |",
        "| 3.0 | 2 | 0 | 3.5 ± 0.71 |  |",
    ]
    result = sweep.to_json(made, found)
    json.dumps(result, allow_nan=False)
    assert result["best"] == "learning_rate-2.0"
    assert result["conditions"]["learning_rate-1.0"]["runs"][1]["loss"] == "nan"


def test_nothing_is_the_best_if_all_runs_diverge(tiny, tmp_path, trained):
    made = sweep.make_sweep(tiny, "optimizer.learning_rate=1;training.seed=1", tmp_path)
    found = measured(made)
    assert math.isnan(found["learning_rate-1.0"][0].values["loss"])
    assert sweep.best(made, found) is None
    assert "| 1.0 | 1 | 1 | – |" in sweep.as_text(made, found)


def test_finished_runs_are_kept_and_others_are_added(tiny, tmp_path, trained):
    measured(sweep.make_sweep(tiny, RATES, tmp_path))
    made = sweep.make_sweep(tiny, RATES.replace("0,1", "0,1,2"), tmp_path)
    assert made.open_runs() == [4, 5]
    measured(made)
    assert len(trained) == 6
    # more steps: each run goes on
    tiny.training.steps = 6
    made = sweep.make_sweep(tiny, RATES, tmp_path)
    assert made.open_runs() == [0, 1, 2, 3]


def test_a_run_is_an_ordinary_workdir(tiny, tmp_path):
    made = sweep.make_sweep(tiny, "training.seed=5", tmp_path)
    (found,) = measured(made)["recipe"]
    workdir = tmp_path / "seed-5"
    assert read(workdir).training.seed == 5
    (last,) = (
        row for row in rows(workdir) if (row["step"], row["split"]) == (4, "val")
    )
    assert found.values["loss"] == last["loss"]
    assert found.values.keys() <= last.keys()
