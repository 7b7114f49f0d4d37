"""N-gram models in folders: counted, stored, evaluated, and used to score texts."""

import json
import math

import numpy as np
import pytest

from helpers.corpus import real_data, write_corpus
from helpers.forked import script
from helpers.runs import get_config, small
from transformer_jax.baselines import counted
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def config_of(corpus, order=3, sentences=True, tokenizer="words"):
    config = counted.defaults()
    config.data.directory = str(corpus)
    config.data.sentences = sentences
    config.data.tokenizer = tokenizer
    config.model.order = order
    return config


def test_sentences_are_scored_with_their_ends(corpus, tmp_path):
    counted.count(config_of(corpus), tmp_path / "run")
    model = counted.load(tmp_path / "run")
    lines = [line for line in (corpus / "val.txt").read_text().split("\n") if line]
    scores = model.predict([*lines, ""])
    assert [each["tokens"] for each in scores[:-1]] == [
        len(line.split()) + 1 for line in lines
    ]
    assert scores[-1]["tokens"] == 1  # the end
    total = -sum(each["log_likelihood"] for each in scores[:-1])
    tokens = sum(each["tokens"] for each in scores[:-1])
    found = model.evaluate()
    assert found == {
        "split": "val",
        "order": 3,
        "tokens": tokens,
        "loss": pytest.approx(total / tokens),
        "perplexity": pytest.approx(math.exp(total / tokens)),
        "bits_per_byte": pytest.approx(
            total / sum(map(len, lines)) / math.log(2), rel=1e-9
        ),
    }
    assert found["loss"] < math.log(21)  # 20 words and the end


def test_one_text_goes_on_over_line_breaks(corpus, tmp_path):
    config = config_of(corpus, sentences=False, tokenizer="characters")
    model = counted.count(config, tmp_path / "run")
    text = (corpus / "val.txt").read_text()
    found = model.evaluate()
    assert found["tokens"] == len(text) - 1
    bits = found["loss"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits)
    (first, rest) = model.predict([{"context": text[:1], "text": text[1:]}, "ek"])
    assert -first["per_token"] == pytest.approx(found["loss"])
    assert rest["tokens"] == 2
    after_break = model.predict([{"context": "\n", "text": "ek"}])
    assert after_break == [rest]
    chosen, *alone = model.predict([{"choices": ["ek", "qqq"]}, "ek", "qqq"])
    assert chosen == {"choice": 0, "scores": alone}
    assert model.predict([]) == []
    end = model.corpus.special_ids("text").end
    assert model.model.levels[0].log_probability[end] == -math.inf


def test_the_tokens_and_bytes_are_those_of_a_language_model(corpus, tmp_path):
    config = small("language_modeling", corpus)
    config.data.tokenizer = "characters"
    task = make_task(parse(config), tmp_path / "trained")
    ((tokens, size, _),) = task.batches("val", None).references
    counting = config_of(corpus, sentences=False, tokenizer="characters")
    found = counted.count(counting, tmp_path / "run").evaluate()
    assert found["tokens"] == tokens
    assert {*task.metrics} <= {*found}
    bits = task.score({"loss": found["loss"]}, [], [(tokens, size, "")])
    assert found["bits_per_byte"] == pytest.approx(bits["bits_per_byte"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.order", 0, r"config\.model\.order = 0: must be at least 1"),
        ("model.order", 9, r"order = 9: must be at most 8, .*lower order"),
        ("model.discounts", "two", "must be one of one, modified"),
        ("model.order", "x", "must be of type int"),
        ("data.directory", "", r"config\.data\.directory = '': must be the folder"),
        ("data.tokenizer", "letters", "must be one of bpe_bytes"),
    ],
)
def test_what_cannot_be_counted(corpus, tmp_path, key, value, words):
    config = config_of(corpus).to_dict()
    section, name = key.split(".")
    config[section][name] = value
    with pytest.raises(ConfigError, match=words):
        counted.count(counted.ConfigDict(config), tmp_path / "run")
    assert not (tmp_path / "run" / counted.FILE).exists()


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("\n \n")
    with pytest.raises(DataError, match="lines of text in the split train are blank"):
        counted.count(config_of(tmp_path), tmp_path / "run")
    (tmp_path / "train.txt").write_text("a b\na c\n")
    (tmp_path / "val.txt").write_text("a")
    model = counted.count(config_of(tmp_path, 2, sentences=False), tmp_path / "run")
    with pytest.raises(DataError, match=r"val\.txt, split val: .*there must be two"):
        model.evaluate()


