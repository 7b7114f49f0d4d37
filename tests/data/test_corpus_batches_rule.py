"""A rule that leaves examples out of training."""

import logging

import numpy as np
import pytest

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import Rule, bucket_batches
from transformer_jax.data.images import grid_files
from transformer_jax.data.streams import Grid
from transformer_jax.data.text import ParallelData

DATA = ParallelData(directory="none", max_length=8, batch_tokens=64)
COLUMNS = {"source": [np.full((2, 2, 1), i) for i in range(5)]}


def batches(broken):
    corpus = Corpus(DATA, {"source": Grid("image", (2, 2, 1), 1)}, None, grid_files)
    rule = Rule("that are odd", broken)
    return bucket_batches(corpus, COLUMNS, split="train", seed=0, rule=rule)


def test_examples_that_break_a_rule_are_left_out_and_counted(caplog):
    caplog.set_level(logging.INFO)
    found = batches(lambda streams: streams["source"].values[::4, 0] % 2 == 1)
    assert sorted(found.plan.kept) == [0, 2, 4]
    assert "left out: 2 that are odd" in caplog.text


def test_a_rule_that_all_examples_break_is_named():
    with pytest.raises(ValueError, match=r"the others are longer than .* or that are"):
        batches(lambda streams: np.ones(5, bool))
