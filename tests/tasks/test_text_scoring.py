"""Log-likelihoods of texts against sums over an uncached model in NumPy."""

import json

import jax
import numpy as np
import pytest

from helpers.corpus import write_corpus
from helpers.runs import parameters, small
from transformer_jax.config import make_task, parse
from transformer_jax.data.scoring import score
from transformer_jax.data.sources import DataError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

LIMIT = 11  # tokens that the model reads


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the tokenizer, a function from tokens to log-probabilities, and one
    from records to scores.
    """
    folder = tmp_path_factory.mktemp("scoring")
    write_corpus(folder / "corpus")
    config = small("language_modeling", folder / "corpus")
    config.data.tokenizer, config.evaluation.batch_size, config.decoding.max_extra = (
        "characters",
        3,
        3,
    )
    config.model.max_length = config.data.max_length = LIMIT
    task = make_task(parse(config), folder / "run")
    params = parameters(task)
    params = jax.tree.map(lambda x: x * 3, params)  # probabilities that differ
    evaluator, apply = (
        Evaluator(task.scorer(), make_mesh(task.config.mesh)),
        jax.jit(task.model.apply),
    )

    def log_probabilities(ids):
        logits = np.array(
            apply({"params": params}, np.array([ids + [0] * (LIMIT - len(ids))]))[
                0, : len(ids)
            ],
            float,
        )
        logits = logits[:, : config.model.vocab_size]
        top = logits.max(axis=-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))

    return (
        task.corpus.tokenizers["text"],
        log_probabilities,
        lambda records: evaluator.predict(params, records),
    )


def expected(model, context, text):
    """Return the sum over the tokens of a text, each given the longest context that
    its window allows.
    """
    tokenizer, log_probabilities, _ = model
    before, written = tokenizer.encode_batch([context, text])
    ids, total, start = before + written, 0.0, 0
    for i in range(len(before), len(ids)):
        while i > start + LIMIT:
            start += LIMIT // 2
        total += log_probabilities(ids[start:i])[-1][ids[i]]
    return total, len(written)


LONG = "ak ek it ak em is ot uk"

CASES = [
    ("ek", "at ak"),
    ("e", "k"),
    ("ak ek it ak em", "t"),
    ("ek", LONG),
    ("e" * 30, "at ek ak it"),
]


def test_a_score_is_the_sum_over_the_tokens_of_the_text(model):
    records = [{"context": context, "text": text} for context, text in CASES]
    found = model[2](records)
    for (context, text), scores in zip(CASES, found, strict=True):
        total, tokens = expected(model, context, text)
        assert scores["tokens"] == tokens
        assert scores == {
            "log_likelihood": pytest.approx(total, rel=1e-5),
            "tokens": tokens,
            "per_token": pytest.approx(total / tokens, rel=1e-5),
            "per_byte": pytest.approx(total / len(text), rel=1e-5),
        }
    together = model[2]([*records[::-1], json.dumps(records[0])])
    assert together == [
        pytest.approx(scores, rel=1e-5) for scores in [*found[::-1], found[0]]
    ]


def test_without_a_context_a_text_follows_a_line_break(model):
    line, record, after = model[2](
        ["ek at", {"text": "ek at"}, {"context": "\n", "text": "ek at"}]
    )
    assert line == record == pytest.approx(after)
    assert line["log_likelihood"] == pytest.approx(
        expected(model, "\n", "ek at")[0], rel=1e-5
    )
    assert model[2](["", "ek at"]) == [score([], 0), pytest.approx(line)]


def test_the_choice_is_the_most_probable_per_token(model):
    choices = ["at", "at ak ek ak ek it", "ké"]
    record = {"context": "ek", "choices": choices}
    found, alone, _ = model[2]([record, {"choices": ["e", "a"]}, "ek"])
    apart = model[2]([{"context": "ek", "text": text} for text in choices])
    assert found["scores"] == [pytest.approx(scores) for scores in apart]
    means = [
        total / tokens
        for total, tokens in (expected(model, "ek", text) for text in choices)
    ]
    assert found["choice"] == int(np.argmax(means))
    assert found["scores"][2]["per_byte"] == pytest.approx(
        found["scores"][2]["log_likelihood"] / 3
    )
    assert len(alone["scores"]) == 2


@pytest.mark.parametrize(
    "record",
    [
        {"context": "ek"},
        {"text": 3},
        {"text": "ek", "context": None},
        {"choices": []},
        {"choices": "ek"},
        {"choices": ["ek"], "text": "ek"},
        {"a": "ek"},
    ],
)
def test_what_cannot_be_scored(model, record):
    with pytest.raises(
        DataError,
        match=r"^record 2 is .*: a text to score is a line, .* or .*with \"context\"",
    ):
        model[2](["ek", record])


def test_a_choice_needs_tokens(model):
    with pytest.raises(
        DataError, match=r"^record 2 has a choice without tokens: .*leave it out"
    ):
        model[2](["ek", {"choices": ["ek", ""]}])
