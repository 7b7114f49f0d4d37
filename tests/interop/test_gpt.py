"""GPT, GPT-2 and Llama of transformers without transformers: files written by hand,
by the layouts of their modules.
"""

import dataclasses
import json

import numpy as np
import pytest

from helpers.gpt_folders import (
    GPT2,
    LLAMA,
    D,
    F,
    L,
    N,
    T,
    gpt2_shapes,
    llama_shapes,
    save,
)
from helpers.parity import flat, write_back
from transformer_jax.interop import gpt, huggingface
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.gpt import GPTConfig


def check_round_trip(found, folder):
    params = found.params()
    write_back(found, params, folder)
    again = huggingface.read(folder)
    assert again.model == found.model
    for path, value in flat(again.params()).items():
        np.testing.assert_array_equal(value, flat(params)[path], err_msg=path)


def test_gpt2_without_prefix(tmp_path):
    """Published files of GPT-2 have no prefix, and hold the masks of attention."""
    shapes = gpt2_shapes() | {
        f"h.{layer}.attn.bias": (1, 1, T, T) for layer in range(L)
    }
    tensors = save(tmp_path / "theirs", GPT2, shapes)
    found = huggingface.read(tmp_path / "theirs")
    assert (found.architecture.task, found.model.norm, found.model.d_ff) == (
        "language_modeling",
        "pre",
        F,
    )
    assert (
        found.model.activation,
        found.model.num_kv_heads,
        found.model.tie_embeddings,
    ) == ("gelu_tanh", 0, True)
    params = flat(found.params())
    joined = tensors["h.1.attn.c_attn.weight"].reshape(D, 3, N, D // N)
    for i, name in enumerate(("query", "key", "value")):
        np.testing.assert_array_equal(
            params[f"decoder/layers/self_attention/{name}/kernel"][1], joined[:, i]
        )
    np.testing.assert_array_equal(
        params["decoder/layers/feed_forward/inner/kernel"][0],
        tensors["h.0.mlp.c_fc.weight"],
    )
    check_round_trip(found, tmp_path / "ours")


def test_llama(tmp_path):
    tensors = save(tmp_path / "theirs", LLAMA | {"rope_theta": 77.0}, llama_shapes())
    found = huggingface.read(tmp_path / "theirs")
    model = found.model
    assert (model.head_dim, model.value_dim, model.num_kv_heads, model.rotary_base) == (
        4,
        4,
        2,
        77.0,
    )
    assert (model.dropout_rate, model.tie_embeddings, model.attention_bias) == (
        0.0,
        False,
        False,
    )
    params, theirs = (
        flat(found.params()),
        tensors["model.layers.1.self_attn.k_proj.weight"].reshape(2, 4, D),
    )
    ours = params["decoder/layers/self_attention/key/kernel"][1]
    np.testing.assert_array_equal(ours, np.moveaxis(theirs[:, [0, 2, 1, 3]], 2, 0))
    gate = tensors["model.layers.0.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(
        params["decoder/layers/feed_forward/gate/kernel"][0], gate.T
    )
    np.testing.assert_array_equal(params["output/table"], tensors["lm_head.weight"])
    check_round_trip(found, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}


def test_configs_that_leave_sizes_out():
    """They take the defaults of transformers, some of which follow from other keys."""
    model = GPTConfig(**gpt.GPT2.read({"n_embd": 24, "n_inner": None}))
    assert (model.d_ff, model.head_dim, model.max_length, model.vocab_size) == (
        96,
        2,
        1024,
        50257,
    )
    model = GPTConfig(**gpt.OPENAI.read({}))
    assert (model.norm, model.activation, model.d_ff, model.head_dim) == (
        "post",
        "gelu_tanh",
        3072,
        64,
    )
    assert gpt.OPENAI.write(model)["afn"] == "gelu"
    model = GPTConfig(
        **gpt.LLAMA.read(
            {"num_key_value_heads": None, "rope_scaling": None, "head_dim": None}
        )
    )
    assert (model.num_kv_heads, model.head_dim, model.rotary_base) == (0, 128, 10000.0)
    assert gpt.LLAMA.write(model)["num_key_value_heads"] == 32
    assert gpt.LLAMA.read(gpt.LLAMA.write(model)) == gpt.LLAMA.read({}) | {
        "num_kv_heads": 32
    }
    theta = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_theta": 7.0,
    }
    assert gpt.LLAMA.read(theta)["rotary_base"] == 5.0


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            gpt.GPT2,
            {"embd_pdrop": 0.2},
            (
                r"embd_pdrop = 0\.2 and resid_pdrop = 0\.1 are not supported: set both"
                r" to one"
            ),
        ),
        (
            gpt.GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True is not",
        ),
        (
            gpt.GPT2,
            {"activation_function": "mish"},
            "activation_function = 'mish' is not supported: choose",
        ),
        (
            gpt.OPENAI,
            {"n_head": 7},
            r"n_embd = 768 \(here, config.model.d_model\): must be a mul",
        ),
        (
            gpt.LLAMA,
            {"rope_scaling": [1]},
            r"rope_scaling = \[1\] must be of type dict: copy the file again",
        ),
        (
            gpt.LLAMA,
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_type = 'longrope' is not supported: choose from default, linear, dyn",
        ),
        (
            gpt.LLAMA,
            {"rope_scaling": {"type": "linear"}},
            "rope_parameters lacks factor, which rope_type = 'linear' needs",
        ),
        (
            gpt.LLAMA,
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            "rotary_factor = 0.5 .*must be at least 1",
        ),
        (
            gpt.LLAMA,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters has positions for 'full_attention' alone",
        ),
        (
            gpt.LLAMA,
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 0.7}
                | {"mscale_all_dim": 1.0}
            },
            "attention_factor = .* is not supported, only 1.13",
        ),
        (
            gpt.LLAMA,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False}},
            "truncate = False is not supported, only True",
        ),
        (
            gpt.QWEN2,
            {"use_sliding_window": True},
            "use_sliding_window = True is not supported, only False",
        ),
        (
            gpt.QWEN3,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention: supported are layers of full",
        ),
        (
            gpt.GPT2,
            {"resid_pdrop": 1, "embd_pdrop": 1},
            r"embd_pdrop = 1.0 \(here, config.model.dropout_rate\): must",
        ),
        (
            gpt.LLAMA,
            {"num_key_value_heads": 5},
            r"num_key_value_heads = 5 \(here, config.model.num_kv_heads\): must d",
        ),
        (
            gpt.LLAMA,
            {"head_dim": 3},
            r"config.json: head_dim = 3 \(here, config.model.head_dim\): must be even",
        ),
        (
            gpt.LLAMA,
            {"rope_parameters": {"rope_theta": -1.0}},
            r"rope_theta = -1.0 \(here, config.model.rotary_base\)",
        ),
    ],
)
def test_what_is_not_supported(config, changes, message):
    with pytest.raises(InteropError, match=message):
        config.read(changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            gpt.GPT2,
            {"positions": "rotary"},
            "positions = 'rotary': transformers' model has only 'learned'",
        ),
        (
            gpt.OPENAI,
            {"d_ff": 95},
            r"config\.model\.d_ff = 95: transformers' model has only 3072",
        ),
        (
            gpt.OPENAI,
            {"activation": "gelu"},
            r"config\.model\.activation = 'gelu': transformers has only silu, relu",
        ),
        (
            gpt.LLAMA,
            {"value_dim": 3},
            r"config\.model\.value_dim = 3: transformers' model has only 128",
        ),
    ],
)
def test_what_transformers_lacks(config, changes, message):
    model = GPTConfig(**config.read({}))
    with pytest.raises(InteropError, match=message):
        config.write(dataclasses.replace(model, **changes))


