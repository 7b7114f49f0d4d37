"""The option --quick: its patterns have files, and its trainings cover the tasks."""

from fnmatch import fnmatch

import pytest
import quick
from conftest import get_config

from transformer_jax.tasks import TASKS

FILES = [
    str(path.relative_to(quick.FOLDER)) for path in quick.FOLDER.rglob("test_*.py")
]


@pytest.mark.parametrize("pattern", [*quick.CHOSEN, *quick.LEFT_OUT, quick.TRAININGS])
def test_every_pattern_has_a_file(pattern):
    assert any(fnmatch(file, pattern) for file in FILES)


@pytest.mark.parametrize("task", TASKS)
def test_the_training_of_a_task_is_one_of_it(task):
    name, _, argument = quick.TRAINED[task].partition("-")
    assert get_config(name, argument).task == task


def test_what_is_run_is_not_said_to_be_left_out():
    assert {"test_losses.py", quick.TRAININGS}.isdisjoint(quick.left_out())
    assert "test_docs.py" in quick.left_out()
