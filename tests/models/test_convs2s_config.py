"""Configs of ConvS2S: what is wrong with a value."""

import dataclasses

import pytest

from transformer_jax.models.convs2s_config import ConvS2SConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_encoder_layers": 0}, "num_encoder_layers = 0: must be at least 1"),
        ({"decoder_kernel_width": 0}, "decoder_kernel_width = 0: must be at least 1"),
        ({"encoder_kernel_width": -1}, "encoder_kernel_width = -1: must be at least 1"),
        ({"encoder_kernel_width": 4}, "encoder_kernel_width = 4: must be odd, .* 3"),
        ({"embedding_dim": 0}, "embedding_dim = 0: must be at least 1"),
        ({"dropout_rate": 1.0}, r"dropout_rate = 1.0: must be in \[0, 1\); 0 disables"),
        ({"dtype": "float16"}, "dtype = 'float16': must be one of float32, bfloat16"),
        ({"architecture": "recurrent"}, "architecture = 'recurrent': must be one of"),
    ],
)
def test_config_problems(changes, message):
    config = dataclasses.replace(ConvS2SConfig(), **changes)
    assert [name for name, _ in config.problems()] == list(changes)
    with pytest.raises(ValueError, match=f"ConvS2SConfig.{message}"):
        config.check()


@pytest.mark.parametrize("changes", [{}, {"decoder_kernel_width": 4}])
def test_valid_configs(changes):
    config = dataclasses.replace(ConvS2SConfig(), **changes)
    assert not [*config.problems()]
    config.check()
