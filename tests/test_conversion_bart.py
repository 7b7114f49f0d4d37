"""Folders of BART and mBART become workdirs, which answer texts, are fine-tuned, and
become folders again.
"""

import json

import numpy as np
import pytest
import tokenizers

import transformer_jax
from helpers.bart_folders import (
    BYTES,
    ENGLISH,
    GERMAN,
    KINDS,
    PIECES,
    save,
    save_tokenizer,
)
from transformer_jax import conversion, transfer
from transformer_jax.config import ConfigError, load_recipe, make_task, parse
from transformer_jax.data import tokenizer_files
from transformer_jax.interop.tensors import Tensors
from transformer_jax.training.sharding import make_mesh
from transformer_jax.workdir import read

GENERATION = {"max_length": 7, "forced_eos_token_id": 2}
BEGIN, END = 0, 2
FRAMES = {
    "Bart": (("<s>", ""), ("<s>", "")),
    "MBart": (("", "en_XX"), ("", "de_DE")),
}
TEXT = "eak dak"


def folder_of(kind, folder, **settings):
    tensors = save(kind, folder, **GENERATION)
    save_tokenizer(kind, folder, **settings)
    return tensors


def framed(kind, ids, language):
    """Return the ids of a text with those around it."""
    return [BEGIN, *ids, END] if kind == "Bart" else [*ids, END, language]


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, tmp_path):
    theirs, workdir, back = (tmp_path / name for name in ("theirs", "run", "back"))
    tensors = folder_of(kind, theirs)
    conversion.to_workdir(conversion.config_for(str(theirs)), workdir)
    config = read(workdir)
    assert (config.data.source_frame, config.data.target_frame) == FRAMES[kind]
    assert (config.decoding.max_extra, config.decoding.at_limit) == (6, "end")
    predictor = transformer_jax.load(str(workdir))
    corpus = predictor.task.corpus
    begin = KINDS[kind]["decoder_start_token_id"]
    assert corpus.special_ids("target") == (begin, END, 1)
    bare = corpus.tokenizers["source"].encode_batch([TEXT])[0]
    for side, language in (("source", ENGLISH), ("target", GERMAN)):
        row = framed(kind, bare, language)
        assert corpus.encode(side, [TEXT])[0].tolist() == row
        assert corpus.tokens(side).text(np.array(row)) == TEXT
    if kind == "MBart":  # a run of BART is evaluated below
        answers = predictor.predict([TEXT, ""])
        assert [bool(answer) for answer in answers] == [True, False]

    conversion.to_folder(workdir, config, str(back))
    written = Tensors(back)
    assert set(written) == set(tensors)
    after = json.loads((back / "config.json").read_text())
    assert after["decoder_start_token_id"] == begin
    assert json.loads((back / "tokenizer_config.json").read_text())["bos_token"] == (
        "<s>"
    )
    theirs_again = tokenizers.Tokenizer.from_file(str(back / "tokenizer.json"))
    assert theirs_again.encode(TEXT).ids == framed(kind, bare, ENGLISH)
    keys = [transfer.keys_for(str(folder)) for folder in (theirs, back)]
    for key in ("data.source_frame", "data.target_frame", "data.tokenizer"):
        assert keys[0][key] == keys[1][key]
    old, new = (tokenizer_files.from_folder(folder) for folder in (theirs, back))
    assert (old.bos_id, old.encode_batch([TEXT])) == (
        new.bos_id,
        new.encode_batch([TEXT]),
    )


def test_a_run_without_the_tokens_around_texts_warns(tmp_path, caplog):
    folder_of("Bart", tmp_path / "theirs")
    config = conversion.config_for(str(tmp_path / "theirs"))
    config.data.target_frame = ()
    task = make_task(parse(config), tmp_path / "run")
    transfer.source_of(task, make_mesh(task.config.mesh))
    (message,) = [m for m in caplog.messages if "was trained with" in m]
    assert "data.target_frame = ('<s>', ''), and here, no such tokens" in message


def test_the_recipe_refuses_what_is_no_encoder_decoder(tmp_path):
    folder_of("Bart", tmp_path)
    with pytest.raises(ConfigError, match="determines the model: leave out the size"):
        load_recipe(f"configs/own_files.py:de-en,1m,from={tmp_path}")


def test_the_language_of_the_target_may_be_another(tmp_path):
    folder_of("MBart", tmp_path / "theirs", src_lang="de_DE")
    config = conversion.config_for(str(tmp_path / "theirs"))
    assert config.data.source_frame == ("", "de_DE")
    config.data.target_frame = ("", "ro_RO")
    conversion.to_workdir(config, tmp_path / "run")
    config = read(tmp_path / "run")
    conversion.to_folder(tmp_path / "run", config, str(tmp_path / "back"))
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert after["decoder_start_token_id"] == PIECES.index("ro_RO")


def test_without_a_start_the_decoder_of_bart_begins_with_the_end(tmp_path):
    save("Bart", tmp_path, decoder_start_token_id=None)
    save_tokenizer("Bart", tmp_path)
    assert tokenizer_files.from_folder(tmp_path).bos_id == BYTES.index("</s>")
