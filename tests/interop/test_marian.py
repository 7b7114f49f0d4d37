"""Marian of transformers without transformers: files written by hand, by the layouts
of torch's modules.
"""

import json

import numpy as np
import pytest

from helpers.marian_folders import (
    CONFIG,
    IDS,
    KINDS,
    SEPARATELY,
    SHARED,
    D,
    F,
    H,
    N,
    T,
    V,
    save,
)
from helpers.parity import flat
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.models.transformer import TransformerConfig


@pytest.mark.parametrize("ties", KINDS)
def test_a_file_is_read_and_written_again_bit_for_bit(ties, tmp_path):
    names, changes = KINDS[ties]
    tensors = save(tmp_path / "theirs", names, **changes)
    found = huggingface.read(tmp_path / "theirs")
    assert found.model == TransformerConfig(
        source_vocab_size=V,
        target_vocab_size=V if ties == "all" else 29,
        tie_embeddings=ties,
        num_encoder_layers=2,
        num_decoder_layers=3,
        d_model=D,
        d_ff=F,
        num_heads=N,
        head_dim=H,
        value_dim=H,
        max_length=T,
        activation="silu",
        positions="sinusoidal_halves",
        output_bias=True,
        norm_epsilon=1e-5,
    )
    params = flat(found.params())
    query = tensors["model.decoder.layers.2.encoder_attn.q_proj.weight"]
    np.testing.assert_array_equal(
        params["decoder/layers/cross_attention/query/kernel"][2].reshape(D, D), query.T
    )
    bias = params["output/bias" if ties == "none" else "output_bias"]
    np.testing.assert_array_equal(bias, tensors["final_logits_bias"][0])
    again = tmp_path / "again"
    huggingface.write(
        again,
        "sequence_to_sequence",
        found.model,
        found.params(),
        found.outputs.settings,
        special_ids=IDS,
    )
    written = Tensors(again)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    config = json.loads((again / "config.json").read_text())
    expected = (
        CONFIG
        | changes
        | {
            "pad_token_id": 30,
            "decoder_start_token_id": 30,
            "eos_token_id": 0,
        }
    )
    assert {key: config[key] for key in expected} == expected


