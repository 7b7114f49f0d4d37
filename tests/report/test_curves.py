"""Comparison of runs: values read, pictures drawn, and cases that are refused."""

import json
import random
import shutil
import sys

import pytest

from helpers.forked import script
from transformer_jax.metrics import bleu
from transformer_jax.report import curves
from transformer_jax.report.curves import (
    Curve,
    LengthScore,
    check_edges,
    check_picture,
    draw_by_length,
    draw_curves,
    score_by_length,
)
from transformer_jax.report.curves import read_curves as read

ROWS = [
    {"step": 10, "split": "train", "loss": 3.0},
    {"step": 10, "split": "val", "loss": 3.5, "bleu": 1.0, "bleu_signature": "s"},
    {"step": 20, "split": "train", "loss": 2.0, "mean_loss": 2.25},
    {"step": 20, "split": "val", "loss": 2.5, "bleu": 4.0, "bleu_signature": "s"},
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS) + '{"st'
    )
    return tmp_path / "run"


def test_curves_are_read_by_split(run):
    assert read(run, "loss") == {
        "train": Curve([10, 20], [3.0, 2.25]),
        "val": Curve([10, 20], [3.5, 2.5]),
    }
    assert read(run, "bleu") == {"val": Curve([10, 20], [1.0, 4.0])}


def test_families_have_a_curve_for_each_name_in_training_rows(tmp_path):
    rows = [
        {"step": 1, "split": "train", "norm/b/0": 1.0, "norm/b/1": 2.0, "norm": 9.0},
        {"step": 2, "split": "train", "norm/b/0": None, "norm/b/1": 3.0},
        {"step": 2, "split": "val", "norm/b/0": 7.0},
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = curves.read_family(tmp_path, "norm/*")
    assert found == {
        "norm/b/0": Curve([1], [1.0]),
        "norm/b/1": Curve([1, 2], [2.0, 3.0]),
    }
    with pytest.raises(
        ValueError, match=r"has no 'loss/\*': choose from norm, norm/\*"
    ):
        curves.read_family(tmp_path, "loss/*")
    draw_curves(
        tmp_path / "norms.svg", {"a": {"norm/*": found}, "b": {"norm/*": found}}
    )
    assert "<svg" in (tmp_path / "norms.svg").read_text()


def test_a_run_without_the_value(run, tmp_path):
    with pytest.raises(
        ValueError, match="has no 'blue': choose from bleu, loss, mean_loss"
    ):
        read(run, "blue")
    with pytest.raises(ValueError, match="has no 'bleu_signature'"):
        read(run, "bleu_signature")
    with pytest.raises(ValueError, match=r"nowhere.* name the folder of a run"):
        read(tmp_path / "nowhere", "loss")


@pytest.mark.parametrize("metric", ["bleu", "bleu_tokenized"])
def test_scores_by_length(metric):
    draw = random.Random(0)
    references = [
        " ".join(draw.choice("abcde") for _ in range(n)) for n in (4, 5, 6, 7, 8, 20)
    ]
    predictions = [*references[:3], *(reference[::-1] for reference in references[3:])]
    sources = [" ".join("x" * n) for n in (1, 4, 5, 6, 10, 17)]
    scores = score_by_length(
        sources, predictions, references, [5, 10, 12], metric, bleu
    )
    assert [score[:3] for score in scores] == [(0, 5, 3), (6, 10, 2), (13, 17, 1)]
    for score, part in zip(
        scores, (slice(0, 3), slice(3, 5), slice(5, 6)), strict=True
    ):
        assert score.score == bleu(predictions[part], references[part])[metric]
    assert scores[0].score == pytest.approx(100)
    assert (
        score_by_length(["", "a b"], ["", "c"], ["c", "c"], [5], metric, bleu)[
            0
        ].examples
        == 2
    )
    for edges in ([], [0, 5], [5, 5], [10, 5]):
        with pytest.raises(ValueError, match="must be increasing and at least 1"):
            score_by_length(sources, predictions, references, edges, metric, bleu)


def test_scores_that_cannot_be_split_by_length():
    def by_length(records, metric):
        return score_by_length(records, ["c"], ["c"], [5], metric, bleu)

    for metric in ("bleu_signature", "blue"):
        with pytest.raises(
            ValueError, match=f"no metric '{metric}': choose from bleu, bleu_tokenized"
        ):
            by_length(["a"], metric)
    with pytest.raises(
        ValueError, match="need records of text, and this task has none"
    ):
        by_length((), "bleu")


def test_the_words_of_all_texts_of_a_record_count():
    records = [{"first": "a b", "second": "c d e"}, {"first": "a", "second": ""}]
    scores = score_by_length(
        records,
        ["x", "y"],
        ["x", "y"],
        [4],
        "exact",
        lambda found, right: {"exact": len(found)},
    )
    assert [(part.shortest, part.longest, part.examples) for part in scores] == [
        (0, 4, 1),
        (5, 5, 1),
    ]


def test_edges():
    with pytest.raises(ValueError, match="must be integers"):
        check_edges(["5", "ten"])
    assert check_edges(["5", "10"]) == [5, 10]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ValueError, match=r"pip install -c constraints.txt -e '.\[plots\]'"
    ):
        check_picture("curves.svg")


