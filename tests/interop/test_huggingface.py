"""Folders that are usable although unusual, and folders that are not, which are
refused with what to do.
"""

import json
import struct

import numpy as np
import pytest

from helpers.bert_folders import PRETRAINING, D, drawn
from helpers.bert_folders import save as save_bert
from helpers.gpt_folders import GPT2, LLAMA, V, gpt2_shapes, llama_shapes, save
from helpers.marian_folders import SHARED
from helpers.marian_folders import save as save_marian
from helpers.parity import flat, write_file
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError, Tensors


def renamed(folder, change):
    """Write the tensors of a folder again, under the names that `change` makes of
    theirs.
    """
    tensors = Tensors(folder)
    write_file(
        folder / "model.safetensors",
        {change(name): np.array(tensor) for name, tensor in tensors.items()},
    )


def with_heads(shapes):
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


MASKED = {
    "bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
    "cls.predictions.bias": "cls.predictions.decoder.bias",
}

TIED = {
    "gpt2": (
        lambda f: save(f, GPT2, with_heads(gpt2_shapes())),
        {"transformer.wte.weight": "lm_head.weight"},
    ),
    "llama": (
        lambda f: save(f, LLAMA | {"tie_word_embeddings": True}, llama_shapes()),
        {"model.embed_tokens.weight": "lm_head.weight"},
    ),
    "bert": (lambda f: save_bert(f, drawn(PRETRAINING)), MASKED),
    "marian": (
        lambda f: save_marian(f, SHARED),
        {"model.shared.weight": "model.decoder.embed_tokens.weight"},
    ),
    "marian's output": (
        lambda f: save_marian(f, SHARED),
        {"model.shared.weight": "lm_head.weight"},
    ),
}


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_tensor_may_have_either_name(kind, tmp_path):
    write, names = TIED[kind]
    write(tmp_path)
    if kind == "llama":
        tensors = {
            name: np.array(x)
            for name, x in Tensors(tmp_path).items()
            if name != "lm_head.weight"
        }
        write_file(tmp_path / "model.safetensors", tensors)
    expected = flat(huggingface.read(tmp_path).params())
    renamed(tmp_path, lambda name: names.get(name, name))
    params = flat(huggingface.read(tmp_path).params())
    for path, value in expected.items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)


def test_an_untied_output_is_not_the_embedding(tmp_path):
    save(
        tmp_path,
        GPT2 | {"tie_word_embeddings": False},
        with_heads(gpt2_shapes()) | {"lm_head.weight": (V, 30)},
    )
    tensors = Tensors(tmp_path)
    params = flat(huggingface.read(tmp_path).params())
    np.testing.assert_array_equal(params["output/table"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(
        params["embedding/table"], tensors["transformer.wte.weight"]
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace(".h.0.", ".h.0._orig_mod."),
        lambda name: f"_fsdp_wrapped_module.{name}".replace(
            "mlp.", "_checkpoint_wrapped_module.mlp."
        ),
    ],
)
def test_wrappers_in_names_are_ignored(change, tmp_path):
    save(tmp_path, GPT2, with_heads(gpt2_shapes()))
    expected = flat(huggingface.read(tmp_path).params())
    renamed(tmp_path, change)
    for path, value in flat(huggingface.read(tmp_path).params()).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


def test_wrappers_around_a_model_without_a_head(tmp_path):
    save(tmp_path, GPT2, gpt2_shapes())
    expected = flat(huggingface.read(tmp_path).params())
    renamed(tmp_path, lambda name: f"_orig_mod.{name}")
    np.testing.assert_array_equal(
        flat(huggingface.read(tmp_path).params())["embedding/table"],
        expected["embedding/table"],
    )


QUANTIZED = (
    r"the model is quantized: its tensors hold codes instead of"
    r" values.*model.dequantize\(\)"
)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate_proj.qweight",
        "mlp.gate_proj.qzeros",
        "mlp.gate_proj.weight_scale_inv",
        "mlp.gate_proj.weight_scale",
        "mlp.gate_proj.SCB",
        "mlp.gate_proj.weight.absmax",
        "mlp.gate_proj.weight.quant_state.bitsandbytes__nf4",
        "mlp.gate_proj.weight_packed",
    ],
)
def test_quantized_models_are_named_so(name, tmp_path):
    save(tmp_path, LLAMA, llama_shapes() | {f"model.layers.0.{name}": (3,)})
    with pytest.raises(
        InteropError, match=rf"has model\.layers\.0\.{name} of type F32: {QUANTIZED}"
    ):
        huggingface.read(tmp_path)


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "BOOL", "F8_E4M3", "F8_E5M2"])
def test_parameters_of_a_type_without_values_are_refused(dtype, tmp_path):
    """A weight of int8 without its scale is no weight."""
    save(tmp_path, GPT2, gpt2_shapes())
    path, name = tmp_path / "model.safetensors", "h.0.mlp.c_fc.weight"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    start, end = header[name]["data_offsets"]
    size = int(np.prod(header[name]["shape"])) * {"I32": 4}.get(dtype, 1)
    for entry in header.values():
        entry["data_offsets"] = [
            offset - (end - start - size) * (offset >= end)
            for offset in entry["data_offsets"]
        ]
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    values = data[:start] + bytes(size) + data[end:]
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    with pytest.raises(InteropError, match=f"has {name} of type {dtype}: {QUANTIZED}"):
        huggingface.read(tmp_path)


def test_integers_that_are_no_parameters_do_not_matter(tmp_path):
    tensors = drawn(PRETRAINING) | {"bert.embeddings.position_ids": np.arange(5)[None]}
    assert huggingface.read(save_bert(tmp_path, tensors)).parameters


def test_adapters_that_are_not_merged_are_named_so(tmp_path):
    save(
        tmp_path,
        GPT2,
        with_heads(gpt2_shapes())
        | {"transformer.h.0.attn.c_attn.lora_A.default.weight": (2, D)},
    )
    renamed(tmp_path, lambda name: f"base_model.model.{name}")
    with pytest.raises(
        InteropError,
        match=(
            r"c_attn.lora_A.default.weight: .* adapter are not merged.*merge_and_unload"
        ),
    ):
        huggingface.read(tmp_path)
