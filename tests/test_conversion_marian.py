"""scripts/convert.py for Marian in both directions, and predict.py in between.

There are models with two tokenizers and with one.
"""

import json
import string

import numpy as np
import pytest

from helpers.forked import script
from helpers.marian_folders import CONFIG, KINDS, V, save
from transformer_jax import transfer
from transformer_jax.data import sentencepiece, tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.files import write_all
from transformer_jax.interop.tensors import Tensors
from transformer_jax.workdir import read

# Tokens of the tables: 31 of the source, or of both, and 29 of the target.
TOKENS = ["</s>", "<unk>", "▁", "▁a", *string.ascii_lowercase, "<pad>"]
OWN = ["</s>", "<unk>", "▁", *string.ascii_lowercase[:25], "<pad>"]


def two(folder, ties):
    """Write the files of two tokenizers, whose pieces are different."""
    own = TOKENS if ties == "all" else OWN
    made = []
    for tokens, pieces in ((TOKENS, TOKENS[2:-1]), (own, OWN[2:-1])):
        scores = {piece: -1.0 - i for i, piece in enumerate(pieces)}
        ids = {token: i for i, token in enumerate(tokens)}
        made.append(sentencepiece.tokenizer(sentencepiece.Pieces(scores, b""), ids))
    write_all(folder, sentencepiece.contents(*made, 37))


def one(folder, ties):
    tokenizer = train_tokenizer("bpe_metaspace", [" ".join(string.ascii_lowercase)], V)
    write_all(folder, tokenizer_files.contents(tokenizer, end=True))


@pytest.mark.parametrize(
    ("tokenizers", "ties"),
    [
        pytest.param(two, "all", marks=pytest.mark.slow),
        (two, "decoder"),
        (one, "all"),
    ],
)
def test_there_and_back(tmp_path, tokenizers, ties):
    shapes, changes = KINDS[ties]
    generation = {
        "num_beams": 2,
        "max_length": 7,
        "decoder_start_token_id": len(OWN if changes else TOKENS) - 1,
    }
    tensors = save(tmp_path / "theirs", shapes, **changes, **generation)
    tokenizers(tmp_path / "theirs", ties)
    joint = tokenizers is one
    assert (
        transfer.keys_for(str(tmp_path / "theirs")).get("data.joint_tokenizer", True)
        == joint
    )

    def run(name, *arguments, **more):
        result = script(name, *arguments, cwd=tmp_path, **more)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout.decode()

    assert run("convert", "--from_huggingface=theirs", "--workdir=run") == ""
    stored = read(tmp_path / "run")
    assert (stored.task, stored.data.joint_tokenizer, stored.init_from) == (
        "sequence_to_sequence",
        joint,
        "theirs",
    )
    assert (
        stored.decoding.beam_size,
        stored.decoding.max_extra,
        stored.decoding.max_ratio,
    ) == (2, 6, 0)
    translated = run(
        "predict", "--workdir=run", stdin=b"a bad cab\n\nab\n"
    ).splitlines()
    assert len(translated) == 3
    assert translated[1] == ""
    assert run("convert", "--workdir=run", "--to_huggingface=back") == ""
    written = Tensors(tmp_path / "back")
    assert set(written) == set(tensors)
    for name in tensors:
        np.testing.assert_array_equal(written[name], tensors[name], err_msg=name)
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    before = (
        CONFIG
        | changes
        | (
            {}
            if joint
            else {"decoder_start_token_id": generation["decoder_start_token_id"]}
        )
    )
    assert {key: after[key] for key in before} == before
    files = tokenizer_files.names_of(tmp_path / "back")
    assert files == tokenizer_files.names_of(tmp_path / "theirs")
    old, new = (
        [tokenizer_files.from_folder(tmp_path / folder, file) for file in files]
        for folder in ("theirs", "back")
    )
    assert [tokenizer.sha256 for tokenizer in old] == [
        tokenizer.sha256 for tokenizer in new
    ]
