"""The ids that end a text in a folder of Hugging Face."""

import json

import pytest

from helpers.gpt_folders import LLAMA, llama_shapes, save
from transformer_jax import conversion
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer


@pytest.mark.parametrize(
    ("named", "expected"),
    [("</s>", ()), ("b", ("b",)), (["</s>", "b"], ("</s>", "b")), (None, ())],
)
def test_an_end_that_is_not_the_tokenizers_ends_a_text_too(named, expected, tmp_path):
    """`generate` goes by generation_config.json, e.g. that of a model for
    conversations.
    """
    tokenizer = train_tokenizer("characters", ["abc"], 9)
    save(tmp_path, LLAMA, llama_shapes())
    tokenizer_files.to_folder(tokenizer, tmp_path)
    ids = (
        [tokenizer.id_of(token) for token in named]
        if isinstance(named, list)
        else named and tokenizer.id_of(named)
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    found = conversion.config_for(str(tmp_path)).decoding.end_ids
    assert found == tuple(map(tokenizer.id_of, expected))


def test_an_id_without_a_token_ends_nothing(tmp_path):
    save(tmp_path, LLAMA | {"eos_token_id": 10**6}, llama_shapes())
    tokenizer_files.to_folder(train_tokenizer("characters", ["abc"], 9), tmp_path)
    assert conversion.config_for(str(tmp_path)).decoding.end_ids == ()
