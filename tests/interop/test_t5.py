"""T5 of transformers without transformers: files written by hand, by the layouts of
torch's modules.
"""

import json

import numpy as np
import pytest

from helpers.parity import flat
from helpers.t5_folders import (
    CONFIG,
    IDS,
    KINDS,
    V1_1,
    D,
    F,
    H,
    N,
    R,
    V,
    save,
    shapes,
)
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.models.t5 import COMMON, VERSIONS, dropout
from transformer_jax.models.transformer import TransformerConfig

INITS = {"init": "xavier_uniform", "embedding_init": "normal"}
MODEL = COMMON | {
    "source_vocab_size": V,
    "target_vocab_size": V,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "d_model": D,
    "d_ff": F,
    "num_heads": N,
    "head_dim": H,
    "value_dim": H,
    "relative_buckets": R,
    "max_bucket_distance": 7,
    **dropout(0.2),
}


def write(found, folder, settings=None):
    settings = found.outputs.settings if settings is None else settings
    arguments = (folder, "sequence_to_sequence", found.model, found.params(), settings)
    return huggingface.write(*arguments, special_ids=IDS)


@pytest.mark.parametrize("version", KINDS)
def test_a_file_is_read_and_written_again_bit_for_bit(version, tmp_path):
    names, changes = KINDS[version]
    tensors = save(tmp_path / "theirs", names, **changes)
    found = huggingface.read(tmp_path / "theirs")
    assert found.model == TransformerConfig(**MODEL | VERSIONS[version] | INITS)
    params = flat(found.params())
    query = tensors["decoder.block.2.layer.1.EncDecAttention.q.weight"]
    np.testing.assert_array_equal(
        params["decoder/layers/cross_attention/query/kernel"][2].reshape(D, N * H),
        query.T,
    )
    again = tmp_path / "again"
    assert write(found, again).name == "T5ForConditionalGeneration"
    written = Tensors(again)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    config = json.loads((again / "config.json").read_text())
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    expected = CONFIG | changes | ids
    assert {key: config[key] for key in expected} == expected
    assert config["tie_word_embeddings"] == (version == "v1_0")
    assert "forced_eos_token_id" not in config