def test_how_a_value_was_computed_stands_beside_it(run, tmp_path, monkeypatch):
    pytest.importorskip(
        "matplotlib",
        reason="no matplotlib: pip install -c constraints.txt -e '.[plots]'",
    )
    drawn = []
    monkeypatch.setattr(curves, "save", lambda figure, axes, path: drawn.extend(axes))
    called = {
        ("train", "loss"): "loss (with label smoothing)",
        ("val", "bleu"): "bleu (greedy)",
    }
    runs = {"a": {"loss": read(run, "loss"), "bleu": read(run, "bleu")}}
    draw_curves(
        tmp_path / "c.svg",
        runs,
        lambda run, split, value: called.get((split, value), value),
    )
    assert [axis.get_ylabel() for axis in drawn] == ["loss", "bleu (greedy)"]
    legends = [[line.get_label() for line in axis.lines] for axis in drawn]
    assert legends == [
        ["a, train: loss (with label smoothing)", "a, val: loss"],
        ["a, val"],
    ]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures(run, tmp_path, ending):
    pytest.importorskip(
        "matplotlib",
        reason="no matplotlib: pip install -c constraints.txt -e '.[plots]'",
    )
    curves, lengths = tmp_path / f"curves.{ending}", tmp_path / f"lengths.{ending}"
    draw_curves(
        curves,
        {
            "one run": {"loss": read(run, "loss"), "bleu": read(run, "bleu")},
            "other": {},
        },
    )
    draw_by_length(
        lengths,
        {"one run": [LengthScore(1, 5, 3, 30.0), LengthScore(6, 10, 2, 20.0)]},
        "bleu",
    )
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[ending]
    assert curves.read_bytes().startswith(start)
    assert lengths.read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"must end in one of .*\.svg"):
        draw_by_length(tmp_path / "lengths.doc", {}, "bleu")


def test_the_script(run, tmp_path):
    pytest.importorskip(
        "matplotlib",
        reason="no matplotlib: pip install -c constraints.txt -e '.[plots]'",
    )
    other = shutil.copytree(run, tmp_path / "another")
    workdirs = f"--workdirs={run},{other}"
    done = script(
        "compare", workdirs, f"--output={tmp_path}/c.svg", "--values=loss,bleu"
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "c.svg").exists()
    for arguments, words in {
        (
            f"--output={tmp_path}/d.svg",
            "--values=blue",
        ): "choose from bleu, loss, mean_loss",
        (f"--output={tmp_path}/none/d.svg",): "there is no folder",
        (f"--output={tmp_path}/d.svg", "--workdirs="): "--workdirs is empty",
        (
            f"--output={tmp_path}/d.svg",
            "--values=bleu,loss",
            "--lengths=3",
        ): "--values=bleu,loss: --lengths plots one",
        (
            f"--output={tmp_path}/d.svg",
            "--lengths=3",
        ): "--values=loss: --lengths plots one",
    }.items():
        wrong = script("compare", workdirs, *arguments)
        said = wrong.stderr.decode()
        assert wrong.returncode == 2
        assert words in said
        assert "Traceback" not in said
