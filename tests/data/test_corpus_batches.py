"""Batches of a corpus: every example once, lengths, and what is left out or cut."""

import numpy as np
import pytest

from helpers.pairs import decoded, epoch, pairs, shuffled, texts, write, write_pairs
from transformer_jax.data.corpus_batches import cut, ladder_batches


@pytest.fixture
def text(tmp_path):
    return write_pairs(tmp_path / "text")


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
