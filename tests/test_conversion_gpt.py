"""scripts/convert.py for GPT, GPT-2 and Llama, and predict.py with its workdirs.

Models are converted in both directions.
"""

import json
import string

import numpy as np
import pytest

from helpers.bert_folders import numbered
from helpers.forked import script
from helpers.gpt_folders import GPT2, LLAMA, D, V, gpt2_shapes, llama_shapes, save
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.interop.tensors import Tensors

LENGTHS = {"n_positions": 67}
OPENAI = {"model_type": "openai-gpt", "n_embd": D, "n_head": 5, "n_layer": 2, **LENGTHS}
LABELS = numbered(["bad", "fair", "good"])


def gpt(name, renamed=(), **changes):
    """Return config.json, and the shapes of tensors with the prefix of a model with
    a head.
    """
    config = {key: x for key, x in GPT2.items() if key != "n_inner"} | {
        "architectures": [name],
        **LENGTHS,
        **changes,
    }
    shapes = {}
    for key, shape in gpt2_shapes(
        config["vocab_size"], config["n_positions"], 4 * D
    ).items():
        for old, new in renamed:
            key = key.replace(old, new)
        shapes[f"transformer.{key}"] = shape
    return config, shapes


def openai():
    config, shapes = gpt(
        "OpenAIGPTLMHeadModel",
        (("wte", "tokens_embed"), ("wpe", "positions_embed")),
        **OPENAI,
        vocab_size=53,
    )
    return config, {name: shape for name, shape in shapes.items() if "ln_f" not in name}


def classifier():
    config, shapes = gpt(
        "GPT2ForSequenceClassification",
        problem_type="single_label_classification",
        **LABELS,
    )
    return config, shapes | {"score.weight": (3, D)}


def llama():
    return LLAMA | {"max_position_embeddings": 67}, llama_shapes()


# Class: config.json and shapes, and the special ids and tokens in the files that are
#     written.
KINDS = {
    "OpenAIGPTLMHeadModel": (
        openai,
        {"bos": None, "eos": None, "pad": None},
        [None] * 3,
    ),
    "GPT2ForSequenceClassification": (
        classifier,
        {"bos": 28, "eos": 28, "pad": 28},
        ["<|endoftext|>"] * 3,
    ),
    "LlamaForCausalLM": (
        llama,
        {"bos": 1, "eos": 2, "pad": 0},
        ["<s>", "</s>", "<pad>"],
    ),
}


def save_tokenizer(kind, folder):
    if kind == "LlamaForCausalLM":
        tokenizer_files.to_folder(
            train_tokenizer("bpe_metaspace", ["ek at it"], V), folder
        )
        return
    if kind == "OpenAIGPTLMHeadModel":
        tokens = [
            "<unk>",
            *string.ascii_lowercase,
            *(f"{letter}</w>" for letter in string.ascii_lowercase),
        ]
    else:
        tokens = ["!", "Ġ", *string.ascii_lowercase, "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(tokens)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(tmp_path, kind):
    """An empty text has a prediction too.

    GPT's tokenizer has no end id: its continuations are as long as allowed.
    """
    made, ids, tokens = KINDS[kind]
    tensors = save(tmp_path / "theirs", *made())
    save_tokenizer(kind, tmp_path / "theirs")

    def run(name, *arguments, **more):
        result = script(name, *arguments, cwd=tmp_path, **more)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout.decode()

    assert run("convert", "--from_huggingface=theirs", "--workdir=run") == ""
    limit = (
        []
        if kind == "GPT2ForSequenceClassification"
        else ["--config.decoding.max_extra=5"]
    )
    found = list(
        map(
            json.loads,
            run("predict", "--workdir=run", *limit, stdin=b"ek at\n\n").splitlines(),
        )
    )
    if limit:
        assert [list(prediction) for prediction in found] == [["continuation"]] * 2
    else:
        assert [
            sum(prediction["probabilities"].values()) for prediction in found
        ] == pytest.approx([1, 1])
    assert run("convert", "--workdir=run", "--to_huggingface=back") == ""
    written = Tensors(tmp_path / "back")
    assert set(written) == set(tensors)
    for name in tensors:
        np.testing.assert_array_equal(written[name], tensors[name], err_msg=name)
    before, after = (
        json.loads((tmp_path / folder / "config.json").read_text())
        for folder in ("theirs", "back")
    )
    assert {key: after[key] for key in before} == before
    assert {name: after[f"{name}_token_id"] for name in ids} == ids
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert {name: settings.get(f"{name}_token") for name in ids} == dict(
        zip(ids, tokens, strict=True)
    )
    old, new = (
        tokenizer_files.from_folder(tmp_path / folder) for folder in ("theirs", "back")
    )
    assert old.encode_batch(["ek at"]) == new.encode_batch(["ek at"]) != [[]]
