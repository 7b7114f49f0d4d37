"""Minimal pairs with runs of several kinds, by the command."""

import json

import pytest

import transformer_jax
from helpers.abusing import refused
from helpers.forked import script
from helpers.runs import run, small
from transformer_jax.baselines import counted

TABLE = """field	phenomenon	paradigm	sentence_good	sentence_bad
syntax	order	a	ak ek it	it ek ak ak
syntax	order	a	em	uk uk
syntax	order	b	ak	ak
semantics	choice	c	it em at	at
"""


@pytest.fixture
def pairs(tmp_path):
    (tmp_path / "pairs.tsv").write_text(TABLE)
    return tmp_path / "pairs.tsv"


def accuracies(predict):
    """Return the accuracy of each paradigm of TABLE."""
    right = {"a": [], "b": [], "c": []}
    for line in TABLE.splitlines()[1:]:
        _, _, paradigm, good, bad = line.split("\t")
        one, other = (predict([text], scored=True)[0] for text in (good, bad))
        right[paradigm].append(one["log_likelihood"] > other["log_likelihood"] + 1e-6)
    return {name: sum(values) / len(values) for name, values in right.items()}


def check(workdir, pairs, predict):
    done = script("minimal_pairs", f"--workdir={workdir}", f"--input={pairs}")
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    expected = accuracies(predict)
    assert found["paradigms"] == expected
    assert found["accuracy"] == pytest.approx(sum(expected.values()) / 3)
    assert (found["pairs"], found["ties"]) == (4, 1)
    assert "mean of 3 paradigms" in done.stderr.decode()
    return found


@pytest.mark.parametrize("task", ["language_modeling", "bert_pretraining"])
def test_a_trained_run(task, corpus, pairs, tmp_path):
    config = small(task, corpus)
    run(config, tmp_path / "run", training__steps=2)
    predictor = transformer_jax.load(tmp_path / "run")
    found = check(tmp_path / "run", pairs, predictor.predict)
    assert found["parameters_sha256"] == predictor.parameters_sha256


def test_an_ngram_model(corpus, pairs, tmp_path):
    config = counted.defaults()
    config.data.directory, config.data.sentences = str(corpus), True
    config.model.order = 2
    model = counted.count(config, tmp_path / "run")
    assert check(tmp_path / "run", pairs, model.predict)["order"] == 2


def test_a_run_that_cannot_score_texts(trained, pairs):
    done = script("minimal_pairs", f"--workdir={trained}", f"--input={pairs}")
    refused(done, "config.task = 'sequence_to_sequence' does not say", "bert_pretrain")
