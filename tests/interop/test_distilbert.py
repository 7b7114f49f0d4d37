"""DistilBERT of transformers without transformers: files written by hand, by the
layouts of torch's modules.
"""

import numpy as np
import pytest

from helpers.bert_folders import D, F, H, L, N, T, V, numbered
from helpers.encoder_folders import check_round_trip, classifier, save, tensors
from helpers.parity import flat
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.bert import BertConfig


def test_config(tmp_path):
    arrays = tensors("DistilBert", masked_lm=True, pooler=False)
    found = huggingface.read(save(tmp_path, "DistilBert", "ForMaskedLM", arrays))
    assert found.model == BertConfig(
        vocab_size=V,
        d_model=D,
        num_heads=N,
        head_dim=H,
        value_dim=H,
        d_ff=F,
        num_layers=L,
        max_length=T,
        num_segments=0,
        pooler_activation="relu",
    )
    assert found.outputs.settings == {"masking.next_sentence": False}


def test_there_and_back_without_a_change(tmp_path):
    check_round_trip(tmp_path, "DistilBert")


def test_each_parameter_is_where_torch_keeps_it(tmp_path):
    arrays = classifier("DistilBert")
    labels = numbered(["bad", "fair", "good"])
    save(tmp_path, "DistilBert", "ForSequenceClassification", arrays, **labels)
    params = flat(huggingface.read(tmp_path).params())
    assert "bert/segments" not in params
    pooler = arrays["pre_classifier.weight"].T
    np.testing.assert_array_equal(params["bert/pooler/kernel"], pooler)
    outer = arrays["distilbert.transformer.layer.1.ffn.lin2.weight"].T
    path = "bert/encoder/layers/feed_forward/outer/kernel"
    np.testing.assert_array_equal(params[path][1], outer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sinusoidal_pos_embds": True},
            "sinusoidal_pos_embds = True is not supported, only False",
        ),
        ({"activation": "tanh"}, "activation = 'tanh' is not supported"),
        ({"hidden_size": 7}, "hidden_size = 7 and dim = 21 mean the same"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    save(tmp_path, "DistilBert", "ForMaskedLM", {}, **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.describe(tmp_path)
