"""The option --quick: its patterns have files, and its trainings cover the tasks."""

from fnmatch import fnmatch

import pytest

from helpers import quick
from helpers.runs import get_config
from helpers.slow import FOLDER
from transformer_jax.tasks import TASKS

FILES = [str(path.relative_to(FOLDER)) for path in FOLDER.rglob("test_*.py")]


@pytest.mark.parametrize("pattern", [*quick.CHOSEN, *quick.LEFT_OUT, quick.TRAININGS])
def test_every_pattern_has_a_file(pattern):
    assert any(fnmatch(file, pattern) for file in FILES)


@pytest.mark.parametrize("test", quick.LEFT_OUT_TESTS)
def test_every_test_that_is_not_run_whole_is_one_of_a_chosen_file(test):
    file, name = test.split("::")
    assert quick.is_chosen(file)
    assert f"def {name}(" in (FOLDER / file).read_text()


@pytest.mark.parametrize(
    ("test", "run"),
    [
        (quick.LEFT_OUT_TESTS[0], []),
        ("test_metrics.py::test_bleu", ["a", "b", "c"]),
    ],
)
def test_cases_that_are_run(test, run):
    assert quick.cases_to_run(test, ["a", "b", "c"]) == run


@pytest.mark.parametrize("task", TASKS)
def test_the_training_of_a_task_is_one_of_it(task):
    name, _, argument = quick.TRAINED[task].partition("-")
    assert get_config(name, argument).task == task


def test_what_is_run_is_not_said_to_be_left_out():
    assert {"test_losses.py", quick.TRAININGS}.isdisjoint(quick.left_out())
    assert "integration/test_docs.py" in quick.left_out()
