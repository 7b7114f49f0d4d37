"""RoBERTa and XLM-R of transformers without transformers: files written by hand, by the
layouts of torch's modules.
"""

import numpy as np
import pytest

from helpers.bert_folders import D, F, H, L, N, T, V, numbered
from helpers.encoder_folders import (
    POSITIONS,
    check_round_trip,
    classifier,
    save,
    tensors,
)
from helpers.parity import flat
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError
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


def test_config(tmp_path):
    arrays = tensors("Roberta", masked_lm=True, pooler=False)
    found = huggingface.read(save(tmp_path, "Roberta", "ForMaskedLM", arrays))
    assert found.model == BertConfig(**SIZES, num_segments=1, norm_epsilon=1e-5)
    assert found.architecture.task == "bert_pretraining"
    assert found.outputs.settings == {"masking.next_sentence": False}


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
def test_there_and_back_without_a_change(tmp_path, family):
    check_round_trip(tmp_path, family)


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