def test_a_folder_keeps_its_model(corpus, tmp_path):
    counted.count(config_of(corpus), tmp_path / "run")
    counted.count(config_of(corpus), tmp_path / "run")
    with pytest.raises(ConfigError, match="holds another n-gram model: choose another"):
        counted.count(config_of(corpus, order=2), tmp_path / "run")
    (tmp_path / "trained" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="the checkpoints of a trained run"):
        counted.count(config_of(corpus), tmp_path / "trained")
    with pytest.raises(ConfigError, match="is not the folder of an n-gram model"):
        counted.load(tmp_path / "trained")


def test_a_tokenizer_that_is_there_is_used(corpus, tmp_path):
    counted.count(config_of(corpus, tokenizer="characters"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text((tmp_path / "run" / "tokenizer.json").read_text())
    model = counted.count(config_of(corpus), tmp_path / "other")
    assert model.predict(["ek"])[0]["tokens"] == 3


def test_a_damaged_folder_is_refused(corpus, tmp_path):
    counted.count(config_of(corpus), tmp_path / "run")
    path = tmp_path / "run" / counted.FILE
    content = path.read_bytes()
    tokenizer = json.loads((tmp_path / "run" / "tokenizer.json").read_text())
    for damaged in (content[: len(content) // 2], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"ngram\.npz is no n-gram model .*again"):
            counted.load(tmp_path / "run")
    path.write_bytes(content)
    ids = tokenizer["model"]["vocab"]
    *_, last = ids
    ids["renamed"] = ids.pop(last)
    (tmp_path / "run" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="with another tokenizer"):
        counted.load(tmp_path / "run")


def test_the_recipe_sets_what_its_arguments_say():
    config = get_config("lm", "ngram,order=3")
    assert (config.model.order, config.data.sentences) == (3, False)
    config = get_config("lm", "sentences")
    assert (config.model.order, config.data.sentences) == (5, True)


def test_the_command_counts_scores_and_writes_arpa(corpus, tmp_path):
    options = (
        "--config=configs/lm.py:ngram,sentences,order=2",
        f"--config.data.directory={corpus}",
        "--config.data.tokenizer=words",
        "--config.data.min_count=1",
        f"--workdir={tmp_path / 'run'}",
    )
    arpa = tmp_path / "model.arpa"
    done = script("ngram", *options, f"--arpa={arpa}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["order"] == 2
    assert arpa.read_text().startswith("\\data\\\nngram 1=2")
    (tmp_path / "lines.txt").write_text("ak ek\nek\n")
    done = script(
        "ngram",
        f"--workdir={tmp_path / 'run'}",
        f"--input={tmp_path / 'lines.txt'}",
    )
    written = [json.loads(line) for line in done.stdout.splitlines()]
    assert written == counted.load(tmp_path / "run").predict(["ak ek", "ek"])


def test_tiny_shakespeare(tmp_path):
    config = get_config("lm", "ngram,order=2")
    config.data.directory = str(real_data("tinyshakespeare"))
    model = counted.count(config, tmp_path)
    assert model.evaluate()["loss"] == pytest.approx(2.4835, abs=1e-4)
    assert np.isfinite(model.predict(["ROMEO: é"])[0]["log_likelihood"])
