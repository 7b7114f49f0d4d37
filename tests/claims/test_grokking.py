"""Sums modulo a prime, and the steps until they are learned."""

import dataclasses

from transformer_jax.claims import grokking
from transformer_jax.claims.claim import Setting


def pairs(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "sentence\tlabel"
    return dict(line.split("\t") for line in lines[1:])


def test_the_sums(tmp_path):
    setting = Setting(0, tmp_path, tmp_path / "runs", tmp_path, tmp_path)
    folder = grokking.write_sums(setting)
    train = pairs(folder / "train.tsv")
    val = pairs(folder / "val.tsv")
    assert len(train) == grokking.TRAINING
    assert len(val) == grokking.VALIDATION
    assert not train.keys() & val.keys()
    for text, label in (train | val).items():
        a, b, equals = text.split()
        assert equals == "="
        assert int(label) == (int(a) + int(b)) % 97
    before = (folder / "val.tsv").stat().st_mtime_ns
    assert grokking.write_sums(setting._replace(seed=1)) == folder
    assert (folder / "val.tsv").stat().st_mtime_ns == before


def test_the_first_step_of_an_accuracy():
    rows = [
        {"step": 20, "split": "train", "accuracy": 0.5},
        {"step": 40, "split": "train", "accuracy": 0.99},
        {"step": 40, "split": "val", "accuracy": 0.1},
        {"step": 60, "split": "train", "accuracy": 1.0},
        {"step": 60, "split": "train"},
        {"step": 60, "split": "val", "accuracy": None},
    ]
    assert grokking.first_step(rows, "train", 0.99, 60) == 40
    assert grokking.first_step(rows, "val", 0.1, 60) == 40
    assert grokking.first_step(rows, "val", 0.95, 60) == 60


def test_a_run_measures_its_steps(tmp_path):
    setting = Setting(0, tmp_path, tmp_path / "runs", tmp_path, tmp_path, quick=True)
    whole = grokking.condition(1.0)
    quick = {**whole.quick, "training.log_every": 1, "training.evaluate_every": 2}
    found = dataclasses.replace(whole, quick=quick)(setting)
    assert 0 <= found["accuracy"] <= 1
    assert found["steps until fitted"] == found["steps until general"] == 4
    assert found["delay"] == 0
