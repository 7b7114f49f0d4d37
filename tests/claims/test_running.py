"""Conditions run once each, also after a stop, and in several processes."""

import gc
import json
import math
import subprocess
import sys
import time
import weakref

import jax
import pytest

from transformer_jax.claims.claim import Claim, Computed, Expected, Setting
from transformer_jax.claims.running import (
    folder_name,
    measure,
    measure_all,
    measure_apart,
    measured,
    settings_of,
)
from transformer_jax.errors import UserError


@pytest.fixture
def calls():
    return []


@pytest.fixture
def claim(calls):
    def condition(name, design=None):
        def function(seed, quick):
            calls.append((name, seed, quick))
            return {"x": len(name) + seed / 10, "y": math.inf}

        return Computed(function, design or {"name": name})

    conditions = {"one": condition("one"), "three": condition("three")}
    return Claim(
        "Longer names are larger",
        "nobody",
        conditions,
        (Expected("x", "three", minus="one", least=0),),
        "nothing",
    )


def tasks_of(claim, folder, seeds):
    given = Setting(0, folder, runs=folder, data=folder, recipes=folder)
    return settings_of(claim, folder, seeds, given)


def never(*arguments):
    raise AssertionError("no process is needed")


def test_each_condition_runs_once_with_each_seed(claim, calls, tmp_path):
    tasks = tasks_of(claim, tmp_path, range(2))
    found = measure_all(claim, tasks, never, jobs=1)
    expected = [("one", 0, False), ("three", 0, False), ("one", 1, False)]
    assert calls == [*expected, ("three", 1, False)]
    assert [run.values["x"] for run in found["three"]] == [5.0, 5.1]
    calls.clear()
    again = measure_all(claim, tasks, never, jobs=1)
    assert calls == []
    assert again == found
    more = measure_all(claim, tasks_of(claim, tmp_path, range(3)), never, jobs=1)
    assert calls == [("one", 2, False), ("three", 2, False)]
    assert len(more["one"]) == 3


def test_programs_of_a_run_do_not_outlive_it(tmp_path):
    alive = []

    class Engine:
        def __init__(self):
            self.step = jax.jit(self.run_step)  # a reference cycle

        def run_step(self, x):
            return x + 1

    def function(seed, quick):
        engine = Engine()
        alive.append(weakref.ref(engine))
        return {"x": float(engine.step(seed))}

    steps = {"steps": Computed(function, {})}
    rules = (Expected("x", "steps", least=0),)
    claim = Claim("Steps count", "nobody", steps, rules, "nothing")
    gc.disable()
    try:
        measure_all(claim, tasks_of(claim, tmp_path, range(2)), never, jobs=1)
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


def test_values_that_are_not_finite_are_kept(claim, tmp_path):
    (task, *_) = tasks_of(claim, tmp_path, range(1))
    measure(claim, *task)
    found = measured(claim, *task)
    assert found is not None
    assert found.values["y"] == math.inf
    json.loads((tmp_path / "one" / "0" / "result.json").read_text())


def test_a_result_of_another_design_is_refused(claim, tmp_path):
    (task, *_) = tasks_of(claim, tmp_path, range(1))
    measure(claim, *task)
    condition, setting = task
    message = r"result.json was measured with .*false.* name another --workdir"
    with pytest.raises(UserError, match=message):
        measured(claim, condition, setting._replace(quick=True))


def test_a_damaged_result_is_named(claim, tmp_path):
    (task, *_) = tasks_of(claim, tmp_path, range(1))
    measure(claim, *task)
    path = tmp_path / "one" / "0" / "result.json"
    path.write_text(path.read_text()[:20])
    with pytest.raises(UserError, match=r"result.json is not a JSON object"):
        measured(claim, *task)


def test_a_condition_that_measures_something_else(claim, tmp_path):
    conditions = dict(claim.conditions)
    conditions["three"] = Computed(lambda seed, quick: {"z": 1.0})
    other = Claim("S", "nobody", conditions, claim.expected, "nothing")
    task = tasks_of(other, tmp_path, range(1))[1]
    with pytest.raises(UserError, match="'three' measured z, and not x"):
        measure(other, *task)
    assert not (tmp_path / "three" / "0" / "result.json").exists()


def test_conditions_whose_names_are_the_same_folder(claim, tmp_path):
    conditions = {"a, b": claim.conditions["one"], "a b": claim.conditions["one"]}
    rule = Expected("x", "a b", least=0)
    other = Claim("S", "nobody", conditions, (rule,), "nothing")
    with pytest.raises(UserError, match="a, b, a b share a folder"):
        tasks_of(other, tmp_path, range(1))


def test_names_of_folders():
    assert folder_name("d_k = 4, scaled") == "d_k-4-scaled"
    assert "/" not in folder_name("../up/and away")


def process(code):
    """Return a function that starts a process with this code and the arguments."""

    def start(condition, seed, output):
        command = [sys.executable, "-c", code, condition, str(seed)]
        return subprocess.Popen(command, stdout=output, stderr=output)

    return start


def test_several_processes_at_a_time(claim, tmp_path):
    tasks = tasks_of(claim, tmp_path, range(2))
    start = process("import sys; print(*sys.argv[1:])")
    measure_apart(tasks, start, jobs=2)
    for condition in claim.conditions:
        for seed in "01":
            log = (tmp_path / condition / seed / "log.txt").read_text()
            assert log == f"{condition} {seed}\n"


def test_a_process_that_fails_stops_the_others(claim, tmp_path):
    tasks = tasks_of(claim, tmp_path, range(2))
    code = "import sys, time; time.sleep(60 * (sys.argv[1] == 'three')); sys.exit(3)"
    begin = time.monotonic()
    message = r"one, seed 0, ended with exit code 3: .*log.txt says why"
    with pytest.raises(UserError, match=message):
        measure_apart(tasks, process(code), jobs=2)
    assert time.monotonic() - begin < 30


def test_only_open_conditions_get_a_process(claim, tmp_path):
    tasks = tasks_of(claim, tmp_path, range(1))
    measure(claim, *tasks[0])
    started = []

    def start(condition, seed, output):
        started.append(condition)
        return process("")(condition, seed, output)

    measure_all(claim, tasks, start, jobs=2)
    assert started == ["three"]
