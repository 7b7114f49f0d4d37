"""A rule that leaves examples out of training."""

import logging

import numpy as np
import pytest

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import Rule, bucket_batches
from transformer_jax.data.images import grid_files
from transformer_jax.data.streams import Frames, Grid
from transformer_jax.data.text import ParallelData

DATA = ParallelData(directory="none", max_length=8, batch_tokens=64)
COLUMNS = {"source": [np.full((2, 2, 1), i) for i in range(5)]}


def batches(broken):
    corpus = Corpus(DATA, {"source": Grid("image", (2, 2, 1), 1)}, None, grid_files)
    rule = Rule("that are odd", broken)
    return bucket_batches(corpus, COLUMNS, split="train", seed=0, rule=rule)


def test_examples_that_break_a_rule_are_left_out_and_counted(caplog):
    caplog.set_level(logging.INFO)
    found = batches(lambda streams, _: streams["source"].values[::4, 0] % 2 == 1)
    assert sorted(found.plan.kept) == [0, 2, 4]
    assert "left out: 2 that are odd" in caplog.text


def test_a_rule_sees_which_examples_nothing_else_leaves_out():
    seen = []

    def broken(streams, others):
        seen.append(others.tolist())
        return np.zeros(3, bool)

    sounds = [np.ones(count) for count in (200, 0, 9000)]  # one is empty, one too long
    corpus = Corpus(DATA, {"source": Frames("file", 8000, 4, 1, 8)}, None, grid_files)
    rule = Rule("that are odd", broken)
    columns = {"source": sounds}
    found = bucket_batches(corpus, columns, split="train", seed=0, rule=rule)
    assert found.plan.kept.tolist() == [0]
    assert seen == [[True, False, False]]


def test_a_rule_that_all_examples_break_is_named():
    with pytest.raises(ValueError, match=r"the others are longer than .* or that are"):
        batches(lambda streams, others: others)
