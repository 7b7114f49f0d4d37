"""Options of decoding: what is wrong with them is said."""

import dataclasses

import pytest

from transformer_jax.decoding import DecodingConfig, GenerationConfig, SamplingConfig

VALID = DecodingConfig(
    beam_size=4,
    length_penalty=0.6,
    length_penalty_form="wu",
    max_ratio=1.0,
    max_extra=50,
)


def test_valid_config_has_no_problems_and_limits_the_output():
    assert list(VALID.problems()) == []
    assert VALID.max_length(7) == 57
    assert dataclasses.replace(VALID, max_ratio=1.5, max_extra=3).max_length(7) == 13
    assert dataclasses.replace(VALID, max_ratio=1e308).max_length(100) > 10**9
    assert (
        list(
            dataclasses.replace(
                VALID, temperature=0.7, top_k=5, top_p=0.9, n_best=9
            ).problems()
        )
        == []
    )
    assert list(dataclasses.replace(VALID, n_best=4).problems()) == []


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("beam_size", 0, "at least 1; use 1"),
        ("length_penalty", -0.1, "at least 0; use 0 "),
        ("length_penalty", float("nan"), "finite"),
        ("length_penalty", float("inf"), "finite"),
        ("length_penalty_form", "gnmt", "one of wu, power; use wu"),
        (
            "stopping_rule",
            "soon",
            "one of exact, hf_never, hf_false, hf_true; use exact",
        ),
        ("at_limit", "stop", "cut, or end for outputs"),
        ("max_ratio", -1.0, "at least 0; use 1.0"),
        ("max_ratio", float("inf"), "finite"),
        (
            "max_extra",
            0,
            "at least 1, because outputs could otherwise be empty; use 50",
        ),
        (
            "temperature",
            -0.1,
            "0 or at least 1e-06; use 0 for the most probable output, 1.0 to sample",
        ),
        (
            "temperature",
            1e-7,
            "0 or at least 1e-06; use 0 for the most probable output, 1.0 to sample",
        ),
        ("temperature", float("inf"), "finite"),
        ("top_k", -1, "at least 0; use 0"),
        (
            "top_k",
            5,
            "needs sampling: set decoding.temperature, e.g. to 1.0, or top_k to 0",
        ),
        ("top_p", 0.0, "in (0, 1]; use 1.0"),
        ("top_p", 1.1, "in (0, 1]; use 1.0"),
        (
            "top_p",
            0.9,
            "needs sampling: set decoding.temperature, e.g. to 1.0, or top_p to 1.0",
        ),
        ("seed", -1, "in [0, 2³¹)"),
        ("n_best", 0, "at least 1"),
        (
            "n_best",
            5,
            (
                "at most 4, the number of outputs that a search finds: "
                "raise decoding.beam_size to n_best (encoder–decoders only), "
                "or sample with decoding.temperature = 1.0"
            ),
        ),
    ],
)
def test_problems(field, value, rule):
    [(name, message)] = dataclasses.replace(VALID, **{field: value}).problems()
    assert name == field
    assert rule in message


def test_all_problems_at_once():
    wrong = {
        "max_extra": 0,
        "temperature": -1.0,
        "top_k": -1,
        "top_p": 0.0,
        "seed": -1,
        "n_best": 0,
        "end_ids": (-1,),
        "forbidden_ids": (3, -2),
        "min_tokens": -1,
        "no_repeat_ngram": -1,
        "repetition_penalty": 0.0,
        "beam_size": 0,
        "length_penalty": -1.0,
        "length_penalty_form": "",
        "stopping_rule": "",
        "at_limit": "",
        "first_id": -2,
        "max_ratio": -1.0,
    }
    assert {*wrong, "renormalize"} == {
        field.name for field in dataclasses.fields(DecodingConfig)
    }
    assert [name for name, _ in DecodingConfig(**wrong).problems()] == list(wrong)


def test_without_beams_a_search_finds_one():
    assert list(SamplingConfig().problems()) == []
    ((name, rule),) = SamplingConfig(n_best=2).problems()
    assert name == "n_best"
    assert "at most 1, the number of outputs that a search finds" in rule
    assert list(SamplingConfig(n_best=2, temperature=1.0).problems()) == []


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("repetition_penalty", 0.0, "must be finite, positive; use 1.0 for none, 1.2"),
        ("repetition_penalty", float("inf"), "must be finite"),
        (
            "stop_strings",
            ("\n", ""),
            r"must hold strings that are not empty, e.g. ('\n',); use () for none",
        ),
        ("stop_strings", (3,), "must hold strings"),
    ],
)
def test_problems_of_generation(field, value, rule):
    assert not [
        *GenerationConfig(stop_strings=("\n", "END"), repetition_penalty=0.7).problems()
    ]
    ((name, message),) = GenerationConfig(**{field: value}).problems()
    assert name == field
    assert rule in message
