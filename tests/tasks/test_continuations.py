"""Continuations of prompts by a language model."""

import jax
import numpy as np
import pytest

import transformer_jax
from helpers.runs import parameters, run, shrink, small
from transformer_jax.config import defaults, make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.tasks import language_modeling
from transformer_jax.tasks.continuations import ContinuedTexts
from transformer_jax.training import evaluation
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


@pytest.fixture
def config(corpus):
    config = small("language_modeling", corpus)
    config.data.tokenizer = "characters"
    return config


def untrained(config, workdir, greedy=True):
    """Return a task, random parameters, and a function that predicts with them."""
    task = make_task(parse(config), workdir)
    params = parameters(task)
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    return task, params, lambda prompts: evaluator.predict(params, prompts, greedy)


def predict(config, workdir, prompts):
    return untrained(config, workdir)[2](prompts)


@pytest.mark.parametrize("architecture", ["gpt", "recurrent_lm"])
def test_a_continuation_is_what_the_model_finds_most_probable_after_the_prompt(
    corpus, tmp_path, architecture
):
    """Compare with a loop over positions without a cache.

    Padding, begin and end are not part of a text.
    """
    prompts, config = (
        ["ek", "ak ek it ak", "e"],
        shrink(defaults("language_modeling", architecture), corpus),
    )
    config.data.tokenizer = "characters"
    task, params, continued = untrained(config, tmp_path / "run")
    found = continued(prompts)
    tokenizer, apply = task.corpus.tokenizers["text"], jax.jit(task.model.apply)
    for prompt, prediction in zip(prompts, found, strict=True):
        (ids,) = tokenizer.encode_batch([prompt])
        start = len(ids)
        for _ in range(config.decoding.max_extra):
            read = np.array([ids + [0] * (32 - len(ids))])
            logits = np.array(
                apply({"params": params}, read)[0, len(ids) - 1, : tokenizer.size]
            )
            logits[[tokenizer.pad_id, tokenizer.bos_id]] = -np.inf
            ids.append(int(logits.argmax()))
        assert prediction == {"continuation": tokenizer.decode(ids[start:])}


def test_of_a_long_prompt_the_last_tokens_are_continued(config, tmp_path, caplog):
    room = config.model.max_length - config.decoding.max_extra
    long = "ak ek it " * 9 + "em is ot"
    found, same = predict(config, tmp_path / "run", [long, long[-room:]])
    assert found == same
    assert (
        f"input, line 1: {len(long)} tokens, "
        f"cut to model.max_length - decoding.max_extra = {room}" in caplog.text
    )


def test_drawn_continuations_are_several_and_repeatable(config, tmp_path):
    """A prompt is continued in the same way alone, together and in a longer batch."""
    config.decoding.temperature, config.decoding.n_best, config.decoding.seed = (
        1.0,
        3,
        2,
    )
    _, _, drawn = untrained(config, tmp_path / "run", greedy=False)
    first, second = drawn(["ek", "ek"])
    assert len(first["continuations"]) == 3
    assert first != second  # every record has its own draws
    assert drawn(["ek", "ek", "ak ek it ak"])[:2] == [first, second]
    assert drawn(["ek"]) == [first]


def test_the_best_continuation_comes_first(config, tmp_path):
    """A score is the sum up to the stop string, or up to the end.

    It is -3.5, -4 and -1 here.
    """
    (
        config.decoding.temperature,
        config.decoding.n_best,
        config.decoding.stop_strings,
    ) = (
        1.0,
        3,
        ("mi",),
    )
    task = make_task(parse(config), tmp_path / "run")
    tokenizer = task.corpus.tokenizers["text"]
    ids = [
        [*row, tokenizer.eos_id, tokenizer.pad_id]
        for row in tokenizer.encode_batch(["kemit", "kes", "km"])
    ]
    outputs = {
        "tokens": np.array([[(row + [tokenizer.pad_id] * 5)[:5] for row in ids]]),
        "log_probabilities": np.array(
            [[[-1, -1, -1, -0.5, -9], [-1, -1, -1, -1, 0], [-0.5, -0.25, -0.25, 0, 0]]]
        ),
        "finished": np.ones((1, 3), bool),
        "written": np.full((1, 3), 5),
    }
    batch = {
        "text": np.array([tokenizer.encode_batch(["it"])[0]]),
        "text_length": np.array([2]),
    }
    assert task.decode(outputs, batch) == [{"continuations": ["km", "ke", "kes"]}]


def test_several_turns_are_one_prompt(config, tmp_path):
    config.decoding.turn_separator = "\n"
    records = [
        "ek\nat\n",
        {"turns": ["ek", "at"]},
        '{"turns": ["ek", "at"]}',
        {"text": "ek\nat\n"},
        '{"turn": ["ek"]}',
    ]
    text, *same, other, line = predict(
        config, tmp_path / "run", [*records, {"text": records[-1]}]
    )
    assert same == [text] * 3
    assert other == line  # a line that is no such object is a text


