"""Folders of encoder–decoders and of language models are trained further, and become
folders again.
"""

import string

import numpy as np
import pytest

from helpers import ROOT, bart_folders, gpt_folders, marian_folders, t5_folders
from helpers.corpus import write_corpus
from helpers.runs import small
from transformer_jax import conversion, experiment, transfer
from transformer_jax.config import load_recipe
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.files import write_all
from transformer_jax.interop.tensors import Tensors
from transformer_jax.workdir import read

TEXT = "eak dak"
GENERATION = {"max_length": 7}


def bart(folder, kind="Bart"):
    bart_folders.save(kind, folder, forced_eos_token_id=2, **GENERATION)
    bart_folders.save_tokenizer(kind, folder)


def mbart(folder):
    bart(folder, "MBart")


def letters(folder, **options):
    words = [" ".join(string.ascii_lowercase)]
    tokenizer = train_tokenizer("bpe_metaspace", words, t5_folders.V)
    write_all(folder, tokenizer_files.contents(tokenizer, **options))


def marian(folder):
    begin = {"decoder_start_token_id": marian_folders.V - 1}
    marian_folders.save(folder, marian_folders.SHARED, **begin, **GENERATION)
    letters(folder, end=True)


def t5(folder):
    begin = {"decoder_start_token_id": 0}
    t5_folders.save(folder, t5_folders.shapes(), **begin, **GENERATION)
    letters(folder, end=True)


def gpt2(folder):
    gpt_folders.save_gpt2(folder)


def llama(folder):
    config = gpt_folders.LLAMA | {"max_position_embeddings": 37}
    gpt_folders.save(folder, config, gpt_folders.llama_shapes())
    letters(folder, begin=True)


def plain(folder):
    """Return the tensors of a folder, without the prefix that some of GPT-2's have."""
    tensors = Tensors(folder)
    return {name.removeprefix("transformer."): tensors[name] for name in tensors}


def check_back(theirs, workdir, back, table):
    """Check that only values have changed, and the embedding is still near."""
    conversion.to_folder(workdir, read(workdir), str(back))
    before, after = plain(theirs), plain(back)
    assert set(before) == set(after)
    assert (before[table] != after[table]).any()
    assert np.abs(before[table] - after[table]).max() < 0.01


@pytest.mark.parametrize("make", [bart, mbart, marian, t5])
def test_fine_tuning_by_the_recipe_for_own_files(make, tmp_path):
    theirs, data, workdir = (tmp_path / name for name in ("theirs", "data", "run"))
    make(theirs)
    data.mkdir()
    for split in ("train", "val", "test"):
        for language in ("de", "en"):
            (data / f"{split}.{language}").write_text(f"{TEXT}\n" * 8)
    config = load_recipe(f"{ROOT}/configs/own_files.py:de-en,from={theirs}")
    if make is bart:
        assert config.data.source_frame == ("<s>", "")
        assert config.model.positions == "learned"
    config.data.directory = str(data)
    config.data.max_length = 10  # no text is longer
    config.data.batch_tokens = 80
    config.data.max_buckets = 1
    config.training.steps = 2
    config.optimizer.warmup_steps = 1
    config.training.evaluate_every = 2
    config.checkpoint.every = 2
    config.evaluation.batch_size = 8
    config.decoding.beam_size = 1
    run = experiment.run(config, workdir)
    assert int(run.state.step) == 2
    table = "shared.weight" if make is t5 else "model.shared.weight"
    check_back(theirs, workdir, tmp_path / "back", table)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_training_a_language_model_further(make, tmp_path):
    theirs, workdir = tmp_path / "theirs", tmp_path / "run"
    make(theirs)
    write_corpus(tmp_path / "data")
    config = small("language_modeling", tmp_path / "data")
    config.update_from_flattened_dict(transfer.keys_for(str(theirs)))
    config.data.layout = "windows"
    config.optimizer.learning_rate = 1e-4
    config.training.steps = 2
    run = experiment.run(config, workdir)
    assert int(run.state.step) == 2
    table = "wte.weight" if make is gpt2 else "model.embed_tokens.weight"
    check_back(theirs, workdir, tmp_path / "back", table)
