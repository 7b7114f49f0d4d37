"""Embeddings that start with word vectors: the rules, and the rows."""

import dataclasses
import logging

import numpy as np
import pytest

from helpers.runs import small
from helpers.vectors import reading_words, write_vectors
from transformer_jax.config import ConfigError, parse
from transformer_jax.data.files import DataError
from transformer_jax.data.tokenizer_training import KINDS
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.errors import UserError
from transformer_jax.models.layers import TokenVectors
from transformer_jax.tasks.word_tables import WordTable

TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat", ""]
BEGINNINGS = {
    "random": "start with random values",
    "zero": "start with zeros",
    "mean": "start with the mean of these vectors",
}


def problems(config):
    with pytest.raises(ConfigError) as error:
        parse(config)
    return str(error.value).splitlines()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "vectors.txt"


def table(file, width=3, factor=1.0, is_output=False, **options):
    return WordTable(
        "vectors",
        VectorsConfig(str(file), **options),
        TokenVectors("d_model", width, factor, is_output),
        "text",
        "embedding/table",
    )


@pytest.mark.parametrize("missing", ["random", "zero", "mean"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_rows_are_the_vectors_and_for_what_is_missing_the_choice(
    file, factor, missing, caplog
):
    """Rows are divided by what the model multiplies them by."""
    words = write_vectors(file, ["the", "dog", "cat"], 3)
    caplog.set_level(logging.INFO)
    rows, given = table(file, factor=factor, missing=missing).rows(TOKENS)
    assert rows.dtype == np.float32
    for i in (4, 5):
        np.testing.assert_array_equal(rows[i], words[TOKENS[i]] / np.float32(factor))
    others = {
        "zero": np.zeros(3),
        "mean": (words["the"] + words["cat"]) / 2 / factor,
    }
    lacking = [0, 1, 2, 3, 6, 7]
    if missing == "random":
        assert given.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    else:
        assert given.all()
        for row in rows[lacking]:
            np.testing.assert_allclose(row, others[missing], rtol=1e-6)
    said = f"vectors: {file} has 2 of the 7 tokens of the vocabulary; the other 5 "
    said += f"{BEGINNINGS[missing]}: <pad> <s> </s> <unk> sat"
    assert caplog.messages == [said]


def test_the_log_names_the_first_tokens_that_are_missing(file, caplog):
    caplog.set_level(logging.INFO)
    write_vectors(file, ["a"], 2)
    options = table(file, width=2)
    options.rows(["a", *"bcdefghijk"])
    options.rows(["a"])
    assert caplog.messages == [
        f"vectors: {file} has 1 of the 11 tokens of the vocabulary; "
        "the other 10 start with random values: b c d e f g h i …",
        f"vectors: {file} has 1 of the 1 tokens of the vocabulary",
    ]


def test_a_file_without_any_of_the_tokens_is_refused(file):
    write_vectors(file, ["The", "Cat"], 3)
    with pytest.raises(UserError) as error:
        table(file).rows(TOKENS[:-1])
    assert str(error.value) == (
        f"config.vectors.file = {str(file)!r} has none of the 7 tokens of the "
        "vocabulary, e.g. 'sat': name a file of their language, and set data.lowercase "
        "to True if its words are in lower case"
    )


def test_vectors_of_another_width_are_refused(file):
    write_vectors(file, ["the"], 3)
    table(file).check()
    with pytest.raises(UserError) as error:
        table(file, width=4).check()
    assert str(error.value) == (
        f"config.vectors.file = {str(file)!r}: its vectors have 3 numbers, but "
        "config.model.d_model = 4: set model.d_model to 3, or name another file"
    )


def test_a_file_that_is_missing_is_named_with_its_key(file):
    with pytest.raises(DataError) as error:
        table(file).check()
    assert str(error.value) == (
        f"config.vectors.file: {file} cannot be read: No such file or directory. "
        "Name a file of word vectors."
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
def test_other_tokenizers_are_refused_with_the_reason(tmp_path, kind):
    config = small("classification", tmp_path)
    config.data.tokenizer = kind
    config.vectors.file = "v.txt"
    assert problems(config) == [
        "config.vectors.file = 'v.txt': needs data.tokenizer = 'words': the tokens of "
        f"{kind!r} are not whole words, so the file has no vectors for them. "
        "Change the tokenizer, or set this to ''"
    ]


def test_without_a_file_no_rule_applies(tmp_path):
    config = small("classification", tmp_path)
    parsed = parse(config)
    assert not parsed.given_tables
    assert not parsed.frozen


@pytest.mark.parametrize(
    ("task", "changes", "messages"),
    [
        (
            "classification",
            {"init_from": "run", "vectors.file": "v.txt"},
            [
                "config.vectors.file = 'v.txt': must be '' with init_from, whose "
                "embedding is used: choose one"
            ],
        ),
        (
            "language_modeling",
            {"vectors.frozen": True, "vectors.missing": "none"},
            [
                "config.vectors.missing = 'none': must be one of random, zero, mean",
                "config.vectors.frozen = True: needs a file of word vectors: "
                "set file in this section, or this to False",
            ],
        ),
        (
            "sequence_to_sequence",
            {
                "source_vectors.file": "v.txt",
                "model.tie_embeddings": "all",
                "data.joint_tokenizer": True,
            },
            [
                "config.source_vectors.file = 'v.txt': must be '', because source and "
                "target share one embedding: set target_vectors.file, or "
                "model.tie_embeddings to 'decoder'"
            ],
        ),
        (
            "sequence_to_sequence",
            {
                "source_vectors.file": "v.txt",
                "input.modality": "frames",
                "model.tie_embeddings": "none",
            },
            [
                "config.source_vectors.file = 'v.txt': must be '' with "
                "input.modality = 'frames'"
            ],
        ),
        (
            "transcription",
            {
                "target_vectors.file": "v.txt",
                "data.joint_tokenizer": False,
                "model.tie_embeddings": "none",
                "training.ctc_weight": 1.0,
                "training.label_smoothing": 0.0,
                "decoding.ctc_weight": 1.0,
            },
            [
                "config.target_vectors.file = 'v.txt': must be '' with "
                "training.ctc_weight = 1, which reads no tokens"
            ],
        ),
    ],
)
def test_sections_are_checked_together(tmp_path, task, changes, messages):
    config = reading_words(task, tmp_path)
    config.update_from_flattened_dict(changes)
    assert problems(config) == messages


FROZEN_OUTPUT = (
    "{}.frozen = True: this embedding is also the output layer, whose weights are "
    "frozen with it; to train them, give the output layer its own table, "
    "if model.tie_embeddings is a key"
)


@pytest.mark.parametrize(
    ("task", "section", "ties", "warned"),
    [
        ("language_modeling", "vectors", True, True),
        ("language_modeling", "vectors", False, False),
        ("bert_pretraining", "vectors", None, True),
        ("classification", "vectors", None, False),
        ("sequence_to_sequence", "source_vectors", "decoder", False),
        ("sequence_to_sequence", "target_vectors", "decoder", True),
        ("sequence_to_sequence", "target_vectors", "none", False),
    ],
)
def test_a_frozen_output_layer_causes_a_warning(
    tmp_path, caplog, task, section, ties, warned
):
    config = reading_words(task, tmp_path)
    config[section].file = "v.txt"
    config[section].frozen = True
    if ties is not None:
        config.model.tie_embeddings = ties
    parsed = parse(config)
    said = FROZEN_OUTPUT.format(f"config.{section}")
    assert (said in caplog.messages) == warned
    (given,) = parsed.given_tables
    assert parsed.frozen == {given.path: given.size}


def test_the_embedding_of_a_transcription_is_that_of_its_decoder(tmp_path):
    config = reading_words("transcription", tmp_path)
    config.data.joint_tokenizer = False
    config.model.tie_embeddings = "none"
    config.target_vectors.file = "v.txt"
    (given,) = parse(config).given_tables
    assert dataclasses.replace(given, options=None) == WordTable(
        "target_vectors",
        None,
        parse(config).model.token_vectors,
        "target",
        "model/target_embedding/table",
    )
