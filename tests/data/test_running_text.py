"""Running text: windows with and without overlap, packed documents, and their sizes."""

import dataclasses

import numpy as np
import pytest

from transformer_jax.data import sources
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.running_text import (
    RunningTextData,
    read_text,
    same_by_line,
    text_batches,
)
from transformer_jax.data.sources import DataError, Source
from transformer_jax.data.streams import Tokens

QUESTION = "To bé, or not to be, that is the question, again"  # 48 characters, 49 bytes
# of 1, 14, 2, 4 and 21 characters
DOCUMENTS = ["a", "bcdefg h\nij k\n", "lm", "n\r\no", "pqrstuvwxyzabcdefghij"]


def corpus_of(tmp_path, text=None, records=None, vocab_size=60, **data):
    """Return the corpus of a file, or of records like those of a tfds data set, with
    rows of 5 tokens.
    """
    (tmp_path / "text").mkdir(exist_ok=True)
    if text is not None:
        (tmp_path / "text" / "train.txt").write_bytes(text.encode())

    def read(directory, split, columns):
        if records is None:
            return sources.text_file(directory, split, columns)
        return Source({"text": sources.held(records)}, "made-up records")

    options = {"tokenizer": "characters", "max_length": 5, "batch_tokens": 80} | data
    config = RunningTextData(directory=str(tmp_path / "text"), **options)
    return Corpus(
        config,
        {"text": Tokens("text", "tokenizer.json", vocab_size, "model.vocab_size")},
        tmp_path,
        read,
    )


def batches_of(corpus, seed=None, split="train", layout="windows", stride=0, rows=3):
    return text_batches(
        corpus, "text", split, seed, layout=layout, stride=stride, rows=rows
    )


def epoch(batches, number=0):
    plan = batches.plan
    return [
        batches.load(plan.batch(i))
        for i in range(number * len(plan), (number + 1) * len(plan))
    ]


def ids_of(corpus, text=QUESTION):
    return corpus.encode("text", [text], end=False).values


@pytest.mark.parametrize("rows", [3, 16])
def test_windows_in_order_predict_every_token_but_the_first_once(rows, tmp_path):
    corpus = corpus_of(tmp_path, QUESTION)
    ids, batches = ids_of(corpus), batches_of(corpus, rows=rows)
    read, said = {}, {}
    for arrays in epoch(batches):
        assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
            "text": ((rows, 5), np.int32),
            "target": ((rows, 5), np.int32),
            "text_length": ((rows,), np.int32),
            "index": ((rows,), np.int32),
        }
        for i, n, one, other in zip(
            *(arrays[k] for k in ("index", "text_length", "text", "target")),
            strict=True,
        ):
            assert not one[n:].any()
            assert not other[n:].any()
            assert (n == 0) == (i == -1)
            read[int(i)], said[int(i)] = one[:n], other[:n]
    np.testing.assert_array_equal(
        np.concatenate([read[i] for i in range(10)]), ids[:-1]
    )
    np.testing.assert_array_equal(np.concatenate([said[i] for i in range(10)]), ids[1:])
    assert batches.references[0][:2] == (
        47,
        48,
    ), "tokens and their bytes, without the first token"


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [2, 5, 6, 7, 11, 48])
def test_overlapping_windows_count_every_token_once_with_enough_context(
    stride, length, tmp_path
):
    corpus = corpus_of(tmp_path, QUESTION[:length])
    ids = ids_of(corpus, QUESTION[:length])
    counted = []
    for arrays in epoch(batches_of(corpus, stride=stride)):
        assert ("counted" in arrays) == (stride < 5)
        for row, i in enumerate(arrays["index"]):
            n, start = arrays["text_length"][row], i * stride
            counts = np.flatnonzero(arrays.get("counted", np.ones((3, 5)))[row, :n])
            if i >= 0:
                assert (
                    arrays["text"][row, :n].tolist() == ids[start : start + n].tolist()
                )
                assert (
                    arrays["target"][row, :n].tolist()
                    == ids[start + 1 : start + 1 + n].tolist()
                )
                assert i == 0 or counts[0] >= 5 - stride
                counted += (start + counts).tolist()
    assert counted == list(range(length - 1))


