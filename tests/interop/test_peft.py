"""Adapters of PEFT: our factors against theirs by NumPy, both ways, and what is
refused.
"""

import json
import re

import numpy as np
import pytest
from flax import traverse_util

import transformer_jax
from helpers.bert_folders import D, F, L, drawn, numbered, save, shapes
from helpers.gpt_folders import GPT2, LLAMA, gpt2_shapes, llama_shapes
from helpers.gpt_folders import D as WIDTH
from helpers.gpt_folders import save as save_gpt
from helpers.parity import write_file
from transformer_jax import conversion
from transformer_jax.config import ConfigError
from transformer_jax.interop import huggingface, peft
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.workdir import read, store

R, ALPHA = 3, 6
LINEARS = {
    "attention.self.query": (D, D),
    "attention.output.dense": (D, D),
    "intermediate.dense": (F, D),
}
HEAD = ("classifier", (3, D))
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "their/base",
    "r": R,
    "lora_alpha": ALPHA,
    "target_modules": ["query", "attention.output.dense", "intermediate.dense"],
    "modules_to_save": ["classifier"],
    "task_type": "SEQ_CLS",
    "lora_dropout": 0.1,
    "bias": "none",
    "rank_pattern": {},
    "use_dora": False,
    "init_lora_weights": True,
}


def factors(linears, layer="bert.encoder.layer"):
    """Return the shapes of the tensors of an adapter."""
    found = {}
    for i in range(L):
        for name, (outputs, inputs) in linears.items():
            start = f"base_model.model.{layer}.{i}.{name}"
            found[f"{start}.lora_A.weight"] = (R, inputs)
            found[f"{start}.lora_B.weight"] = (outputs, R)
    return found


ADAPTER = factors(LINEARS) | {
    "base_model.model.classifier.weight": (3, D),
    "base_model.model.classifier.bias": (3,),
}


