"""Configs of recurrent models: schedules, and what is wrong with a value."""

import dataclasses

import numpy as np
import pytest

from transformer_jax.models.recurrent_config import RecurrentConfig

V = 23

TINY = RecurrentConfig(
    source_vocab_size=20,
    target_vocab_size=V,
    embedding_dim=6,
    encoder_dim=8,
    d_model=8,
    attention_dim=5,
    num_heads=2,
    readout_dim=7,
    vocab_multiple=4,
)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.9), (50, 0.6), (100, 0.3), (1000, 0.3)]
)
def test_teacher_forcing_by_schedule(step, rate):
    config = RecurrentConfig(
        teacher_forcing=0.9, teacher_forcing_end=0.3, teacher_forcing_steps=100
    )
    np.testing.assert_allclose(config.teacher_forcing_at(step), rate, rtol=1e-6)
    assert config.reads_itself
    np.testing.assert_allclose(
        RecurrentConfig(teacher_forcing=0.9).teacher_forcing_at(step), 0.9, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cell": "rnn"}, "cell"),
        ({"attention": "local"}, "attention"),
        ({"summary": "all"}, "summary"),
        ({"readout": "deep"}, "readout"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"teacher_forcing": 1.5}, "teacher_forcing"),
        (
            {"teacher_forcing_end": -0.5, "teacher_forcing_steps": 1},
            "teacher_forcing_end",
        ),
        ({"teacher_forcing_end": 0.5}, "teacher_forcing_end"),
        ({"teacher_forcing_steps": -1}, "teacher_forcing_steps"),
        ({"dtype": "float16"}, "dtype"),
        (
            {"bidirectional": True, "encoder_dim": 7, "attention": "additive"},
            "encoder_dim",
        ),
        (
            {"bidirectional": True, "reverse_source": True, "attention": "additive"},
            "reverse_source",
        ),
        ({"bidirectional": True}, "summary"),
        ({"encoder_dim": 10}, "encoder_dim"),
        ({"encoder_dim": 10, "bidirectional": True, "attention": "dot"}, "encoder_dim"),
        ({"attention": "multi_head", "num_heads": 3}, "num_heads"),
        ({"attention": "additive", "input_feeding": True}, "input_feeding"),
        ({"local_window": 3}, "local_window"),
        ({"attention": "multi_head", "local_window": 3}, "local_window"),
        ({"damping": True}, "damping"),
        ({"damping": True, "attention": "dot"}, "damping"),
        ({"readout": "maxout"}, "readout"),
        ({"summary": "every_step", "attention": "dot"}, "summary"),
    ],
)
def test_config_problems(changes, field):
    config = dataclasses.replace(TINY, **changes)
    assert field in [name for name, _ in config.problems()]
    with pytest.raises(ValueError, match=f"RecurrentConfig.{field} = "):
        config.check()


def test_all_problems_are_named():
    config = dataclasses.replace(
        TINY, attention="additive", input_feeding=True, local_window=3
    )
    assert [name for name, _ in config.problems()] == ["input_feeding", "local_window"]


def test_config_without_problems():
    assert not list(RecurrentConfig().problems())