def test_shuffled_windows_are_full_and_the_targets_follow(tmp_path, caplog):
    corpus = corpus_of(tmp_path, QUESTION)
    ids, pairs_seen = ids_of(corpus), set()
    for number in range(6):
        arrays, *more = epoch(batches_of(corpus, seed=3, stride=2), number)
        assert arrays["text"].shape == (
            16,
            5,
        ), "as many rows as data.batch_tokens allows"
        assert not more
        real = arrays["index"] >= 0
        assert (arrays["text_length"] == 5 * real).all()
        for one, other in zip(
            arrays["text"][real], arrays["target"][real], strict=True
        ):
            (start,) = [
                i
                for i in range(len(ids) - 5)
                if (ids[i : i + 5] == one).all() and (ids[i + 1 : i + 6] == other).all()
            ]
            pairs_seen.add((number, start))
    starts = [
        sorted(start for n, start in pairs_seen if n == number) for number in range(6)
    ]
    assert all(set(np.diff(found)) == {5} for found in starts)
    assert len({found[0] for found in starts}) > 1, (
        "the offset must differ between epochs"
    )
    assert "train: 48 tokens in 8 windows of 5 tokens, 1 batch" in caplog.text


def written(kind):
    """Return the documents as a file or as records, with blank ones, and as strings."""
    if kind == "records":
        return {"records": ["", *DOCUMENTS, " \n", "\n"]}, DOCUMENTS
    lines = [document.rstrip("\n") + "\n" for document in DOCUMENTS]
    return {"text": "\n \r\n" + "\n \n\n".join(lines)}, lines


@pytest.mark.parametrize("kind", ["records", "file"])
@pytest.mark.parametrize("seed", [None, 7])
def test_packed_documents_predict_all_their_tokens_and_their_end(
    kind, seed, tmp_path, caplog
):
    source, documents = written(kind)
    corpus = corpus_of(tmp_path, **source)
    tokenizer, batches = (
        corpus.tokenizers["text"],
        batches_of(corpus, seed, layout="documents"),
    )
    pieces = []
    for arrays in epoch(batches, 0 if seed is None else 2):
        assert {x.dtype for x in arrays.values()} == {np.dtype(np.int32)}
        segments, positions = arrays["segment"], arrays["position"]
        np.testing.assert_array_equal((segments > 0).sum(axis=1), arrays["text_length"])
        for name in ("text", "target", "position"):
            assert not arrays[name][segments == 0].any()
        for row, segment in enumerate(segments):
            filled = segment[segment > 0]
            assert (np.diff(filled, prepend=0) >= 0).all()
            assert set(filled) == set(range(1, filled.max(initial=0) + 1))
            for number in set(filled):
                inside = segment == number
                assert positions[row, inside].tolist() == list(range(inside.sum()))
                pieces.append(
                    (
                        arrays["text"][row, inside].tolist(),
                        arrays["target"][row, inside].tolist(),
                    )
                )
    expected = []
    for document in documents:
        ids = [*tokenizer.encode_batch([document])[0], tokenizer.eos_id]
        expected += [
            (ids[i : min(i + 5, len(ids) - 1)], ids[i + 1 : i + 6])
            for i in range(0, len(ids) - 1, 5)
        ]
    assert sorted(pieces) == sorted(expected)
    assert "5 documents, 2 of them cut; " in caplog.text
    assert f"{100 - 100 * batches.plan.fill:.1f} % padding" in caplog.text
    if seed is None:
        size = sum(len(document.encode()) - 1 for document in documents)
        assert batches.references[0][:2] == (sum(map(len, documents)), size)


