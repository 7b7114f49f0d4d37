"""Rules of records, what they fix, and what is measured from the rows of a run."""

import json
import math
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from transformer_jax.errors import UserError
from transformer_jax.records.record import (
    Finished,
    Record,
    Rule,
    first_time,
    lowest,
    number_of_parameters,
    total_time,
)


def record(**changes):
    values = {
        "title": "the least x",
        "measure": "x",
        "better": "lower",
        "rules": (Rule("x", most=2.0),),
        "fixed": {"data.name": "a", "vectors.file": ""},
        "processors": 1,
        "data": "",
        "recipe": "none.py",
        "keys": {},
        "measured": lambda finished: {"x": 1.0},
        "cost": "nothing",
    }
    return Record(**values | changes)


@pytest.mark.parametrize(
    ("rule", "kept", "broken", "words"),
    [
        (Rule("x", most=2), (2.0, -math.inf), (2.1, math.inf, math.nan), "x ≤ 2"),
        (Rule("x", least=0.99), (0.99, 1.0), (0.98, math.nan), "x ≥ 0.99"),
        (Rule("x", 1, 2), (1.0, 2.0), (0.9, 2.1), "x ≥ 1 and x ≤ 2"),
    ],
)
def test_a_rule(rule, kept, broken, words):
    assert rule.words == words
    assert all(rule.is_kept({"x": value}) for value in kept)
    assert not any(rule.is_kept({"x": value}) for value in broken)


def test_a_rule_that_cannot_be_broken():
    with pytest.raises(UserError, match="about x cannot be broken: set `least`"):
        Rule("x")


def run(x, processors=1.0):
    return {"x": x, "processors": processors}


def test_an_entry_keeps_all_rules_with_each_seed():
    assert record().broken([run(1.0), run(2.0), run(0.0)]) == []
    assert record().broken([run(1.0), run(2.5), run(math.inf)]) == [
        "not x ≤ 2: 2.5, inf"
    ]
    assert record().broken([run(1.0)]) == ["1 of at least 3 seeds"]
    many = record().broken([run(1.0), run(1.0, processors=2.0), run(1.0)])
    assert many == ["not processors ≤ 1: 2"]


def test_what_is_fixed_may_not_change():
    config = ConfigDict({"init_from": "", "data": {"name": "a", "size": 3}})
    record().check(config)  # without the section `vectors`
    config.data.name = "b"
    config.init_from = "runs/large"
    config.vectors = {"other": 1}
    with pytest.raises(UserError) as raised:
        record().check(config)
    assert str(raised.value).splitlines() == [
        "config.init_from = 'runs/large': must be '' in this record",
        "config.data.name = 'b': must be 'a' in this record",
        "config.vectors.file = '(missing)': must be '' in this record",
    ]


@pytest.fixture
def finished(tmp_path):
    rows = [
        {"step": 2, "split": "train", "loss": 1.0},
        {"step": 2, "split": "val", "loss": 1.6},
        {"step": 4, "split": "val", "loss": 1.46},
        {"step": 6, "split": "val", "loss": 1.44},
        {"step": 8, "split": "val", "loss": None},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    seconds = {(row["step"], row["split"]): 30.0 * row["step"] for row in rows}
    config = SimpleNamespace(data=SimpleNamespace(validation_split="val"))
    return Finished(SimpleNamespace(config=config), tmp_path, seconds, None)


def test_times_are_those_of_rows(finished):
    assert first_time(finished, "loss", most=1.47) == 2.0
    assert first_time(finished, "loss", most=1.6) == 1.0
    assert first_time(finished, "loss", most=1.4) == math.inf
    assert first_time(finished, "bleu", most=1.4) == math.inf
    assert lowest(finished, "loss") == 1.44
    assert math.isnan(lowest(finished, "bleu"))
    assert total_time(finished) == 4.0
    assert math.isnan(total_time(finished._replace(seconds={})))


def test_parameters_are_counted():
    from numpy import ones

    params = {"a": ones((3, 5)), "b": {"c": ones(7)}}
    assert number_of_parameters(SimpleNamespace(params=params)) == 22