@pytest.mark.parametrize(
    "record",
    [
        {"turns": []},
        {"turns": "ek"},
        {"turns": ["ek", 3]},
        {"turns": ["ek"], "text": "ek"},
        {"text": 3},
        {},
    ],
)
def test_what_is_no_prompt(config, tmp_path, record):
    with pytest.raises(
        DataError,
        match=r"^record 2 is .*: a prompt is a line of text, .*with at least one turn",
    ):
        make_task(parse(config), tmp_path / "run").batches_of(["ek", record])


def test_a_continuation_ends_before_a_stop_string(config, tmp_path):
    """Wherever a piece ends, the text is the part before the first stop string of
    the text without one.
    """
    config.decoding.max_extra = 20
    prompts = ["ek", "ak ek it ak", "e", "at"]
    task, _, continued = untrained(config, tmp_path / "run")
    whole = [found["continuation"] for found in continued(prompts)]
    assert task.piece == 20
    stop = (whole[0][3:6], whole[1][9:11], "never")
    expected = [min((text.partition(s)[0] for s in stop), key=len) for text in whole]
    assert len(expected[0]) <= 3
    assert expected != whole
    config.decoding.stop_strings = stop
    assert make_task(parse(config), tmp_path / "run").piece == language_modeling.PIECE
    task.texts = ContinuedTexts(task.corpus, parse(config).decoding)
    for task.piece in (3, 32):
        assert [found["continuation"] for found in continued(prompts)] == expected


def test_a_stop_string_may_begin_with_the_space_after_the_prompt(config, tmp_path):
    """Decoded alone, a continuation in tokens with "▁" lacks its first space."""
    config.data.tokenizer, config.decoding.max_extra = "bpe_metaspace", 20
    config.decoding.stop_strings = (" ek",)
    task = make_task(parse(config), tmp_path / "run")
    prompt, whole = task.corpus.tokenizers["text"].encode_batch(["ak", "ak ek it"])
    assert whole[: len(prompt)] == prompt
    added = np.array([[whole[len(prompt) :]]])
    outputs = {
        "tokens": added,
        "log_probabilities": np.zeros(added.shape),
        "finished": np.zeros((1, 1), bool),
        "written": np.full((1, 1), added.size),
    }
    batch = {"text": np.array([prompt]), "text_length": np.array([len(prompt)])}
    assert not task.unfinished(outputs, batch).any()
    assert task.decode(outputs, batch) == [{"continuation": ""}]


def test_continuations_are_shown_while_they_are_written(config, tmp_path, monkeypatch):
    """With bytes as tokens, no character is split.

    Pieces are those of `predict` at the same place.
    """
    config.data.tokenizer, config.decoding.max_extra, config.decoding.temperature = (
        "bpe_bytes",
        24,
        2.0,
    )
    config.decoding.stop_strings = ("e",)
    run(config, tmp_path / "run", training__steps=2)
    monkeypatch.setattr(evaluation, "STREAMED", 1)
    prompts = ["ek é", "ek", "ek"]
    predictor = transformer_jax.load(tmp_path / "run", {"decoding.seed": 3})
    whole = [found["continuation"] for found in predictor.predict(prompts)]
    assert whole[1] != whole[2]
    for number, (prompt, text) in enumerate(zip(prompts, whole, strict=True)):
        pieces = list(predictor.stream(prompt, number))
        assert "".join(pieces) == text
        assert len(list(filter(None, pieces))) > 3
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
    with pytest.raises(ValueError, match=r"record 1 is None"):
        next(predictor.stream(None))
    several = transformer_jax.load(tmp_path / "run", {"decoding.n_best": 2})
    with pytest.raises(
        ValueError,
        match=r"single texts that grow in pieces: use predict, .*decoding.n_best = 1",
    ):
        next(several.stream("ek"))


@pytest.mark.parametrize("prompts", [["", "ek", "  "], ["", " "]])
def test_a_prompt_without_a_token_is_continued_by_nothing(
    config, tmp_path, caplog, prompts
):
    config.data.tokenizer = "words"
    found = predict(config, tmp_path / "run", prompts)
    assert [prediction["continuation"] == "" for prediction in found] == [
        not prompt.strip() for prompt in prompts
    ]
    assert f"input: 2 lines are empty: lines 1, {len(prompts)}" in caplog.text


def test_continuations_that_do_not_fit_the_model_are_shorter(config, tmp_path, caplog):
    """A default must not refuse a small model."""
    config.decoding.max_extra = 32
    task = make_task(parse(config), tmp_path)
    assert (
        "max_extra = 32: continuations have at most 16 tokens, "
        "half of model.max_length = 32" in caplog.text
    )
    assert task.config.decoding.max_extra == 16