@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_a_batch_of_filler_rows_is_empty(layout, tmp_path):
    """A host may have no other rows of a batch."""
    plan, load, *_ = batches_of(corpus_of(tmp_path, QUESTION), seed=0, layout=layout)
    arrays = load(plan.batch(0)._replace(indices=np.array([-1, -1])))
    assert arrays["text"].shape == (2, 5)
    assert not any(x.any() for name, x in arrays.items() if name != "index")


def test_overlapping_windows_of_packed_documents_count_every_token_once(tmp_path):
    corpus = corpus_of(tmp_path, records=DOCUMENTS)
    batches = batches_of(corpus, layout="documents", stride=2)
    counted = []
    for arrays in epoch(batches):
        for row, segment in enumerate(arrays["segment"]):
            for number in range(1, segment.max() + 1):
                counts = arrays["counted"][row, segment == number]
                assert counts.all() or (not counts[:3].any() and counts[3:].all()), (
                    "3 tokens are context only"
                )
            counted += arrays["target"][row, arrays["counted"][row] > 0].tolist()
    ids = corpus.encode("text", DOCUMENTS)
    assert sorted(counted) == sorted(
        token for i in range(len(ids)) for token in ids[i][1:].tolist()
    )


def test_records_in_windows_are_joined_by_the_end_token(tmp_path):
    corpus = corpus_of(tmp_path, records=["", *DOCUMENTS])
    batches = batches_of(corpus)
    arrays = epoch(batches)
    found = np.concatenate([a["text"][a["index"] >= 0].ravel() for a in arrays])
    expected = corpus.encode("text", DOCUMENTS).values
    np.testing.assert_array_equal(found[: len(expected) - 1], expected[:-1])
    assert "segment" not in arrays[0]
    assert batches.references[0][:2] == (42 + 5 - 1, 42 - 1)


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size"),
    [("characters", 60), ("bpe_bytes", 260), ("bpe_bytes", 280)],
)
@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_text_survives_exactly(tokenizer, vocab_size, layout, tmp_path):
    """With 260 ids, every byte is a token."""
    text = "To  be,\tor é🌲\u00a0not\r\n   to be \n\n\n  that is\u2028 the question \n"
    corpus = corpus_of(tmp_path, text, tokenizer=tokenizer, vocab_size=vocab_size)
    found, decode = (
        read_text(corpus, "text", "train", layout),
        corpus.tokenizers["text"].decode,
    )
    parts = text.split("\n\n\n") if layout == "documents" else [text]
    expected = [parts[0] + "\n", parts[1]] if layout == "documents" else parts
    assert [decode(found.documents[i]) for i in range(len(found.documents))] == expected
    if vocab_size == 260:
        assert found.documents.lengths.tolist() == [
            len(t.encode()) + (layout == "documents") for t in expected
        ]


BLANKS = "the king  \n\n\n  is here\r\n\nthe king\n" * 9


@pytest.mark.parametrize(
    "kind", ["bpe_bytes", "bpe_metaspace", "unigram", "characters"]
)
def test_the_ids_of_a_file_are_those_of_its_whole_text(kind, tmp_path):
    corpus = corpus_of(tmp_path, BLANKS, tokenizer=kind, vocab_size=300)
    (ids,) = read_text(corpus, "text", "train", "windows").documents
    assert ids.tolist() == corpus.tokenizers["text"].encode_batch([BLANKS])[0]


@pytest.mark.parametrize("kind", ["bpe_metaspace", "unigram"])
def test_the_ids_of_a_document_are_those_of_its_whole_text(kind, tmp_path):
    corpus = corpus_of(tmp_path, BLANKS, tokenizer=kind, vocab_size=50)
    tokenizer = corpus.tokenizers["text"]
    first, second, *_ = read_text(corpus, "text", "train", "documents").documents
    for ids, text in ((first, "the king  \n"), (second, "  is here\r\n")):
        assert ids.tolist() == [*tokenizer.encode_batch([text])[0], tokenizer.eos_id]


