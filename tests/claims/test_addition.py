"""Sums as text."""

import random

from transformer_jax.claims import addition
from transformer_jax.claims.claim import Setting


def test_sums_are_right_different_and_always_the_same():
    found = addition.sums(3, 500)
    pairs = {pair for pair, _, _ in found}
    assert len(pairs) == 500
    for pair, plain, reverse in found:
        a, b = pair.split("+")
        assert len(a) == len(b) == 3
        assert int(plain) == int(a) + int(b)
        assert reverse[::-1] == plain
    random.seed(1)
    assert addition.sums(3, 500) == found


def test_the_splits_share_no_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(addition, "TRAINING", {5: 40})
    monkeypatch.setattr(addition, "VALIDATION", 10)
    setting = Setting(0, tmp_path, tmp_path / "runs", tmp_path, tmp_path)
    folder = addition.write_sums(setting, digits=5)
    columns = {
        path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())
    }
    assert {name: len(lines) for name, lines in columns.items()} == {
        f"{split}.{name}": count
        for split, count in (("train", 40), ("val", 10))
        for name in ("pair", "plain", "reversed")
    }
    assert not set(columns["train.pair"]) & set(columns["val.pair"])
    assert columns["val.plain"][3] == columns["val.reversed"][3][::-1]
    times = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    assert addition.write_sums(setting._replace(seed=1), digits=5) == folder
    assert times == [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
