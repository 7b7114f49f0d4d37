"""Config keys of texts and of pairs of texts."""

import dataclasses

import pytest

from transformer_jax.data.text import ParallelData, TextData


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"source": "web"}, "source", "must be one of files, tfds"),
        ({"source": "tfds"}, "name", "must be the data set's name in tfds, e.g."),
        ({"directory": ""}, "directory", "add --config.data.directory=DIR"),
        ({"tokenizer": "bpe"}, "tokenizer", "must be one of bpe_bytes"),
        (
            {"tokenizer": "unigram", "min_count": 2},
            "min_count",
            "must be 1 with data.tokenizer = 'unigram'",
        ),
        (
            {"vocabulary": "vocab.txt", "tokenizer": "wordpiece"},
            "vocabulary",
            "must be '' unless data.tokenizer = 'bert'",
        ),
        ({"max_length": 1}, "max_length", "at least 2"),
        ({"tokenizer_lines": -1}, "tokenizer_lines", "at least 1, or 0 for all"),
        ({"max_buckets": 0}, "max_buckets", "at least 1"),
        (
            {"batch_tokens": 255, "max_length": 32},
            "batch_tokens",
            "set it to 256 or more",
        ),
        (
            {"target_language": "en"},
            "target_language",
            "must differ from source_language",
        ),
        ({"max_ratio": 0.5}, "max_ratio", "at least 1, or 0"),
        ({"max_ratio": float("nan")}, "max_ratio", "at least 1, or 0"),
        ({"source_frame": ("<s>",)}, "source_frame", "must be two tokens, e.g."),
        (
            {"target_frame": ("<s>", "a"), "max_length": 3},
            "max_length",
            "must be at least 4 with these frames",
        ),
    ],
)
def test_problems_of_the_config(change, field, rule):
    good = ParallelData(directory="somewhere")
    assert list(good.problems()) == []
    ((found, message),) = dataclasses.replace(good, **change).problems()
    assert found == field
    assert rule in message


def test_what_the_config_declares_of_its_fields():
    fields = {field.name: field.metadata for field in dataclasses.fields(TextData)}
    free = {name for name, metadata in fields.items() if metadata.get("free")}
    assert free == {"directory", "validation_split", "test_split", "vocabulary"}
    small = {
        name: metadata["small"]
        for name, metadata in fields.items()
        if "small" in metadata
    }
    assert list(TextData(directory="d", **small).problems()) == []
    assert (small["max_length"], small["batch_tokens"], small["max_buckets"]) == (
        32,
        1024,
        1,
    )
