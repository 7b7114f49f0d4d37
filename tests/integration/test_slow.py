"""What is left to `pytest -m slow`: the names on its list are those of tests."""

import pytest

from helpers import slow
from helpers.runs import get_config

LISTED = [*slow.TWO_CASES, *slow.LONG, *slow.SAME_CODE, *slow.TRAINED_ELSEWHERE]


@pytest.mark.parametrize("test", LISTED)
def test_every_name_is_that_of_a_test(test):
    file, name = test.partition("[")[0].split("::")
    assert f"def {name}(" in (slow.FOLDER / file).read_text()


@pytest.mark.parametrize("case", slow.TRAINED_ELSEWHERE)
def test_every_recipe_exists(case):
    name, _, argument = case.partition("[")[2].rstrip("]").partition("-")
    assert get_config(name, argument)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (slow.TWO_CASES[0], {"test_it[b]"}),
        ("test_file.py::test_it", {"test_it[a]"}),
        ("test_whole.py::test_it", {"test_it[a]", "test_it[b]", "test_it[c]"}),
        ("test_other.py::test_it", set()),
    ],
)
def test_which_cases_are_slow(test, expected):
    cases = [f"test_it[{case}]" for case in "abc"]
    listed = {"test_file.py::test_it[a]", "test_whole.py::test_it"}
    assert slow.slow_cases(test, cases, listed) == expected
