"""Texts of any length are encoded as wholes, although they are encoded in parts."""

import itertools

import pytest

from helpers.layouts import LAYOUTS, TEXT
from transformer_jax.data import whole_texts
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.data.whole_texts import BATCH, OVERLAP, PART, encode_texts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_are_those_of_the_whole_text(layout):
    tokenizer = LAYOUTS[layout]
    texts = [
        TEXT,
        "",
        "one line",
        TEXT[:PART] + "ab" * 2 * PART + TEXT[:PART],
        "\n" * 2 * PART,
    ]
    encoded = encode_texts(tokenizer, ([text] for text in texts))
    assert [row.tolist() for row in encoded.ids] == tokenizer.encode_batch(texts)
    assert encoded.sizes.tolist() == [len(text.encode()) for text in texts]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_may_come_in_pieces(layout):
    lines = TEXT[: PART + 2 * OVERLAP].splitlines(keepends=True)
    whole, same = (
        encode_texts(LAYOUTS[layout], [text]) for text in (["".join(lines)], lines)
    )
    assert whole.ids.values.tolist() == same.ids.values.tolist()
    assert len(whole.ids.values) > 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_is_the_text_before_the_second_token(layout):
    tokenizer, texts = LAYOUTS[layout], ["naïve king", "é", "\n\n king", TEXT]
    _, starts, _ = tokenizer.spans(texts)
    expected = [
        text[: row[1]] if len(row) > 1 else text
        for text, row in zip(texts, starts, strict=True)
    ]
    assert encode_texts(tokenizer, map(list, texts)).heads.tolist() == [
        len(text.encode()) for text in expected
    ]


def characters_encoded(monkeypatch, tokenizer, text):
    """Return the sizes of the requests that the encoding of a text makes, and their
    sum.
    """
    sizes, encode = [], Tokenizer.encodings

    def counted(self, texts):
        sizes.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encodings", counted)
    ids = encode_texts(tokenizer, [[text]]).ids[0].tolist()
    assert ids == tokenizer.encode_batch([text])[0]
    return max(sizes), sum(sizes)


def test_a_long_text_is_encoded_once_in_requests_of_bounded_size(monkeypatch):
    text = TEXT * 12
    assert len(text) > BATCH
    largest, total = characters_encoded(monkeypatch, LAYOUTS["llama 3"], text)
    assert largest < BATCH + PART + OVERLAP
    assert total < 1.1 * len(text)


def test_a_text_that_cannot_be_cut_takes_linear_time(monkeypatch):
    """The word has no place at which it could be cut.

    Encoding ever longer beginnings of it would be quadratic.
    """
    text = "a" * 40 * PART
    largest, total = characters_encoded(monkeypatch, LAYOUTS["words"], text)
    assert largest >= len(text)
    assert total < 5 * len(text)


def test_parts_whose_ends_differ_are_not_joined():
    """The right part starts within a run of spaces, and pairs them in another way."""
    tokenizer = LAYOUTS["bytes, not divided"]
    runs = ["the" + " " * (PART + n) + "king" * PART for n in range(4)]
    encoded = encode_texts(tokenizer, ([run] for run in runs))
    assert [row.tolist() for row in encoded.ids] == tokenizer.encode_batch(runs)


def test_characters_that_a_piece_holds_side_by_side_are_no_place_for_a_cut():
    joints = whole_texts._Joints(LAYOUTS["unigram, not divided"])
    tokenizer = LAYOUTS["unigram, not divided"]
    pieces = tokenizer.tokens(range(tokenizer.size))
    held = {a + b for piece in pieces[1:] for a, b in itertools.pairwise(piece)}
    one, other = tokenizer.id_of("k"), tokenizer.id_of("i")
    assert "ki" in held
    assert not joints._apart(one, other)
    assert "kf" not in held
    assert joints._apart(one, tokenizer.id_of("f"))
    assert not joints._apart(one, tokenizer.unk_id)
