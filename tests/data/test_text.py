"""Token streams and batches made from files, with the tokenizers of a workdir."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import bucket_batches, cut, ladder_batches
from transformer_jax.data.sources import DataError, parallel_files, text_file
from transformer_jax.data.streams import TRAINED_HERE, Tokens
from transformer_jax.data.tables import tsv_file
from transformer_jax.data.text import ParallelData, TextData
from transformer_jax.data.tokenizers import TokenizerError

WORDS = ("ek", "at", "ut", "im")


def write(directory, split="train", **columns):
    directory.mkdir(exist_ok=True)
    for name, lines in columns.items():
        (directory / f"{split}.{name}").write_text("\n".join(lines) + "\n")


def pairs(tmp_path, *, joint=True, vocab_size=300, **data):
    """Return the corpus en → de of tmp_path/text."""
    config = ParallelData(
        **{
            "directory": str(tmp_path / "text"),
            "max_length": 32,
            "batch_tokens": 1024,
            **data,
        }
    )
    name = (lambda side: "tokenizer.json") if joint else "tokenizer.{}.json".format
    streams = {
        side: Tokens(column, name(side), vocab_size, f"model.{side}_vocab_size")
        for side, column in (("source", "en"), ("target", "de"))
    }
    return Corpus(config, streams, tmp_path / "run", parallel_files)


@pytest.fixture
def text(tmp_path):
    """Folder with 11 pairs of 1 to 4 words in each split."""
    for split, start in (("train", 0), ("val", 5)):
        lines = [
            " ".join(WORDS[j % 4] for j in range(i, i + 1 + i % 4))
            for i in range(start, start + 11)
        ]
        write(
            tmp_path / "text", split, en=lines, de=[line.swapcase() for line in lines]
        )
    return tmp_path / "text"


def texts(corpus, split):
    """Return {stream: its lines}."""
    return {
        name: corpus.open(split).column(stream.column)
        for name, stream in corpus.streams.items()
    }


def shuffled(corpus, seed=0, **options):
    return bucket_batches(
        corpus, texts(corpus, "train"), split="train", seed=seed, **options
    )


def epoch(batches, number=0):
    plan = batches.plan
    return [
        batches.load(plan.batch(i))
        for i in range(number * len(plan), (number + 1) * len(plan))
    ]


def decoded(corpus, arrays, stream):
    """Return {example: its text}, decoded from the valid tokens only."""
    rows = zip(arrays["index"], arrays[stream], arrays[f"{stream}_length"], strict=True)
    return {
        int(i): corpus.tokenizers[stream].decode(ids[:length])
        for i, ids, length in rows
        if i >= 0
    }


@pytest.mark.parametrize("joint", [True, False])
def test_training_takes_every_pair_once_an_epoch(joint, text, tmp_path):
    corpus = pairs(tmp_path, joint=joint)
    batches = shuffled(corpus, seed=3)
    for number in (0, 1):
        found = {"source": {}, "target": {}}
        for arrays in epoch(batches, number):
            assert arrays.keys() == {
                "source",
                "source_length",
                "target",
                "target_length",
                "index",
            }
            assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
            assert len(arrays["source"]) % 8 == 0
            for side, seen in found.items():
                lengths, ids = arrays[f"{side}_length"], arrays[side]
                assert (lengths[arrays["index"] < 0] == 0).all()
                assert (ids[np.arange(ids.shape[1]) >= lengths[:, None]] == 0).all()
                ends = np.take_along_axis(
                    ids, np.maximum(lengths - 1, 0)[:, None], axis=1
                )[:, 0]
                assert (ends[lengths > 0] == corpus.tokenizers[side].eos_id).all()
                seen |= decoded(corpus, arrays, side)
        assert [found["source"][i] for i in range(11)] == corpus.open("train").column(
            "en"
        )
        assert [found["target"][i] for i in range(11)] == corpus.open("train").column(
            "de"
        )


def test_pairs_left_out_of_training_are_counted(tmp_path, caplog):
    write(
        tmp_path / "text",
        en=["ek"] * 4 + [""],
        de=["dk", "dk " * 5, "dk " * 6, "dk " * 50, "dk"],
    )
    batches = shuffled(pairs(tmp_path, tokenizer="words"), max_ratio=5.0)
    assert batches.plan.kept.tolist() == [0, 1]
    assert "2 examples in 1 batch of 1 shape; " in caplog.text
    assert (
        "left out: 1 longer than data.max_length = 32, "
        "1 with an empty side, 1 above data.max_ratio = 5" in caplog.text
    )
    assert shuffled(pairs(tmp_path)).plan.kept.tolist() == [0, 1, 2]


def test_a_corpus_of_no_usable_pair_is_refused_for_the_reason(text, tmp_path):
    write(text, "train", en=["ek", ""] * 5 + [""], de=["", "dk"] * 5 + ["dk"])
    with pytest.raises(
        ValueError,
        match=(
            r"none of 11 examples is left to train on: 11 have an empty side, 0 exceed"
        ),
    ):
        shuffled(pairs(tmp_path))


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


def test_evaluation_takes_every_pair_once_cut_to_the_models_length(
    text, tmp_path, caplog
):
    lines = (text / "val.de").read_text().splitlines()
    lines[0], lines[1] = "", "dk " * 40
    write(text, "val", de=lines)
    corpus = pairs(tmp_path)
    batches = ladder_batches(
        corpus, texts(corpus, "val"), rows=3, limit=32, source="val"
    )
    source, target = {}, {}
    for arrays in epoch(batches):
        assert len(arrays["source"]) == 3
        source |= decoded(corpus, arrays, "source")
        target |= decoded(corpus, arrays, "target")
        assert (arrays["target_length"] <= 32).all()
    assert (
        [source[i] for i in range(11)]
        == list(batches.records)
        == corpus.open("val").column("en")
    )
    assert list(batches.references) == lines
    assert [target[i] for i in range(11) if i != 1] == [
        line for i, line in enumerate(lines) if i != 1
    ]
    assert 0 < len(target[1]) < len(lines[1])
    assert "val, line 2: " in caplog.text
    assert "cut to model.max_length = 32" in caplog.text


def test_the_shape_of_the_first_stream_depends_on_its_own_length_alone(text, tmp_path):
    corpus = pairs(tmp_path, tokenizer="words")
    lines = {"source": ["ek", "ek " * 10, "at"], "target": ["EK " * 14, "AT", "UT"]}
    batches = ladder_batches(corpus, lines, rows=2, limit=20, source="lines")
    assert batches.plan.shapes == [(2, 8, 16), (2, 12, 8)]
    assert (batches.records, batches.references) == (lines["source"], lines["target"])
    alone = ladder_batches(
        corpus, {"source": lines["source"]}, rows=2, limit=20, source="lines"
    )
    assert alone.plan.shapes == [(2, 8), (2, 12)]
    assert alone.references == ()
    assert epoch(alone)[0].keys() == {"source", "source_length", "index"}
    for both, one in zip(epoch(batches), epoch(alone), strict=True):
        np.testing.assert_array_equal(both["source"], one["source"])


def test_empty_lines_are_named(text, tmp_path, caplog):
    """A line of spaces is not empty, because it has a token."""
    corpus, lines = pairs(tmp_path), ["ek", "", "  ", "at", "", "", "", "", ""]
    (arrays,) = epoch(
        ladder_batches(corpus, {"source": lines}, rows=9, limit=20, source="input")
    )
    lengths = arrays["source_length"]
    assert [i for i in range(9) if lengths[i] == 1] == [1, 4, 5, 6, 7, 8]
    assert "input: 6 lines are empty: lines 2, 5, 6, 7, 8, …" in caplog.text
    (arrays,) = epoch(
        ladder_batches(
            corpus, {"source": lines}, rows=9, limit=20, source="bare", end=False
        )
    )
    np.testing.assert_array_equal(arrays["source_length"], lengths - 1)
    assert "bare: 6 lines are empty: lines 2, 5, 6, 7, 8, …" in caplog.text


def test_begin_and_end_count_but_do_not_make_a_line_uneven(tmp_path, caplog):
    """A word with begin and end has 3 tokens. data.max_ratio counts only the tokens
    between begin and end.
    """
    write(
        tmp_path / "text",
        en=["ek", "ek", "", "ek " * 5],
        de=["dk " * 2, "dk " * 3, "dk", "dk " * 4],
    )
    corpus = pairs(tmp_path, tokenizer="words", max_length=6, batch_tokens=48)
    batches = shuffled(
        corpus,
        max_ratio=2.0,
        begin=True,
        more_arrays={"label": np.array([7, 8, 9, 10])},
    )
    assert batches.plan.kept.tolist() == [0]
    assert (
        "left out: 1 longer than data.max_length = 6, "
        "1 with an empty side, 1 above data.max_ratio = 2" in caplog.text
    )
    (arrays,) = epoch(batches)
    ids = corpus.tokenizers["source"]
    assert arrays["source"][0].tolist() == [
        ids.bos_id,
        *ids.encode_batch(["ek"])[0],
        ids.eos_id,
    ]
    assert arrays["target_length"].tolist() == [4] + 7 * [0]
    assert arrays["label"].tolist() == [7] + 7 * [0]
    assert arrays["label"].dtype == np.int32


def test_other_values_stand_beside_each_line(text, tmp_path):
    corpus = pairs(tmp_path)
    lines = {"source": corpus.open("val").column("en")}
    batches = ladder_batches(
        corpus,
        lines,
        rows=3,
        limit=32,
        source="val",
        more_arrays={"label": np.arange(100, 111)},
    )
    found = {
        int(i): int(x)
        for arrays in epoch(batches)
        for i, x in zip(arrays["index"], arrays["label"], strict=True)
    }
    assert found == {-1: 0, **{i: 100 + i for i in range(11)}}


def test_cut_says_what_it_cuts(text, tmp_path, caplog):
    corpus = pairs(tmp_path, tokenizer="words")
    rows = corpus.encode("source", ["ek at ut", "ek", "ek at ut im"], begin=True)
    tokenizer = corpus.tokenizers["source"]
    ek, at, bos, eos = (
        *tokenizer.encode_batch(["ek at"])[0],
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    kept = cut(rows, 4, "here", "data.max_length = 4")
    assert [kept[i].tolist() for i in range(3)] == [
        [bos, ek, at, eos],
        [bos, ek, eos],
        [bos, ek, at, eos],
    ]
    assert [
        record.message for record in caplog.records if "here" in record.message
    ] == [
        "here, line 1: 5 tokens, cut to data.max_length = 4",
        "here, line 3: 6 tokens, cut to data.max_length = 4",
    ]


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


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"source": "web"}, "source", "must be one of files, tfds"),
        ({"source": "tfds"}, "name", "must be the data set's name in tfds, e.g."),
        ({"directory": ""}, "directory", "add --config.data.directory=DIR"),
        ({"tokenizer": "bpe"}, "tokenizer", "must be one of bpe_bytes"),
        (
            {"tokenizer": "unigram", "min_count": 2},
            "min_count",
            "must be 1 with data.tokenizer = 'unigram'",
        ),
        (
            {"vocabulary": "vocab.txt", "tokenizer": "wordpiece"},
            "vocabulary",
            "must be '' unless data.tokenizer = 'bert'",
        ),
        ({"max_length": 1}, "max_length", "at least 2"),
        ({"tokenizer_lines": -1}, "tokenizer_lines", "at least 1, or 0 for all"),
        ({"max_buckets": 0}, "max_buckets", "at least 1"),
        (
            {"batch_tokens": 255, "max_length": 32},
            "batch_tokens",
            "set it to 256 or more",
        ),
        (
            {"target_language": "en"},
            "target_language",
            "must differ from source_language",
        ),
        ({"max_ratio": 0.5}, "max_ratio", "at least 1, or 0"),
        ({"max_ratio": float("nan")}, "max_ratio", "at least 1, or 0"),
    ],
)
def test_problems_of_the_config(change, field, rule):
    good = ParallelData(directory="somewhere")
    assert list(good.problems()) == []
    ((found, message),) = dataclasses.replace(good, **change).problems()
    assert found == field
    assert rule in message


def test_what_the_config_declares_of_its_fields():
    fields = {field.name: field.metadata for field in dataclasses.fields(TextData)}
    free = {name for name, metadata in fields.items() if metadata.get("free")}
    assert free == {"directory", "validation_split", "test_split", "vocabulary"}
    small = {
        name: metadata["small"]
        for name, metadata in fields.items()
        if "small" in metadata
    }
    assert list(TextData(directory="d", **small).problems()) == []
    assert (small["max_length"], small["batch_tokens"], small["max_buckets"]) == (
        32,
        1024,
        1,
    )
