"""BART and mBART of transformers without transformers: files written by hand, by the
layouts of torch's modules.
"""

import dataclasses
import json

import numpy as np
import pytest

from helpers.bart_folders import KINDS, config, save, shapes
from helpers.marian_folders import D, F, H, N, T, V
from helpers.parity import flat
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.models.transformer import TransformerConfig

POST = TransformerConfig(
    source_vocab_size=V,
    target_vocab_size=V,
    num_encoder_layers=2,
    num_decoder_layers=3,
    d_model=D,
    d_ff=F,
    num_heads=N,
    head_dim=H,
    value_dim=H,
    max_length=T,
    activation="gelu",
    positions="learned",
    embedding_norm=True,
    output_bias=True,
    norm_epsilon=1e-5,
)
MODELS = {"Bart": POST, "MBart": dataclasses.replace(POST, norm="pre")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_and_written_again(kind, tmp_path):
    tensors = save(kind, tmp_path / "theirs")
    found = huggingface.read(tmp_path / "theirs")
    assert found.model == MODELS[kind]
    params = flat(found.params())
    positions = tensors["model.decoder.embed_positions.weight"]
    np.testing.assert_array_equal(params["target_positions/table"], positions[2:])
    gain = tensors["model.encoder.layernorm_embedding.weight"]
    np.testing.assert_array_equal(params["source_norm/scale"], gain)
    np.testing.assert_array_equal(
        params["output_bias"], tensors["final_logits_bias"][0]
    )
    begin = KINDS[kind]["decoder_start_token_id"]
    written = huggingface.write(
        tmp_path / "again",
        "sequence_to_sequence",
        found.model,
        found.params(),
        found.outputs.settings,
        special_ids={"pad_id": 1, "bos_id": begin, "eos_id": 2},
    )
    assert written.name == f"{kind}ForConditionalGeneration"
    again = Tensors(tmp_path / "again")
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        expected = tensor.copy()
        if "embed_positions" in name:
            expected[:2] = 0  # no position
        np.testing.assert_array_equal(again[name], expected, err_msg=name)
    after = json.loads((tmp_path / "again" / "config.json").read_text())
    before = config(kind) | {"bos_token_id": None}
    assert {key: after[key] for key in before} == before


def test_a_bias_of_old_files_may_be_missing(tmp_path):
    names = shapes("Bart")
    del names["final_logits_bias"]
    more = {"lm_head.weight": (V, D), "model.encoder.version": (1,)}
    save("Bart", tmp_path, names | more)
    found = huggingface.read(tmp_path)
    assert "output_bias" not in found.parameters
    assert not np.asarray(found.params()["output_bias"]).any()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Bart", {"normalize_before": True}, "normalize_before = True is not suppo"),
        ("MBart", {"normalize_before": False}, "normalize_before = False is not supp"),
        ("Bart", {"extra_pos_embeddings": 0}, "extra_pos_embeddings = 0 is not sup"),
        ("Bart", {"tie_word_embeddings": False}, "tie_word_embeddings = False is not"),
        ("MBart", {"decoder_layerdrop": 0.1}, "decoder_layerdrop = 0.1 is not suppo"),
        (
            "Bart",
            {"activation_function": "tanh"},
            "activation_function = 'tanh' is not supported: choose from gelu",
        ),
        (
            "MBart",
            {"decoder_ffn_dim": 24},
            "decoder_ffn_dim = 24 are unsupported: they must be equal",
        ),
        (
            "Bart",
            {"model_type": "mbart"},
            r"model_type = 'mbart' is not supported with architectures = \['Bart",
        ),
        (
            "Bart",
            {"max_position_embeddings": T + 2},
            r"embed_positions.weight: \(39, 21\) in the file, \(41, 21\) by config",
        ),
        ("Bart", {"dropout": 1.0}, r"dropout = 1.0 .*must be in \[0, 1\)"),
    ],
)
def test_what_is_not_supported_is_said(kind, changes, message, tmp_path):
    save(kind, tmp_path, **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.read(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    names = shapes("MBart")
    del names["model.encoder.layer_norm.bias"]
    save("MBart", tmp_path, names)
    message = r"are missing:\n  model.encoder.layer_norm.bias$"
    with pytest.raises(InteropError, match=message):
        huggingface.read(tmp_path)


def test_a_tensor_without_a_place_is_named(tmp_path):
    names = shapes("MBart")
    save("Bart", tmp_path, names)
    message = r"no place in config.json:\n  model.decoder.layer_norm.bias"
    with pytest.raises(InteropError, match=message):
        huggingface.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_bias": False}, "not bart: config.model.output_bias = False: transf"),
        ({"positions": "rotary", "head_dim": 8}, "not bart: .*positions = 'rotary'"),
        ({"tie_embeddings": "decoder"}, "not bart: .*tie_embeddings = 'decoder'"),
    ],
)
def test_models_that_transformers_lacks_are_refused(changes, message, tmp_path):
    model = dataclasses.replace(POST, **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.write(tmp_path, "sequence_to_sequence", model, {}, {})
