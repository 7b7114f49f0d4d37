"""A corpus: the lines of a split, their encoding, and what identifies them."""

import gzip
import json

import pytest

from helpers.pairs import pairs, write, write_pairs
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.sources import DataError, parallel_files, text_file
from transformer_jax.data.streams import TRAINED_HERE, Tokens
from transformer_jax.data.tables import tsv_file
from transformer_jax.data.text import TextData
from transformer_jax.data.tokenizers import TokenizerError


@pytest.fixture
def text(tmp_path):
    return write_pairs(tmp_path / "text")


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize("blank", ["", " ", "\t\u3000"])
def test_a_split_of_blank_lines_is_refused(language, blank, text, tmp_path):
    """Blank lines cannot be scored: either every prediction would be right, or none."""
    write(text, "val", **{language: [blank] * 11})
    where = r"val\.en and .*val\.de"
    with pytest.raises(
        DataError,
        match=rf"{where}: all 11 lines of {language} in the split val are blank",
    ):
        pairs(tmp_path).open("val")
    write(text, "val", **{language: [blank] * 10 + ["ek"]})
    assert len(pairs(tmp_path).open("val")) == 11
    with pytest.raises(
        DataError, match=r"all 10 lines of .. in the split val\[:10\] are blank"
    ):
        pairs(tmp_path).open("val[:10]")


def test_a_tokenizer_of_others_may_lack_an_end(text, tmp_path):
    corpus = pairs(tmp_path)
    path = tmp_path / "run" / "tokenizer.json"
    content = json.loads(corpus.tokenizers["source"].to_json())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] == "<unk>"
    ]
    path.write_text(json.dumps(content))
    corpus = pairs(tmp_path)
    assert len(corpus.encode("source", ["ek"], end=False)) == 1
    for what in ("begin", "end"):
        with pytest.raises(
            TokenizerError,
            match=rf"tokenizer\.json has no special id for the {what} of a line",
        ):
            corpus.encode(
                "source", ["ek"], **{"begin": False, "end": False, what: True}
            )


def test_the_fingerprint_is_of_the_text_not_its_packing(text, tmp_path):
    before = pairs(tmp_path).fingerprint(training=True)
    assert before.keys() == {"source tokenizer", "target tokenizer", "training data"}
    assert pairs(tmp_path).fingerprint(training=False).keys() == {
        "source tokenizer",
        "target tokenizer",
    }
    content = (text / "train.de").read_bytes()
    (text / "train.de.gz").write_bytes(gzip.compress(content))
    (text / "train.de").unlink()
    (text / "train.en").write_bytes(
        (text / "train.en").read_bytes().replace(b"\n", b"\r\n")
    )
    assert pairs(tmp_path).fingerprint(training=True) == before
    (text / "train.de.gz").write_bytes(gzip.compress(content[:-2] + b"t\n"))
    assert (
        pairs(tmp_path).fingerprint(training=True)["training data"]
        != before["training data"]
    )


def test_tables_and_their_labels(tmp_path):
    directory = tmp_path / "text"
    directory.mkdir()
    (directory / "train.tsv").write_text("sentence\tlabel\nek at\tA\nut\tB\nim\tA\n")
    config = TextData(
        directory=str(directory),
        tokenizer="words",
        train_split="train[:2]",
        max_length=8,
    )
    streams = {"text": Tokens("sentence", "tokenizer.json", 20, "model.vocab_size")}
    corpus = Corpus(
        config, streams, tmp_path / "run", tsv_file, extra_columns=["label"]
    )
    assert corpus.open("train[:2]").column("label") == ["A", "B"]
    assert corpus.open("train") is corpus.open("train")
    assert corpus.tokenizers["text"].tokens(range(4, 8)) == ["at", "ek", "ut", ""]
    before = corpus.fingerprint(training=True)["training data"]
    (directory / "train.tsv").write_text("sentence\tlabel\nek at\tA\nut\tA\nim\tA\n")
    assert (
        Corpus(config, streams, tmp_path / "run", tsv_file, ["label"]).fingerprint(
            True
        )["training data"]
        != before
    )


def test_a_text_is_one_stream_of_characters(tmp_path):
    directory = tmp_path / "text"
    directory.mkdir()
    content = "To be,\n\nor not\r\n to be"
    (directory / "play.txt").write_bytes(content.encode())
    config = TextData(
        directory=str(directory), tokenizer="characters", train_split="play[:50%]"
    )
    streams = {"text": Tokens("text", "tokenizer.json", 40, "model.vocab_size")}
    corpus = Corpus(config, streams, tmp_path / "run", text_file)
    ids = corpus.encode(
        "text", corpus.open("play[:50%]").column("text"), end=False
    ).values
    assert len(ids) == len(content) // 2
    assert corpus.tokenizers["text"].decode(ids) == content[: len(content) // 2]


def test_special_ids_of_a_corpus(text, tmp_path):
    """Without a workdir, the special ids are those of tokenizers trained by this
    package: 0, 1 and 2.
    """
    corpus = pairs(tmp_path)
    assert corpus.special_ids("source") == corpus.special_ids("target") == TRAINED_HERE
    nowhere = Corpus(corpus.config, corpus.streams, None, parallel_files)
    assert nowhere.special_ids("target") == TRAINED_HERE
    with pytest.raises(ValueError, match="without a workdir there are no tokenizers"):
        _ = nowhere.tokenizers
