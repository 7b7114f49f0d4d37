"""Records for a predictor, and its progress."""

import logging

import pytest

import transformer_jax
from transformer_jax.data import progress
from transformer_jax.predictor import Predictor


@pytest.fixture(scope="module")
def predictor(trained) -> Predictor:
    return transformer_jax.load(trained)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([None], "record 1 is None, of type NoneType: it must be a line of text"),
        (["ek", 3], "record 2 is 3, of type int"),
        ([b"ek"], "record 1 is b'ek', of type bytes: .*decode it"),
        ([["ek"]], "record 1 is .* of type list"),
        ([{"de": "dk"}], "record 1 has the fields de: it must have en"),
        ([{}], r"record 1 has the fields \(none\): it must have en"),
        ([{"en": None}], "record 1 has en = None: it must be text"),
        (
            "ek at",
            "'ek at' is one record, not a list of records: put it in square brackets",
        ),
        ({"en": "ek"}, "is one record, not a list"),
        (b"ek", "is one record, not a list"),
        (None, "None is not a list of records"),
        (5, "5 is not a list of records"),
    ],
)
def test_what_is_no_record(predictor, records, words):
    for method in (predictor.predict, predictor.attention):
        with pytest.raises(ValueError, match=words):
            method(records)


def test_a_translation_model_does_not_embed(predictor):
    with pytest.raises(ValueError, match="sequence_to_sequence does not embed texts"):
        predictor.embed(["ek"])


def test_records_may_come_one_by_one(predictor):
    assert len(predictor.predict(line for line in ("ek", "at", ""))) == 3
    assert predictor.predict([]) == []


def test_long_predictions_tell_how_far_they_are(predictor, monkeypatch, caplog):
    monkeypatch.setattr(progress, "EVERY", (0.001, 0.001))
    with caplog.at_level(logging.INFO, logger="transformer_jax"):
        predictor.predict(["ek at ek"] * 5)
    assert "0 of 5 examples done; compiling for the first batch" in caplog.text
