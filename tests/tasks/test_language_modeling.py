"""Language model: continuations of prompts, and scores."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import small

from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


@pytest.fixture
def config(corpus):
    config = small("language_modeling", corpus)
    config.data.tokenizer = "characters"
    return config


def predict(config, workdir, prompts, greedy=True):
    task = make_task(parse(config), workdir)
    params = nn.unbox(task.init(jax.random.key(0)))
    return task, params, Evaluator(task, make_mesh(task.config.mesh)).predict(params, prompts, greedy)


def test_a_continuation_is_what_the_model_finds_most_probable_after_the_prompt(config, tmp_path):
    """Compare with a loop over positions without a cache. Padding, begin and end are not part of a text."""
    prompts = ["ek", "ak ek it ak", "e"]
    task, params, found = predict(config, tmp_path / "run", prompts)
    tokenizer = task.corpus.tokenizers["text"]
    for prompt, prediction in zip(prompts, found, strict=True):
        (ids,) = tokenizer.encode_batch([prompt])
        start = len(ids)
        for _ in range(config.decoding.max_extra):
            logits = np.array(task.model.apply({"params": params}, np.array([ids]))[0, -1, : config.model.vocab_size])
            logits[[tokenizer.pad_id, tokenizer.bos_id]] = -np.inf
            ids.append(int(logits.argmax()))
        assert prediction == {"continuation": tokenizer.decode(ids[start:])}


def test_of_a_long_prompt_the_last_tokens_are_continued(config, tmp_path, caplog):
    room = config.model.max_length - config.decoding.max_extra
    long = "ak ek it " * 9 + "em is ot"
    _, _, (found, same) = predict(config, tmp_path / "run", [long, long[-room:]])
    assert found == same
    assert f"input, line 1: {len(long)} tokens, cut to model.max_length - decoding.max_extra = {room}" in caplog.text


def test_drawn_continuations_are_several_and_repeatable(config, tmp_path):
    config.decoding.temperature, config.decoding.n_best = 1.0, 3
    _, _, (first, second) = predict(config, tmp_path / "run", ["ek", "ek"], greedy=False)
    assert len(first["continuations"]) == 3
    assert first != second  # every record has its own draws
    assert predict(config, tmp_path / "run", ["ek", "ek"], greedy=False)[2] == [first, second]


@pytest.mark.parametrize("prompts", [["", "ek", "  "], ["", " "]])
def test_a_prompt_without_a_token_is_continued_by_nothing(config, tmp_path, caplog, prompts):
    config.data.tokenizer = "words"
    _, _, found = predict(config, tmp_path / "run", prompts)
    assert [prediction["continuation"] == "" for prediction in found] == [not prompt.strip() for prompt in prompts]
    assert f"input: 2 empty lines: 1, {len(prompts)}" in caplog.text


def test_bits_per_byte_are_nats_per_token_in_another_unit(config, tmp_path, corpus):
    task = make_task(parse(config), tmp_path / "run")
    text = "éa" * 50
    (corpus / "val.txt").write_text(text)
    batches = task.batches("val", None)
    scores = task.score({"loss": 2.0}, [], batches.references)
    assert scores["bits_per_byte"] == pytest.approx(2.0 * 99 / (150 - 2) / np.log(2))
    assert task.score({}, [], batches.references) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decoding.max_extra": 32},
            r"decoding.max_extra = 32: must be below model.max_length = 32",
        ),
        ({"data.max_length": 64, "data.batch_tokens": 1024}, r"data.max_length = 64: must not exceed model.max_length"),
    ],
)
def test_what_does_not_go_together(config, change, message):
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)
