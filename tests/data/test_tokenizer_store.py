"""Tokenizers of a workdir: trained once, taken from another run, or made from a
vocabulary.
"""

import dataclasses

import pytest

from helpers.pairs import pairs, write, write_pairs
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.sources import DataError, parallel_files
from transformer_jax.data.tokenizers import TokenizerError


@pytest.fixture
def text(tmp_path):
    return write_pairs(tmp_path / "text")


@pytest.mark.parametrize(
    ("count", "learned"), [(0, "0123456789abcdefghij"), (8, "0257acfh"), (1, "0a")]
)
def test_the_tokenizer_learns_from_lines_spread_evenly(count, learned, tmp_path):
    write(tmp_path / "text", en="0123456789", de="abcdefghij")
    corpus = pairs(tmp_path, tokenizer="words", tokenizer_lines=count)
    assert set(corpus.tokenizers["target"].tokens(range(4, 90))) - {""} == set(learned)


def test_tokenizers_are_shared_by_file_and_trained_once(text, tmp_path):
    joint = pairs(tmp_path)
    assert joint.tokenizers["source"] is joint.tokenizers["target"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "tokenizer.json",
        "made.json",
    }
    write(text, en=["other text"], de=["other text"])
    assert pairs(tmp_path).fingerprint(training=False) == joint.fingerprint(
        training=False
    )
    apart = dataclasses.replace(pairs(tmp_path, joint=False).config, tokenizer="words")
    corpus = Corpus(
        apart, pairs(tmp_path, joint=False).streams, tmp_path / "apart", parallel_files
    )
    write(text, en=["only english"], de=["nur deutsch"])
    assert corpus.tokenizers["source"].tokens(range(4, 7)) == ["english", "only", ""]
    assert corpus.tokenizers["target"].tokens(range(4, 7)) == ["deutsch", "nur", ""]
    assert sorted(path.name for path in (tmp_path / "apart").glob("tokenizer*")) == [
        "tokenizer.source.json",
        "tokenizer.target.json",
    ]


def test_a_tokenizer_must_fit_the_model(text, tmp_path):
    assert pairs(tmp_path).tokenizers["source"].size <= 300
    with pytest.raises(
        ValueError,
        match=(
            r"ids, but model.source_vocab_size and model.target_vocab_size = 260: the"
            r" vocabulary does not"
        ),
    ):
        _ = pairs(tmp_path, vocab_size=260).tokenizers
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(
        TokenizerError,
        match=(
            r"'bpe_bytes', model\.source_.* = 9, data\.min_count = 1: vocab_size=9 is"
        ),
    ):
        _ = pairs(tmp_path, vocab_size=9).tokenizers


def test_a_lost_or_broken_tokenizer(text, tmp_path):
    _ = pairs(tmp_path).tokenizers
    path = tmp_path / "run" / "tokenizer.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(TokenizerError, match="Cannot load the tokenizer"):
        _ = pairs(tmp_path).tokenizers
    path.unlink()
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(
        ValueError,
        match=(
            r"tokenizer.json is missing, but the checkpoints in this workdir depend on"
        ),
    ):
        _ = pairs(tmp_path).tokenizers


def test_a_tokenizer_may_come_from_another_run(text, tmp_path, caplog):
    caplog.set_level("INFO")
    first = pairs(tmp_path, joint=False)
    before = first.fingerprint(training=False)

    def second(vocab_size):
        streams = {
            name: dataclasses.replace(stream, vocab_size=vocab_size)
            for name, stream in first.streams.items()
        }
        return Corpus(
            first.config,
            streams,
            tmp_path / "second",
            parallel_files,
            start=tmp_path / "run",
        )

    write(text, en=["other text"], de=["anderer Text"])
    assert second(300).fingerprint(training=False) == before
    assert f"tokenizer.source.json taken from {tmp_path / 'run'}" in caplog.text
    with pytest.raises(
        ValueError,
        match=(
            r"second/tokenizer\.source\.json has \d+ ids, but .* = 260: the vocabulary"
        ),
    ):
        _ = second(260).tokenizers
    for folder in ("run", "second"):
        (tmp_path / folder / "tokenizer.target.json").unlink()
    with pytest.raises(
        ValueError,
        match=(
            r"run/tokenizer\.target\.json is missing, but this run starts from .*/run: "
        ),
    ):
        _ = second(300).tokenizers


def test_a_tokenizer_may_be_made_from_a_vocabulary(text, tmp_path, caplog):
    caplog.set_level("INFO")
    path, tokens = tmp_path / "vocab.txt", ["[UNK]", "ek", "[CLS]", "[SEP]", "at"]
    path.write_text("\n".join(tokens))
    options = {"tokenizer": "bert", "vocabulary": str(path), "lowercase": True}
    corpus = pairs(tmp_path, **options)
    assert corpus.encode("source", ["EK at ut"], begin=True)[0].tolist() == [
        2,
        1,
        4,
        0,
        3,
    ]
    assert f"tokenizer.json made from {path}" in caplog.text
    path.unlink()
    assert pairs(tmp_path, **options).fingerprint(False) == corpus.fingerprint(False), (
        "it is read from the workdir"
    )
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"Cannot read .*vocab\.txt"):
        _ = pairs(tmp_path, **options).tokenizers