def test_fixed_positions_and_tied_tables_need_no_place(tmp_path):
    tables = {
        f"model.{stack}.embed_{kind}.weight": (V, D)
        for stack in ("encoder", "decoder")
        for kind in ("tokens", "positions")
    }
    save(tmp_path, SHARED | tables | {"lm_head.weight": (V, D)})
    assert "target_embedding/table" in huggingface.read(tmp_path).parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder_attention_heads": 7},
            (
                "encoder_attention_heads = 3 and decoder_attention_heads = 7 "
                "are unsupported"
            ),
        ),
        (
            {"encoder_ffn_dim": 24},
            (
                "encoder_ffn_dim = 24 and decoder_ffn_dim = 23 are unsupported: "
                "they must be equal"
            ),
        ),
        (
            {"tie_word_embeddings": False},
            (
                "tie_word_embeddings = False is not supported "
                "with share_encoder_decoder_emb"
            ),
        ),
        (
            {"encoder_layerdrop": 0.1},
            "encoder_layerdrop = 0.1 is not supported, only 0.0",
        ),
        (
            {"activation_function": "tanh"},
            "activation_function = 'tanh' is not supported: choose from gelu",
        ),
        ({"early_stopping": "soon"}, "early_stopping = 'soon' is not supported"),
        (
            {"early_stopping": ["soon"]},
            (
                r"early_stopping = \['soon'\] is not supported: choose from False,"
                r" True, 'never'"
            ),
        ),
        (
            {"max_length": "512"},
            "max_length = '512' must be of type int: copy the file again",
        ),
        (
            {"max_length": 1},
            "generation_config.json or config.json: max_length = 1: must be at least 2",
        ),
        (
            {"num_beams": 0},
            "generation_config.json or config.json: num_beams = 0: must be at least 1",
        ),
        ({"length_penalty": "long"}, "length_penalty = 'long' must be of type float"),
        (
            {"dropout": 1.0},
            (
                r"config.json: dropout = 1.0 \(here, config.model.dropout_rate\): must"
                r" be in \[0, 1\)"
            ),
        ),
        (
            {"decoder_layers": 0},
            (
                r"decoder_layers = 0 \(here, config.model.num_decoder_layers\): must be"
                r" at least 1"
            ),
        ),
        (
            {"decoder_vocab_size": 29},
            (
                "decoder_vocab_size = 29: "
                "must be vocab_size = 31, or set share_encoder_decoder_"
            ),
        ),
        ({"decoder_vocab_size": "29"}, "decoder_vocab_size = '29' must be of type int"),
        ({"decoder_layers": 2}, "These tensors have no place in config.json"),
        (SEPARATELY, "These tensors are missing"),
    ],
)
def test_what_is_not_supported_is_said(changes, message, tmp_path):
    save(tmp_path, SHARED, **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.read(tmp_path)


def test_settings_of_generate_are_those_of_decoding(tmp_path):
    save(
        tmp_path / "theirs", SHARED, num_beams=6, max_length=512, forced_eos_token_id=0
    )
    found = huggingface.read(tmp_path / "theirs")
    expected = {
        "beam_size": 6,
        "length_penalty": 1.0,
        "length_penalty_form": "power",
        "stopping_rule": "hf_false",
        "at_limit": "end",
        "max_ratio": 0.0,
        "max_extra": 511,
    }
    assert found.outputs.settings == {
        f"decoding.{key}": value for key, value in expected.items()
    }
    settings = found.outputs.settings | {
        "decoding.stopping_rule": "hf_true",
        "decoding.length_penalty": 0.7,
    }
    huggingface.write(
        tmp_path / "again",
        "sequence_to_sequence",
        found.model,
        found.params(),
        settings,
        special_ids=IDS,
    )
    generation = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 30,
        "decoder_start_token_id": 30,
        "bad_words_ids": [[30]],
        "forced_eos_token_id": 0,
        "num_beams": 6,
        "early_stopping": True,
        "length_penalty": 0.7,
        "max_length": 512,
    }
    assert huggingface.read(tmp_path / "again").outputs.settings == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": "sinusoidal"},
            "config.model.positions = 'sinusoidal': transformers' model has only 'sin",
        ),
        (
            {"output_bias": False},
            "config.model.output_bias = False: transformers' model has only True",
        ),
        (
            {"tie_embeddings": "embeddings"},
            "config.model.tie_embeddings = 'embeddings': transformers has only all,",
        ),
        (
            {"scale_scores": False},
            "config.model.scale_scores = False: transformers' model has only True",
        ),
        (
            {"activation": "quick"},
            "config.model.activation = 'quick': transformers has only",
        ),
    ],
)
def test_models_that_transformers_lacks_are_refused(changes, message, tmp_path):
    sizes = {"d_model": D, "num_heads": N, "head_dim": H, "value_dim": H}
    fields = {
        "positions": "sinusoidal_halves",
        "output_bias": True,
        "norm_epsilon": 1e-5,
    } | sizes
    model = TransformerConfig(**fields | changes)
    with pytest.raises(InteropError, match=message):
        huggingface.write(
            tmp_path, "sequence_to_sequence", model, {}, {}, special_ids=IDS
        )


def test_a_vocabulary_without_an_end_is_refused(tmp_path):
    save(tmp_path / "theirs", SHARED)
    found = huggingface.read(tmp_path / "theirs")
    with pytest.raises(
        InteropError, match="the tokenizer has no end id, which Marian needs"
    ):
        huggingface.write(
            tmp_path / "again", "sequence_to_sequence", found.model, found.params(), {}
        )