def test_the_model_type_follows_from_the_model(tmp_path):
    """A language model is written as the first of the three that can be it, or the
    reason is said for each.
    """
    save(tmp_path / "theirs", GPT2, gpt2_shapes())
    found = huggingface.read(tmp_path / "theirs")
    huggingface.write(
        tmp_path / "ours", "language_modeling", found.model, found.params(), {}
    )
    assert (
        json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"]
        == "gpt2"
    )
    model = dataclasses.replace(found.model, positions="none")
    with pytest.raises(
        InteropError,
        match=r"not openai-gpt: .*; not gpt2: .*positions = 'none'.*; not llama: ",
    ):
        huggingface.write(
            tmp_path / "other", "language_modeling", model, found.params(), {}
        )


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    "rotary",
    [
        LLAMA_3,
        YARN,
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ],
    ids=lambda rotary: rotary["rope_type"],
)
def test_scaled_positions(rotary):
    model = GPTConfig(**gpt.LLAMA.read({"rope_scaling": rotary}))
    assert model.scaling.kind == rotary["rope_type"]
    assert model.scaling.factor == rotary["factor"]
    written = gpt.LLAMA.write(model)
    assert written["rope_parameters"] == rotary
    assert gpt.LLAMA.read(written) == gpt.LLAMA.read({"rope_scaling": rotary}) | {
        "num_kv_heads": 32
    }


def test_descendants_of_llama():
    model = GPTConfig(**gpt.MISTRAL.read({}))
    assert (model.attention_window, model.num_kv_heads) == (4096, 8)
    assert gpt.MISTRAL.write(model)["sliding_window"] == 4096
    model = GPTConfig(**gpt.MISTRAL.read({"sliding_window": None}))
    assert model.attention_window == 0
    assert gpt.MISTRAL.write(model)["sliding_window"] is None
    model = GPTConfig(**gpt.QWEN2.read({"sliding_window": 131072}))
    assert model.attention_bias
    assert not model.attention_output_bias
    with pytest.raises(InteropError, match=r"output_bias = False: .* only True"):
        gpt.LLAMA.write(model)
    model = GPTConfig(**gpt.QWEN3.read({}))
    assert (model.qk_norm, model.head_dim, model.attention_bias) == (True, 128, False)
    with pytest.raises(InteropError, match=r"qk_norm = True: .* only False"):
        gpt.LLAMA.write(model)
    scaled = GPTConfig(rotary_scaling="linear", d_model=24, num_heads=3)
    with pytest.raises(
        InteropError, match=r"rotary_scaling = 'linear': .* only 'none'"
    ):
        gpt.GPT2.write(scaled)