@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_a_begin_id_precedes_each_document_and_all_its_text_is_predicted(
    layout, tmp_path
):
    corpus = corpus_of(tmp_path, "éab\n\nab\n")
    text = read_text(corpus, "text", "train", layout, begin=True)
    assert [row[0] for row in text.documents] == [
        corpus.tokenizers["text"].bos_id
    ] * len(text.documents)
    assert text.size == {"windows": 9, "documents": 8}[layout]


@pytest.mark.parametrize("layout", ["windows", "documents"])
@pytest.mark.parametrize(("kind", "same"), [("characters", True), ("unigram", False)])
def test_ids_by_line_are_compared_with_those_of_the_whole_text(
    kind, same, layout, tmp_path
):
    corpus = corpus_of(tmp_path, "a b\nb a\n\na\n", tokenizer=kind, vocab_size=20)
    assert same_by_line(corpus, "text", "train", layout) is same


@pytest.mark.parametrize(("text", "predicted"), [("éa", 1), ("aé", 2)])
@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_the_size_of_the_first_character_is_not_counted(
    text, predicted, layout, tmp_path
):
    corpus = corpus_of(tmp_path, text)
    assert batches_of(corpus, layout=layout).references[0][1] == predicted


@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_characters_unseen_in_training_are_counted(layout, tmp_path, caplog):
    corpus = corpus_of(tmp_path, "abc abc")
    (tmp_path / "text" / "val.txt").write_text("abxyx")
    (arrays,) = epoch(batches_of(corpus, split="val", layout=layout))
    assert (arrays["target"] == corpus.tokenizers["text"].unk_id).sum() == 3
    assert r"val.txt, split val: 3 of " in caplog.text
    assert "tokens are unknown to the tokenizer" in caplog.text


def test_a_short_text(tmp_path):
    """Training needs a whole window and the token after it.

    Evaluation and packed documents take what there is.
    """
    corpus = corpus_of(tmp_path, "abcde")
    with pytest.raises(
        DataError,
        match=(
            r"train\.txt, split train: 5 tokens are too few .* set data.max_length"
            r" to 4 "
        ),
    ):
        batches_of(corpus, seed=0)
    (arrays,) = epoch(batches_of(corpus))
    assert arrays["text_length"].tolist() == [4, 0, 0]
    (arrays,) = epoch(batches_of(corpus, seed=0, layout="documents"))
    assert sorted(arrays["text_length"].tolist()) == 15 * [0] + [5]
    (arrays,) = epoch(batches_of(corpus_of(tmp_path, "abcdef"), seed=0))
    assert sorted(arrays["text_length"].tolist()) == 15 * [0] + [5]


@pytest.mark.parametrize("seed", [None, 0])
def test_a_text_without_a_token_to_predict(seed, tmp_path):
    corpus = corpus_of(tmp_path, "a")
    with pytest.raises(
        DataError,
        match=r"train\.txt, split train: .* there must be two; use a longer text",
    ):
        batches_of(corpus, seed)
    arrays, *_ = epoch(batches_of(corpus, seed, layout="documents"))
    assert corpus.tokenizers["text"].eos_id in arrays["target"]
    with pytest.raises(
        DataError, match=r"train\.txt has no characters: it needs at least one"
    ):
        batches_of(corpus_of(tmp_path, ""), seed)
    with pytest.raises(
        DataError, match=r"train\.txt: all 2 lines of text in the split train are blank"
    ):
        batches_of(corpus_of(tmp_path, " \n\n"), seed)


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"text_column": ""}, "text_column", "must be the name of a feature"),
        ({"layout": "packed"}, "layout", "must be one of windows, documents"),
        (
            {"validation_stride": -1},
            "validation_stride",
            "must be in [1, max_length = 256], or 0 for max_length",
        ),
        (
            {"validation_stride": 257},
            "validation_stride",
            "must be in [1, max_length = 256]",
        ),
    ],
)
def test_problems_of_the_config(change, field, rule):
    good = RunningTextData(directory="somewhere", validation_stride=256)
    assert not list(good.problems())
    ((found, message),) = dataclasses.replace(good, **change).problems()
    assert found == field
    assert rule in message
