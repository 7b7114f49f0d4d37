"""The keys of rotary positions, in both directions."""

import pytest

from transformer_jax.interop import rope
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.gpt import GPTConfig

LENGTH = {"original_max_position_embeddings": 512}


def test_older_names_and_defaults():
    """rope_parameters wins over rope_scaling, and YaRN has defaults."""
    old = {"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 7.0}}
    assert rope.read(old)["rotary_factor"] == 2.0
    assert rope.base(old) == 7.0
    new = {"rope_parameters": {"rope_type": "default", "type": "linear"}}
    assert rope.read({**old, **new}) == {"rotary_scaling": "none"}
    yarn = {"rope_scaling": {"rope_type": "yarn", **LENGTH}}
    assert rope.read({**yarn, "max_position_embeddings": 2048}) == {
        "rotary_scaling": "yarn",
        "rotary_factor": 4.0,
        "rotary_length": 512,
        "rotary_slow": 1.0,
        "rotary_fast": 32.0,
    }


def test_a_factor_of_attention_must_be_that_of_the_paper():
    right = {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.0, **LENGTH}
    assert rope.read({"rope_scaling": right})["rotary_factor"] == 1.0
    wrong = {**right, "attention_factor": 1.2}
    with pytest.raises(InteropError, match=r"attention_factor = 1\.2 .* only 1\.0"):
        rope.read({"rope_scaling": wrong})


def test_dynamic_positions_have_the_length_of_the_model():
    model = GPTConfig(rotary_scaling="dynamic", max_length=100, rotary_length=50)
    with pytest.raises(InteropError, match=r"length = 50: .*max_length = 100"):
        rope.write(model)
