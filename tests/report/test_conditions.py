"""The picture of a claim's conditions."""

import math

import pytest

from transformer_jax.errors import UserError
from transformer_jax.report.conditions import draw_conditions

pytest.importorskip("matplotlib", reason="matplotlib: pip install -e '.[plots]'")


def test_a_picture_names_measurements_and_conditions(tmp_path):
    values = {
        "loss": {"pre-LN": [1.0, 1.2], "post-LN": [3.0, math.inf]},
        "bleu": {"pre-LN": [30.0, 31.0], "post-LN": []},
    }
    draw_conditions(tmp_path / "a.svg", values)
    text = (tmp_path / "a.svg").read_text()
    for words in ("loss", "bleu", "pre-LN", "post-LN"):
        assert f">{words}</text>" in text


def test_more_than_two_panels_take_several_rows(tmp_path):
    values = {measure: {"pre-LN": [1.0]} for measure in ("loss", "bleu", "chrf")}
    draw_conditions(tmp_path / "a.svg", values)
    text = (tmp_path / "a.svg").read_text()
    # on the left of each row
    assert text.count(">pre-LN</text>") == 2


def test_conditions_without_a_value_have_no_row(tmp_path):
    values = {
        "loss": {"pre-LN": [1.0], "post-LN": [math.nan], "none": []},
        "bleu": {"pre-LN": [30.0], "post-LN": [], "none": [29.0]},
    }
    draw_conditions(tmp_path / "a.svg", values)
    text = (tmp_path / "a.svg").read_text()
    counts = [text.count(f">{name}</text>") for name in ("pre-LN", "post-LN", "none")]
    assert counts == [2, 1, 1]


def test_the_same_values_give_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_conditions(tmp_path / name, {"loss": {"a": [1.0, 2.0]}})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_an_unknown_kind_of_picture(tmp_path):
    with pytest.raises(UserError, match="must end in one of"):
        draw_conditions(tmp_path / "a.txt", {"loss": {"a": [1.0]}})
