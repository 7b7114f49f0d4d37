"""Tokens around source and target, as Hugging Face folders of BART and mBART name
them.
"""

import json

import pytest

from helpers.bart_folders import GERMAN, config, save_tokenizer
from transformer_jax.data.pair_frames import frames_of
from transformer_jax.data.tokenizers import TokenizerError

ROMANIAN = GERMAN + 2
FIFTY = {"tokenizer_class": "MBart50Tokenizer"}
START = "decoder_start_token_id"
FORCED = "forced_bos_token_id"


def frames(kind, folder, changes, **settings):
    content = config(kind) | changes
    (folder / "config.json").write_text(json.dumps(content))
    save_tokenizer(kind, folder, **settings)
    found = frames_of(folder, content)
    return found["source_frame"], found["target_frame"]


@pytest.mark.parametrize(
    ("kind", "changes", "settings", "source", "target"),
    [
        ("Bart", {}, {}, ("<s>", ""), ("<s>", "")),
        ("Bart", {FORCED: 0}, {}, ("<s>", ""), ("<s>", "")),
        ("MBart", {}, {}, ("", "en_XX"), ("", "de_DE")),
        ("MBart", {}, {"tgt_lang": "ro_RO"}, ("", "en_XX"), ("", "de_DE")),
        ("MBart", {START: None}, {}, ("", "en_XX"), ("", "en_XX")),
        (
            "MBart",
            {START: None},
            {"src_lang": "de_DE", "tgt_lang": "ro_RO"},
            ("", "de_DE"),
            ("", "ro_RO"),
        ),
        ("MBart", {START: 2, FORCED: ROMANIAN}, FIFTY, ("en_XX", ""), ("ro_RO", "")),
        (
            "MBart",
            {START: 2},
            FIFTY | {"tgt_lang": "de_DE"},
            ("en_XX", ""),
            ("de_DE", ""),
        ),
    ],
)
def test_tokens_around_source_and_target(
    kind, changes, settings, source, target, tmp_path
):
    assert frames(kind, tmp_path, changes, **settings) == (source, target)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {},
            {"src_lang": "xx_XX"},
            "the language 'xx_XX' is no token of the tokenizer",
        ),
        (
            {START: None},
            {"tgt_lang": "yy_YY"},
            "the language 'yy_YY' is no token of the tokenizer: name another one as",
        ),
        (
            {START: 99},
            {},
            "decoder_start_token_id = 99, but the tokenizer has no such id: choose one",
        ),
    ],
)
def test_an_unknown_language_is_refused(changes, settings, message, tmp_path):
    with pytest.raises(TokenizerError, match=message):
        frames("MBart", tmp_path, changes, **settings)
