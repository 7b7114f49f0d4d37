"""Keys of config.json: types, aliases and widths of heads."""

import pytest

from transformer_jax.interop.architecture import ConfigMap, FieldError, typed, widths
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.gpt import GPTConfig

SIZES = {"n_embd": ("d_model", 768), "n_head": ("num_heads", 12)}
MAP = ConfigMap(GPTConfig, SIZES, aliases={"hidden_size": "n_embd"})


def test_integers_count_as_floats_and_nothing_else_does():
    value = typed({"rate": 1}, "rate", 0.1, float)
    assert (value, type(value)) == (1.0, float)
    with pytest.raises(InteropError, match="rate = '1' must be of type float"):
        typed({"rate": "1"}, "rate", 0.1, float)
    with pytest.raises(InteropError, match="must be of type int"):
        typed({"size": True}, "size", 3, int)


def test_heads_share_the_width_of_the_model():
    assert widths({"d_model": 12, "num_heads": 3}) == {"head_dim": 4, "value_dim": 4}
    with pytest.raises(FieldError, match="must be a multiple of the number of heads"):
        widths({"d_model": 12, "num_heads": 5})


def test_an_alias_means_its_key_and_must_agree_with_it():
    assert MAP.read({"hidden_size": 24, "n_head": 2})["d_model"] == 24
    assert MAP.read({"hidden_size": 24, "n_embd": 24, "n_head": 2})["head_dim"] == 12
    with pytest.raises(InteropError, match="hidden_size = 24 and n_embd = 36 mean"):
        MAP.read({"hidden_size": 24, "n_embd": 36, "n_head": 2})


def test_a_rule_that_is_broken_names_their_key():
    with pytest.raises(InteropError, match=r"n_embd = 7 \(here, config.model.d_model"):
        MAP.read({"n_embd": 7, "n_head": 2})
