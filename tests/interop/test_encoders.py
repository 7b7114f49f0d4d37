"""RoBERTa, XLM-R and DistilBERT of transformers without transformers: files written by
hand, by the layouts of torch's modules.
"""

import json

import numpy as np
import pytest

from helpers.bert_folders import D, F, H, L, N, T, V, numbered
from helpers.encoder_folders import POSITIONS, save, tensors
from helpers.parity import flat, write_back
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.models.bert import BertConfig

SIZES = {
    "vocab_size": V,
    "d_model": D,
    "num_heads": N,
    "head_dim": H,
    "value_dim": H,
    "d_ff": F,
    "num_layers": L,
    "max_length": T,
}
HEADS = {
    "Roberta": {"classifier.dense": (D, D), "classifier.out_proj": (3, D)},
    "XLMRoberta": {"classifier.dense": (D, D), "classifier.out_proj": (3, D)},
    "DistilBert": {"classifier": (3, D)},
}


def classifier(family):
    """Return the tensors of a classifier. That of DistilBERT has BERT's pooler."""
    heads = HEADS[family].items()
    return tensors(family, *heads, pooler=family == "DistilBert")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Roberta", {"num_segments": 1, "norm_epsilon": 1e-5}),
        ("DistilBert", {"num_segments": 0, "pooler_activation": "relu"}),
    ],
)
def test_config(tmp_path, family, changes):
    arrays = tensors(family, masked_lm=True, pooler=False)
    found = huggingface.read(save(tmp_path, family, "ForMaskedLM", arrays))
    assert found.model == BertConfig(**SIZES, **changes)
    assert found.architecture.task == "bert_pretraining"
    assert found.outputs.settings == {"masking.next_sentence": False}


@pytest.mark.parametrize("family", HEADS)
def test_there_and_back_without_a_change(tmp_path, family):
    arrays = classifier(family)
    labels = numbered(["bad", "fair", "good"])
    folder = save(tmp_path / "a", family, "ForSequenceClassification", arrays, **labels)
    found = huggingface.read(folder)
    write_back(found, found.params(), tmp_path / "b")
    written = Tensors(tmp_path / "b")
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        skipped = 2 if name == f"roberta.{POSITIONS}" else 0
        np.testing.assert_array_equal(written[name][skipped:], array[skipped:], name)
        assert not written[name][:skipped].any()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    before = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in before} == before


def test_positions_begin_in_the_third_row_and_the_pooler_is_in_the_head(tmp_path):
    arrays = classifier("Roberta")
    labels = numbered(["bad", "fair", "good"])
    save(tmp_path, "Roberta", "ForSequenceClassification", arrays, **labels)
    params = flat(huggingface.read(tmp_path).params())
    table = params["bert/positions/table"]
    np.testing.assert_array_equal(table, arrays[f"roberta.{POSITIONS}"][2:])
    pooler = params["bert/pooler/kernel"]
    np.testing.assert_array_equal(pooler, arrays["classifier.dense.weight"].T)


@pytest.mark.parametrize(
    ("unigram", "name"), [(False, "Roberta"), (True, "XLMRoberta")]
)
def test_the_tokenizer_tells_roberta_and_xlm_r_apart(tmp_path, unigram, name):
    arrays = tensors("Roberta", masked_lm=True, pooler=False)
    found = huggingface.read(save(tmp_path / "a", "Roberta", "ForMaskedLM", arrays))
    settings = {
        "data.tokenizer": "unigram" if unigram else "bpe_bytes",
        **found.outputs.settings,
    }
    written = huggingface.write(
        tmp_path / "b", "bert_pretraining", found.model, found.params(), settings
    )
    assert written.name == f"{name}ForMaskedLM"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Roberta", {"type_vocab_size": 2}, "type_vocab_size = 2 is not .* from 1"),
        ("Roberta", {"pad_token_id": 0}, "pad_token_id = 0 is not supported, only 1"),
        ("Roberta", {"hidden_act": "relu"}, "hidden_act = 'relu' is not .* from gelu"),
        ("Roberta", {"model_type": "bert"}, "model_type = 'bert' is not supported"),
        ("XLMRoberta", {"max_position_embeddings": 2}, "model.max_length"),
        (
            "DistilBert",
            {"sinusoidal_pos_embds": True},
            "sinusoidal_pos_embds = True is not supported, only False",
        ),
        ("DistilBert", {"activation": "tanh"}, "activation = 'tanh' is not supported"),
        ("DistilBert", {"hidden_size": 7}, "hidden_size = 7 and dim = 21 mean the"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, family, changes, message):
    save(tmp_path, family, "ForMaskedLM", {}, **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.describe(tmp_path)


def test_another_id_of_padding_cannot_be_written(tmp_path):
    arrays = tensors("Roberta", masked_lm=True, pooler=False)
    found = huggingface.read(save(tmp_path / "a", "Roberta", "ForMaskedLM", arrays))
    with pytest.raises(InteropError, match="id of padding 0: must be 1"):
        huggingface.write(
            tmp_path / "b",
            "bert_pretraining",
            found.model,
            found.params(),
            found.outputs.settings,
            special_ids={"pad_id": 0, "bos_id": 1, "eos_id": 2},
        )
    assert not (tmp_path / "b").exists()
