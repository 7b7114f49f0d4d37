"""Pseudo-log-likelihoods against a loop over masked copies of a text."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers.corpus import write_corpus
from helpers.runs import small
from transformer_jax.config import make_task, parse
from transformer_jax.data.scoring import score
from transformer_jax.data.sources import DataError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

LINES = ["ak ek it", "", "ek at ak it ek uk em ot is ak", "ak"]
LENGTH = 32


@pytest.fixture(scope="module", params=[False, True], ids=["masked", "causal"])
def model(tmp_path_factory, request):
    """Return the task, its parameters, and a function from records to scores."""
    folder = tmp_path_factory.mktemp("scoring")
    write_corpus(folder / "corpus")
    config = small("bert_pretraining", folder / "corpus")
    config.evaluation.batch_size = 8
    config.model.causal = request.param
    config.masking.next_sentence = not request.param
    task = make_task(parse(config), folder / "run")
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    params = jax.tree.map(lambda x: x * 3, params)  # probabilities that differ
    evaluator = Evaluator(task.scorer(), make_mesh(task.config.mesh))
    return task, params, lambda records: evaluator.predict(params, records)


def expected(task, params, line):
    """Return Σ_t log P(w_t | W without w_t) and the number of tokens."""
    tokenizer = task.corpus.tokenizers["text"]
    (ids,) = tokenizer.encode_batch([line])

    @jax.jit
    def logits_of(text, valid):
        vectors, head, _ = task.model.apply({"params": params}, text, valid)
        return head(vectors)

    total = 0.0
    valid = np.arange(LENGTH)[None] < len(ids) + 2
    for t in range(len(ids)):
        text = np.zeros((1, LENGTH), np.int32)
        text[0, : len(ids) + 2] = [tokenizer.bos_id, *ids, tokenizer.eos_id]
        text[0, t + 1] = tokenizer.mask_id
        place = t + 1 - task.model.config.causal
        logits = np.asarray(logits_of(text, valid), np.float64)[0, place]
        logits = logits[: task.model.config.vocab_size]
        total += logits[ids[t]] - np.log(np.exp(logits).sum())
    return total, len(ids)


def test_a_score_is_the_sum_over_masked_tokens(model):
    task, params, scores = model
    found = scores(LINES)
    for line, one in zip(LINES, found, strict=True):
        total, tokens = expected(task, params, line)
        wanted = score([{"log_likelihood": total, "tokens": tokens}], len(line))
        assert one == pytest.approx(wanted, rel=1e-4)
    assert found[0]["tokens"] > 2
    assert found[1] == score([], 0)


def test_the_best_choice_is_the_one_with_the_best_score_per_token(model):
    _, _, scores = model
    found, *alone = scores([{"choices": LINES[::2]}, *LINES[::2]])
    assert found["scores"] == [pytest.approx(one, rel=1e-4) for one in alone]
    best = int(np.argmax([one["per_token"] for one in alone]))
    assert found["choice"] == best


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "ak", "context": "ek"}, "record 2 has the context 'ek': .*leave"),
        ({"text": 3}, "record 2 is .*: a text to score"),
        ("ak " * 40, r"record 2 has \d+ tokens .* at most model.max_length = \d+ "),
    ],
)
def test_what_cannot_be_scored(model, record, words):
    with pytest.raises(DataError, match=words):
        model[2](["ek", record])
