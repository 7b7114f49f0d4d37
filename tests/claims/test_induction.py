"""Documents that repeat, and what the repetition determines."""

import random
import types

import numpy as np

from transformer_jax.claims import induction
from transformer_jax.claims.claim import Setting


def test_documents_repeat_different_characters():
    draw = random.Random(0)
    periods = set()
    for _ in range(300):
        text = induction.repeated(draw)
        assert len(text) == induction.LENGTH
        period = text.index(text[0], 1)
        assert len(set(text[:period])) == period
        assert all(a == b for a, b in zip(text, text[period:], strict=False))
        periods.add(period)
    assert periods == set(range(induction.SHORTEST, induction.LONGEST + 1))


def test_what_a_repetition_determines():
    text = np.array([[3, 1, 4, 3, 1, 4, 3]])
    target = np.array([[1, 4, 3, 1, 4, 3, 9]])
    # the first repeated token is not determined: what precedes it is new
    wanted = [[False, False, False, True, True, True, False]]
    assert induction.determined(text, target).tolist() == wanted
    draw = np.random.default_rng(0)
    text, target = draw.integers(0, 7, (2, 5, 9))
    found = induction.determined(text, target)
    for row, place in np.ndindex(found.shape):
        before = text[row, :place].tolist()
        known = text[row, place] in before
        seen = target[row, place] in [*before, text[row, place]]
        assert found[row, place] == (known and seen)


def test_the_losses_of_both_kinds_of_tokens(monkeypatch):
    text = np.array([[3, 1, 3, 1, 3, 0], [5, 6, 7, 5, 0, 0]])
    target = np.array([[1, 3, 1, 3, 9, 0], [6, 7, 5, 6, 0, 0]])
    batch = {"text": text, "target": target, "text_length": np.array([5, 4])}
    losses = np.array([[5.0, 6.0, 1.0, 2.0, 9.0, 0.0], [7.0, 8.0, 4.0, 3.0, 0.0, 0.0]])
    monkeypatch.setattr(induction, "split_losses", lambda *_: [(batch, losses)])
    data = types.SimpleNamespace(validation_split="val")
    predictor = types.SimpleNamespace(config=types.SimpleNamespace(data=data))
    assert induction.repeated_losses(predictor, None) == {
        "repeated loss": 2.0,  # 1, 2 and 3
        "new loss": 6.5,  # 5, 6, 9, 7, 8 and 4
        "repeated loss at 1": 2.0,
        "repeated loss at 2": 2.0,
    }


def test_documents_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(induction, "DOCUMENTS", {"train": 3, "val": 2})
    setting = Setting(0, tmp_path, tmp_path / "runs", tmp_path, tmp_path)
    folder = induction.write_documents(setting)
    train = (folder / "train.txt").read_text()
    assert [len(part.strip()) for part in train.split("\n\n")] == [64] * 3
    val = (folder / "val.txt").read_text()
    assert not set(val.split()) & set(train.split())
    monkeypatch.setattr(induction, "DOCUMENTS", {"train": 1, "val": 1})
    assert induction.write_documents(setting) == folder
    assert (folder / "train.txt").read_text() == train
