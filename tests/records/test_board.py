"""The result of an entry as text, as a row, and as JSON."""

import json
import math

import pytest
from ml_collections import ConfigDict

from transformer_jax.records.board import Result, as_text, row, shown, to_json
from transformer_jax.records.record import Record, Rule

RECORD = Record(
    title="the least minutes",
    measure="minutes",
    better="lower",
    rules=(Rule("loss", most=1.5),),
    fixed={},
    processors=2,
    data="",
    recipe="none.py",
    keys={},
    measured=lambda finished: {},
    cost="nothing",
)


def result(minutes, losses=(1.0, 1.2, 1.4)):
    runs = [
        {"minutes": x, "loss": loss, "processors": 2.0}
        for x, loss in zip(minutes, losses, strict=True)
    ]
    config = ConfigDict(
        {"data": {"directory": "d"}, "training": {"seed": 0, "steps": 7}}
    )
    return Result("record:x", RECORD, "none.py --config.a=1", config, runs)


def test_a_valid_entry(tmp_path):
    found = result([9.0, 10.0, 14.0])
    assert found.mean == 11
    assert found.deviation == pytest.approx(math.sqrt(7))
    text = as_text(found, tmp_path)
    assert text.splitlines()[:3] == [
        "record:x: the least minutes",
        "",
        "minutes: 11 ± 2.6 (lower is better), 3 seeds; the entry is **valid**",
    ]
    assert "| 2 | 14 | 1.4 | 2 |" in text
    start = "| 11 ± 2.6 | 9, 10, 14 | `none.py --config.a=1` | – |"
    assert row(found, tmp_path).startswith(start)
    values = json.loads(json.dumps(to_json(found, tmp_path), allow_nan=False))
    assert values["problems"] == []
    assert values["mean"] == 11
    assert values["config"] == {"data": {}, "training": {"steps": 7}}
    assert values["rules"] == ["loss ≤ 1.5"]
    assert {"commit", "versions", "processor"} < set(values)


def test_an_entry_that_breaks_a_rule(tmp_path):
    found = result([9.0, 10.0, math.inf], losses=(1.0, 1.2, 1.6))
    text = as_text(found, tmp_path)
    assert "the entry is **not valid (not loss ≤ 1.5: 1.6)**" in text
    values = to_json(found, tmp_path)
    assert values["problems"] == ["not loss ≤ 1.5: 1.6"]
    assert (values["mean"], values["deviation"]) == ("inf", "nan")
    one = as_text(result([9.0], losses=(1.0,)), tmp_path)
    assert "9 ± 0 (lower is better), 1 seed; the entry is **not valid (1 of" in one


@pytest.mark.parametrize(
    ("value", "text"),
    [(38.0048, "38"), (1006656.0, "1,006,656"), (0.99999, "1"), (math.inf, "inf")],
)
def test_numbers(value, text):
    assert shown(value) == text