def test_tables_that_are_tied_or_unused_need_no_place(tmp_path):
    unused = (
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    tensors = save(tmp_path, shapes() | dict.fromkeys(unused, (V, D)))
    found = huggingface.read(tmp_path)
    table = np.asarray(found.parameters["target_embedding/table"])
    np.testing.assert_array_equal(table, tensors["shared.weight"])


def test_a_tied_table_may_have_any_of_its_names(tmp_path):
    names = shapes()
    names["encoder.embed_tokens.weight"] = names.pop("shared.weight")
    tensors = save(tmp_path, names)
    table = np.asarray(huggingface.read(tmp_path).parameters["target_embedding/table"])
    np.testing.assert_array_equal(table, tensors["encoder.embed_tokens.weight"])


# As transformers 5 writes it: an output layer that has never been untied is not stored.
WRITTEN_BY_5 = {
    "feed_forward_proj": "gated-gelu",
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
    "tie_word_embeddings": True,
    "scale_decoder_outputs": False,
}


@pytest.mark.parametrize("stored", [True, False])
def test_version_1_1_as_transformers_5_writes_it(stored, tmp_path):
    names = shapes(gated=True)
    if not stored:
        del names["lm_head.weight"]
    tensors = save(tmp_path, names, **WRITTEN_BY_5)
    found = huggingface.read(tmp_path)
    assert found.model == TransformerConfig(**MODEL | VERSIONS["v1_1"] | INITS)
    name = "lm_head.weight" if stored else "shared.weight"
    output = np.asarray(found.parameters["output/table"])
    np.testing.assert_array_equal(output, tensors[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mt5"},
            (
                r"model_type = 'mt5' is not supported with architectures = "
                r"\['T5ForConditionalGeneration'\], only 't5'"
            ),
        ),
        (
            {"feed_forward_proj": "gated-tanh"},
            "feed_forward_proj = 'gated-tanh' is not supported: choose from relu, gelu",
        ),
        (
            {"is_gated_act": True},
            (
                "is_gated_act = True: must be False with feed_forward_proj = 'relu'; "
                "remove the key or change that one"
            ),
        ),
        (
            {**V1_1, "dense_act_fn": "gelu"},
            "dense_act_fn = 'gelu': must be 'gelu_new' with feed_forward_proj = 'gated",
        ),
        (
            {"tie_word_embeddings": False, "scale_decoder_outputs": True},
            (
                "scale_decoder_outputs = True is not supported "
                "with tie_word_embeddings = False"
            ),
        ),
        (
            {"vocab_size": 29},
            r"shared.weight: \(31, 21\) in the file, \(29, 21\) by co",
        ),
        (
            {"d_kv": 7},
            r"have other shapes:\n.*\(15, 21\) in the file, \(21, 21\) by co",
        ),
        ({"vocab_size": "31"}, "vocab_size = '31' must be of type int"),
        ({"num_decoder_layers": 4}, "tensors are missing:\n  decoder.block.3.layer.0"),
        (
            {"num_decoder_layers": None},
            "have no place in config.json:\n  decoder.block",
        ),
        (
            V1_1,
            "tensors are missing:\n  decoder.block.0.layer.2.DenseReluDense.wi_0.we",
        ),
        (
            {"relative_attention_max_distance": 3},
            (
                r"relative_attention_max_distance = 3 \(here, config.model.max_bucket_"
                r"distance\): must be above 3, half of relative_buckets"
            ),
        ),
        (
            {"dropout_rate": 1.0},
            r"dropout_rate = 1.0 \(here, config.model.dropout_rate\): must be in ",
        ),
        ({"num_beams": 0}, "num_beams = 0: must be at least 1"),
    ],
)
def test_what_is_not_supported_is_said(changes, message, tmp_path):
    save(tmp_path, shapes(), **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.read(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    names = shapes()
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    del names[name]
    save(tmp_path, names)
    with pytest.raises(InteropError, match=f"These tensors are missing:\n  {name}$"):
        huggingface.read(tmp_path)


def test_settings_of_generate_are_those_of_decoding(tmp_path):
    save(tmp_path / "theirs", shapes(), num_beams=4, max_length=200, n_positions=512)
    found = huggingface.read(tmp_path / "theirs")
    expected = {
        "beam_size": 4,
        "length_penalty": 1.0,
        "length_penalty_form": "power",
        "stopping_rule": "hf_false",
        "at_limit": "rank",
        "max_ratio": 0.0,
        "max_extra": 199,
    }
    settings = {f"decoding.{key}": value for key, value in expected.items()}
    assert found.outputs.settings == settings
    write(found, tmp_path / "again")
    generation = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "bad_words_ids": [[0]],
        "forced_eos_token_id": None,
        "num_beams": 4,
        "early_stopping": False,
        "length_penalty": 1.0,
        "max_length": 200,
    }
    assert huggingface.read(tmp_path / "again").outputs.settings == settings


def test_without_a_limit_outputs_are_as_long_as_in_pre_training(tmp_path):
    save(tmp_path, shapes(), n_positions=300)
    assert huggingface.read(tmp_path).outputs.settings["decoding.max_extra"] == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": "rotary", "head_dim": 8, "value_dim": 8},
            "config.model.positions = 'rotary': transformers' model has only 'relat",
        ),
        (
            {"output_scale": False},
            (
                "config.model.output_scale = False: must be True with "
                "config.model.tie_embeddings = 'all'"
            ),
        ),
        (
            {"tie_embeddings": "none"},
            "config.model.tie_embeddings = 'none': must be 'embeddings'",
        ),
        (
            {"attention_dropout_rate": 0.0},
            "config.model.attention_dropout_rate = 0.0: transformers' model has only 0",
        ),
        (
            {"feed_forward": "gated", "activation": "gelu"},
            "config.model.activation = 'gelu' with config.model.feed_forward = 'gated'",
        ),
        (
            {"num_kv_heads": 1},
            "config.model.num_kv_heads = 1: transformers' model has only 0",
        ),
    ],
)
def test_models_that_transformers_lacks_are_refused(changes, message, tmp_path):
    model = TransformerConfig(**MODEL | VERSIONS["v1_0"] | changes)
    with pytest.raises(InteropError, match=message):
        huggingface.write(
            tmp_path, "sequence_to_sequence", model, {}, {}, special_ids=IDS
        )


def test_a_vocabulary_without_an_end_is_refused(tmp_path):
    save(tmp_path / "theirs", shapes())
    found = huggingface.read(tmp_path / "theirs")
    with pytest.raises(InteropError, match="has no end id, which T5 needs"):
        huggingface.write(
            tmp_path / "again", "sequence_to_sequence", found.model, found.params(), {}
        )
