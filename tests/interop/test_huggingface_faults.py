"""A disk that fails once while a folder of Hugging Face is read."""

import errno
import json
import os

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers.disks import Disk
from helpers.gpt_folders import LLAMA, llama_shapes, save
from transformer_jax.data import tokenizer_files
from transformer_jax.errors import UserError
from transformer_jax.interop import huggingface

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@pytest.fixture
def folder(tmp_path):
    """A folder in which every file has an effect."""
    save(tmp_path, LLAMA, llama_shapes())
    tokenizer = Tokenizer(
        models.BPE({"<unk>": 0, SPACE: 1, "a": 2}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 3}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"no_repeat_ngram_size": 2})
    )
    return tmp_path


def what_is_read(folder):
    assert tokenizer_files.is_folder(folder)
    pretrained = huggingface.read(folder)
    shapes = {path: leaf.shape for path, leaf in pretrained.parameters.items()}
    return tokenizer_files.from_folder(folder).to_json(), pretrained.outputs, shapes


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_error_that_may_pass_is_not_taken_for_a_missing_file_or_a_mistake(
    folder, number
):
    with Disk(folder).mounted() as disk:
        expected = what_is_read(folder)
    assert disk.count > 10
    for fail_at in range(1, disk.count + 1):
        with (
            Disk(folder, number, fail_at).mounted() as disk,
            pytest.raises(OSError, match=os.strerror(number)) as raised,
        ):
            what_is_read(folder)
        assert raised.value.errno == number, disk.failed
        assert not isinstance(raised.value, UserError), disk.failed
    assert what_is_read(folder) == expected
