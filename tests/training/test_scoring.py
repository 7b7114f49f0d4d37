"""Scores that mean the same, and scores that do not."""

import pathlib
import shutil

from ml_collections import ConfigDict

from helpers.runs import run
from transformer_jax.config import parse
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training.checkpoint import Checkpoints


def test_scores_that_do_not_mean_the_same_are_not_compared(finished, copied, caplog):
    """With another tokenizer of BLEU, a score is higher though the model is not better.

    The earlier best step stays.
    """
    config = ConfigDict(finished[0].to_dict())
    config.checkpoint.best_metric = "bleu"
    config.checkpoint.keep_latest = 1
    config.evaluation.bleu_tokenizer = "char"
    run(config, copied, training__steps=10)
    checkpoints = Checkpoints(
        copied / "checkpoints", parse(config).checkpoint, SequenceToSequence.metrics
    )
    assert checkpoints.best() == 10
    assert "evaluation.bleu_tokenizer: '13a', later 'char'" in caplog.text
    assert len(checkpoints.verified()) == 2


def test_changed_validation_data_are_said(finished, copied, corpus, caplog):
    config = ConfigDict(finished[0].to_dict())
    folder = pathlib.Path(
        shutil.copytree(config.data.directory, copied.parent / "corpus2")
    )
    for path in folder.glob("val.*"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    config.data.directory = str(folder)
    run(config, copied, training__steps=8)
    assert "the validation data have changed since step 8 was saved" in caplog.text
