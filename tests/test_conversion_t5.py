"""A folder of T5 becomes a workdir, which answers texts and becomes a folder again."""

import json
import string

import numpy as np
import pytest

import transformer_jax
from helpers.t5_folders import CONFIG, KINDS, V, save
from transformer_jax import conversion
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.files import write_all
from transformer_jax.interop.tensors import Tensors
from transformer_jax.workdir import read

GENERATION = {"num_beams": 2, "max_length": 7, "decoder_start_token_id": 0}


@pytest.mark.parametrize("version", KINDS)
def test_there_and_back(version, tmp_path):
    shapes, changes = KINDS[version]
    theirs, workdir, back = (tmp_path / name for name in ("theirs", "run", "back"))
    tensors = save(theirs, shapes, **changes, **GENERATION)
    words = [" ".join(string.ascii_lowercase)]
    tokenizer = train_tokenizer("bpe_metaspace", words, V)
    write_all(theirs, tokenizer_files.contents(tokenizer, end=True))

    conversion.to_workdir(conversion.config_for(str(theirs)), workdir)
    config = read(workdir)
    assert config.task == "sequence_to_sequence"
    assert (config.decoding.beam_size, config.decoding.max_extra) == (2, 6)
    assert config.decoding.at_limit == "rank"
    predictor = transformer_jax.load(str(workdir))
    # the decoder begins with the id of padding
    special = predictor.task.corpus.special_ids("target")
    assert (special.begin, special.pad) == (0, 0)
    answers = predictor.predict(["a bad cab", ""])
    assert [bool(answer) for answer in answers] == [True, False]

    conversion.to_folder(workdir, config, str(back))
    written = Tensors(back)
    assert set(written) == set(tensors)
    for name in tensors:
        np.testing.assert_array_equal(written[name], tensors[name], err_msg=name)
    after = json.loads((back / "config.json").read_text())
    expected = CONFIG | changes | {"decoder_start_token_id": 0, "pad_token_id": 0}
    assert {key: after[key] for key in expected} == expected
    generation = json.loads((back / "generation_config.json").read_text())
    assert {key: generation[key] for key in GENERATION} == GENERATION
    old, new = (tokenizer_files.from_folder(folder) for folder in (theirs, back))
    assert old.sha256 == new.sha256
