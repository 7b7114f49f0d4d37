"""ELECTRA of transformers without transformers: files written by hand, by the layouts
of torch's modules.
"""

import dataclasses

import numpy as np
import pytest

from helpers.bert_folders import D, F, H, L, N, S, T, V, numbered
from helpers.encoder_folders import (
    E,
    check_round_trip,
    classifier,
    discriminator,
    save,
    tensors,
)
from helpers.parity import flat, write_back
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.models.bert import BertConfig


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """Return what is read from a generator's folder, and its tensors."""
    arrays = tensors("Electra", masked_lm=True, pooler=False)
    folder = tmp_path_factory.mktemp("generator")
    return huggingface.read(save(folder, "Electra", "ForMaskedLM", arrays)), arrays


def test_config(generator):
    found, _ = generator
    assert found.model == BertConfig(
        vocab_size=V,
        d_model=D,
        num_heads=N,
        head_dim=H,
        value_dim=H,
        d_ff=F,
        num_layers=L,
        max_length=T,
        num_segments=S,
        embedding_dim=E,
        pooler_activation="gelu",
    )
    assert found.outputs.settings == {"masking.next_sentence": False}


def test_each_parameter_is_where_torch_keeps_it(generator):
    found, arrays = generator
    params = flat(found.params())
    for path, name in {
        "bert/embeddings_project": "electra.embeddings_project",
        "masked_lm/transform": "generator_predictions.dense",
    }.items():
        weight = arrays[f"{name}.weight"].T
        np.testing.assert_array_equal(params[f"{path}/kernel"], weight)
        np.testing.assert_array_equal(params[f"{path}/bias"], arrays[f"{name}.bias"])


def test_there_and_back_without_a_change(tmp_path):
    check_round_trip(tmp_path, "Electra")


def test_a_discriminator_is_written_without_the_generator(tmp_path):
    arrays = discriminator()
    found = huggingface.read(save(tmp_path / "a", "Electra", "ForPreTraining", arrays))
    assert found.architecture.task == "electra_pretraining"
    params = found.params() | {"generator": {"kernel": np.ones((2, 2))}}
    write_back(found, params, tmp_path / "b")
    written = Tensors(tmp_path / "b")
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(written[name], array, name)


def test_embeddings_as_wide_as_the_model_have_no_map(tmp_path):
    save(tmp_path, "Electra", "ForMaskedLM", {}, embedding_size=D)
    fields = huggingface.describe(tmp_path).fields
    assert fields["embedding_dim"] == 0
    model = BertConfig(**fields)
    architecture = huggingface.describe(tmp_path).architecture
    assert architecture.config.write(model)["embedding_size"] == D


def test_a_bert_is_no_electra_and_neither_is_a_mixture(tmp_path, generator):
    found, _ = generator
    model = dataclasses.replace(found.model, pooler_activation="tanh")
    with pytest.raises(
        InteropError,
        match=r"not bert: .*embedding_dim = 11.*; not electra: .*pooler_activation",
    ):
        huggingface.write(
            tmp_path / "b",
            "bert_pretraining",
            model,
            found.params(),
            {"masking.next_sentence": False},
        )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not .* from gelu"),
        ({"summary_type": "mean"}, "summary_type = 'mean' is not supported, only 'f"),
        ({"summary_use_proj": False}, "summary_use_proj = False is not supported"),
        ({"summary_activation": "tanh"}, "summary_activation = 'tanh' is not supp"),
        ({"embedding_size": 0}, r"embedding_size = 0 .*: must be at least 1"),
        ({"type_vocab_size": 1}, "type_vocab_size = 1 .*must be at least 2"),
        ({"model_type": "bert"}, "model_type = 'bert' is not supported"),
        ({"is_decoder": True}, "is_decoder = True is not supported"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    save(tmp_path, "Electra", "ForMaskedLM", {}, **changes)
    with pytest.raises(InteropError, match=message):
        huggingface.describe(tmp_path)


def test_tensors_of_another_width_are_refused(tmp_path):
    arrays = classifier("Electra")
    labels = numbered(["bad", "fair", "good"])
    head = "ForSequenceClassification"
    save(tmp_path, "Electra", head, arrays, embedding_size=13, **labels)
    with pytest.raises(InteropError, match=r"\(21, 11\) in the file, \(21, 13\)"):
        huggingface.read(tmp_path)