def save_adapter(folder, tensors, **changes):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    write_file(folder / "adapter_model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    tensors = drawn(shapes(HEAD))
    return save(
        tmp_path_factory.mktemp("base") / "base",
        {name: 0.3 * x for name, x in tensors.items()},
        architectures=["BertForSequenceClassification"],
        **numbered(["bad", "fair", "good"]),
    )


def read_for(base, adapter):
    return peft.read(adapter, huggingface.read(base))


@pytest.fixture(scope="module")
def converted(base, tmp_path_factory):
    """The adapter, and the workdir made of it."""
    folder = tmp_path_factory.mktemp("adapter")
    adapter = save_adapter(folder / "adapter", drawn(ADAPTER, seed=1))
    config = conversion.config_for(str(base), str(adapter))
    conversion.to_workdir(config, folder / "run", str(adapter))
    return adapter, folder / "run"


def test_a_model_with_an_adapter_has_merged_weights(base, converted, tmp_path):
    """W + (α / r) B A of each linear map, by NumPy, in a folder without an adapter."""
    adapter, run = converted
    merged = {name: np.array(x) for name, x in Tensors(base).items()}
    theirs = Tensors(adapter, peft.FILE)
    for i in range(L):
        for name in LINEARS:
            module = f"bert.encoder.layer.{i}.{name}"
            a, b = (theirs[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
            merged[f"{module}.weight"] += ALPHA / R * b @ a
    for name in ("classifier.weight", "classifier.bias"):
        merged[name] = theirs[f"base_model.model.{name}"]
    config = json.loads((base / "config.json").read_text())
    plain = huggingface.read(save(tmp_path / "merged", merged, **config))
    params = traverse_util.flatten_dict(transformer_jax.load(run).params, sep="/")
    for path, leaf in plain.parameters.items():
        np.testing.assert_allclose(params[path], leaf, rtol=1e-5, atol=1e-5)
    # what is exported is merged
    conversion.to_folder(run, read(run), str(tmp_path / "exported"))
    exported = Tensors(tmp_path / "exported")
    for name, value in merged.items():
        np.testing.assert_allclose(exported[name], value, rtol=1e-5, atol=1e-5)


def test_an_adapter_that_is_read_is_written_again(base, converted, tmp_path):
    adapter, run = converted
    conversion.to_adapter(run, read(run), str(tmp_path / "again"))
    ours, theirs = (Tensors(x, peft.FILE) for x in (tmp_path / "again", adapter))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)
    config = json.loads((tmp_path / "again" / peft.CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (R, ALPHA)
    assert config["base_model_name_or_path"] == str(base)
    assert config["modules_to_save"] == ["classifier"]
    named = {f"base_model.model.{x}.lora_A.weight" for x in config["target_modules"]}
    assert named == {name for name in theirs if "lora_A" in name}
    with pytest.raises(InteropError, match=r"already has adapter_config\.json"):
        conversion.to_adapter(run, read(run), str(tmp_path / "again"))


def test_keys_that_describe_another_adapter_are_refused(base, converted, tmp_path):
    adapter, _ = converted
    for key, value in {"rank": 4, "alpha": 1.0, "targets": ("value",)}.items():
        config = conversion.config_for(str(base), str(adapter))
        config.lora[key] = value
        with pytest.raises(ConfigError, match=r"has r = 3 and α = 6, and config\.lora"):
            conversion.to_workdir(config, tmp_path / key, str(adapter))


def test_a_run_without_lora_has_no_adapter(base, tmp_path):
    (tmp_path / "run").mkdir()
    store(tmp_path / "run", conversion.config_for(str(base)))
    with pytest.raises(ConfigError, match="was trained without LoRA: write the whole"):
        conversion.to_adapter(tmp_path / "run", read(tmp_path / "run"), str(tmp_path))


def test_heads_whose_features_are_in_halves_are_put_in_our_order(tmp_path):
    """Rotary features 2i and 2i + 1 of ours are i and H/2 + i of theirs."""
    base = tmp_path / "base"
    save_gpt(base, LLAMA, llama_shapes())
    model = huggingface.read(base)
    (slot,) = (s for s in model.table if s.path.endswith("self_attention/query/kernel"))
    layers, inputs, heads, width = slot.shape
    names = {}
    for i in range(layers):
        start = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        names[f"{start}.lora_A.weight"] = (R, inputs)
        names[f"{start}.lora_B.weight"] = (heads * width, R)
    tensors = drawn(names)
    adapter = save_adapter(tmp_path / "adapter", tensors, modules_to_save=None)
    ((a, b),) = read_for(base, adapter).factors.values()
    for i in range(layers):
        start = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        theirs = tensors[f"{start}.lora_B.weight"] @ tensors[f"{start}.lora_A.weight"]
        by_head = theirs.reshape(heads, 2, width // 2, inputs)
        ours = np.tensordot(a[i], b[i], axes=1)
        np.testing.assert_allclose(
            ours,
            by_head.swapaxes(1, 2).reshape(heads, width, inputs).transpose(2, 0, 1),
            rtol=1e-5,
            atol=1e-5,
        )


def test_parts_of_a_larger_map_are_read_and_not_written(tmp_path):
    """GPT-2 has one map for queries, keys and values, whose A they share."""
    base = tmp_path / "base"
    save_gpt(base, GPT2, gpt2_shapes())
    tensors = drawn(factors({"attn.c_attn": (3 * WIDTH, WIDTH)}, "transformer.h"))
    adapter = save_adapter(tmp_path / "a", tensors, modules_to_save=None)
    model = huggingface.read(base)
    found = read_for(base, adapter)
    for i, (name, (a, b)) in enumerate(sorted(found.factors.items(), key=by_part)):
        assert name.endswith(("query", "key", "value")[i])
        start = "base_model.model.transformer.h.1.attn.c_attn"
        np.testing.assert_array_equal(a[1], tensors[f"{start}.lora_A.weight"].T)
        part = np.split(tensors[f"{start}.lora_B.weight"], 3)[i]
        np.testing.assert_array_equal(b[1].reshape(R, -1), part.T)
    with pytest.raises(InteropError, match=r"is a part of a larger map in GPT2LMHead"):
        peft.write(tmp_path / "new", found, model.architecture, model.table, "base")


def by_part(item):
    return ("query", "key", "value").index(item[0].rpartition("/")[2])


def without(pattern):
    return {k: s for k, s in ADAPTER.items() if not re.search(pattern, k)}


MORE = "base_model.model.bert.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (ADAPTER, {"use_dora": True}, "not supported: use_dora = True: load the model"),
        (ADAPTER, {"bias": "all"}, "not supported: bias = 'all'"),
        (ADAPTER, {"rank_pattern": {"query": 4}}, "rank_pattern = {'query': 4}"),
        (ADAPTER, {"peft_type": "IA3"}, "not supported: peft_type = 'IA3'"),
        (ADAPTER, {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        (ADAPTER, {"brand_new_option": 7}, "not supported: brand_new_option = 7"),
        (ADAPTER, {"r": "3"}, "r = '3' and lora_alpha = 6: must be"),
        (
            ADAPTER,
            {"r": 4},
            "lora_A.weight has rank 3, but adapter_config.json has r = 4",
        ),
        (
            ADAPTER | {f"{MORE}.lora_A.weight": (R, D + 1)},
            {},
            "it was trained on 'their/base': name that folder as the base. "
            "These tensors have other shapes:",
        ),
        (
            factors({"attn.q": (D, D)}, layer="transformer.h"),
            {},
            "does not fit this BertForSequenceClassification; it was trained on",
        ),
        (
            ADAPTER | {f"{MORE}.lora_magnitude_vector": (D,)},
            {},
            "These tensors have no place in it:",
        ),
        (
            ADAPTER | {"base_model.model.lm_head.weight": (3, D)},
            {"modules_to_save": ["lm_head"]},
            "These tensors have no place in it:\n  lm_head.weight",
        ),
        (
            without(r"layer\.1\..*query"),
            {},
            "are missing, and others of their kind not:",
        ),
        (without(r"layer\.0\..*query.lora_B"), {}, "are missing, and others"),
        (without(r"classifier\.bias"), {}, None),
        (
            ADAPTER | {"base_model.model.classifier.weight": (4, D)},
            {},
            "classifier.weight: (4, 21), expected (3, 21)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(base, tmp_path, tensors, changes, message):
    adapter = save_adapter(tmp_path / "adapter", drawn(tensors), **changes)
    if message is None:
        assert {*read_for(base, adapter).whole} == {"head/kernel"}
        return
    with pytest.raises(InteropError, match=re.escape(message)):
        read_for(base, adapter)


def test_a_missing_file_is_named(base, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", drawn(ADAPTER))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(InteropError, match=r"neither adapter_model\.safetensors"):
        read_for(base, adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(InteropError, match=r"adapter_config\.json cannot be read"):
        read_for(base, adapter)


def test_scales_of_rank_stabilized_adapters(base, tmp_path):
    """rsLoRA scales by α / √r (Kalajdzievski 2023)."""
    adapter = save_adapter(tmp_path / "a", drawn(ADAPTER), use_rslora=True)
    found = read_for(base, adapter)
    np.testing.assert_allclose(found.alpha / found.rank, ALPHA / np.sqrt(R))
