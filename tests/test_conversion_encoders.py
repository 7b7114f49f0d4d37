"""RoBERTa, XLM-R, DistilBERT and ELECTRA: folders become workdirs, start runs, and are
written again with their tokenizers.
"""

import json

import numpy as np
import pytest

import transformer_jax
from helpers.corpus import write_corpus
from helpers.encoder_folders import (
    CONFIGS,
    POSITIONS,
    discriminator,
    save,
    tensors,
)
from helpers.runs import small
from transformer_jax import conversion, experiment, transfer
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_frames import separators
from transformer_jax.interop.tensors import Tensors
from transformer_jax.workdir import read

SLOW = pytest.mark.slow
KINDS = {
    "Roberta": "bpe_bytes",
    "XLMRoberta": "unigram",
    "DistilBert": "bert",
    "Electra": "bert",
}


def folder_of(family, folder):
    """Write a masked language model of `family`."""
    arrays = tensors(family, masked_lm=True, pooler=False)
    return save(folder, family, "ForMaskedLM", arrays), arrays


@pytest.mark.parametrize(
    "family",
    ["Roberta", "XLMRoberta", "DistilBert", pytest.param("Electra", marks=SLOW)],
)
def test_there_and_back(tmp_path, family):
    folder, arrays = folder_of(family, tmp_path / "theirs")
    config = conversion.config_for(str(folder))
    assert config.data.tokenizer == KINDS[family]
    conversion.to_workdir(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    (prediction,) = predictor.predict([{"text": "ek [MASK] at"}])
    assert len(prediction["masks"]) == 1
    conversion.to_folder(tmp_path / "run", read(tmp_path / "run"), str(tmp_path / "b"))
    written = Tensors(tmp_path / "b")
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        skipped = 2 if name == f"roberta.{POSITIONS}" else 0
        np.testing.assert_array_equal(written[name][skipped:], array[skipped:], name)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == [f"{family}ForMaskedLM"]
    assert config["model_type"] == CONFIGS[family]["model_type"]
    old, new = (tokenizer_files.from_folder(path) for path in (folder, tmp_path / "b"))
    lines = ["ek at", "ab  cd"]
    assert new.encode_batch(lines) == old.encode_batch(lines)
    count = 1 + family.endswith("Roberta")
    assert separators(new) == separators(old) == count
    settings = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    names = None if family == "Electra" else ["input_ids", "attention_mask"]
    assert settings.get("model_input_names") == names


@pytest.mark.slow
def test_a_discriminator_there_and_back(tmp_path):
    """A run of a folder has a new generator, which is not written."""
    arrays = discriminator()
    folder = save(tmp_path / "theirs", "Electra", "ForPreTraining", arrays)
    config = conversion.config_for(str(folder))
    assert config.task == "electra_pretraining"
    conversion.to_workdir(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert "generator" in predictor.params
    (prediction,) = predictor.predict([{"text": "ek at"}])
    assert len(prediction["replaced"]) == len(prediction["tokens"]) > 2
    conversion.to_folder(tmp_path / "run", read(tmp_path / "run"), str(tmp_path / "b"))
    written = Tensors(tmp_path / "b")
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(written[name], array, name)


@pytest.mark.parametrize(
    "family",
    [
        "Roberta",
        pytest.param("XLMRoberta", marks=SLOW),
        pytest.param("DistilBert", marks=SLOW),
        pytest.param("Electra", marks=SLOW),
    ],
)
def test_fine_tuning_on_pairs(tmp_path, family):
    write_corpus(tmp_path / "data")
    if family == "Electra":
        folder = save(tmp_path / "theirs", family, "ForPreTraining", discriminator())
    else:
        folder, _ = folder_of(family, tmp_path / "theirs")
    config = small("classification", tmp_path / "data")
    config.update_from_flattened_dict(transfer.keys_for(str(folder)))
    config.data.second_column = "reversed"
    config.training.steps = 2
    run = experiment.run(config, tmp_path / "run")
    assert int(run.state.step) == 2
    predictor = transformer_jax.load(str(tmp_path / "run"))
    record = {"sentence": "ek", "reversed": "ke"}
    assert "label" in predictor.predict([record])[0]
    frame = predictor.task.config.backbone.frame(predictor.task.corpus)
    assert frame.separators == 1 + family.endswith("Roberta")
    stored = read(tmp_path / "run")
    conversion.to_folder(tmp_path / "run", stored, str(tmp_path / "back"))
    named = json.loads((tmp_path / "back" / "config.json").read_text())
    assert named["architectures"] == [f"{family}ForSequenceClassification"]
    if family.endswith("Roberta"):  # positions are read from the third row on
        name = f"roberta.{POSITIONS}"
        before, after = Tensors(folder)[name], Tensors(tmp_path / "back")[name]
        assert not after[:2].any()
        assert (before[2:] != after[2:]).any()
        # two large steps; rows of other positions differ by more
        np.testing.assert_allclose(before[2:], after[2:], atol=0.5)
