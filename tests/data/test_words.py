"""Subwords of words by hand and for every kind of tokenizer, and rows of whole words
by their definition.
"""

import numpy as np
import pytest

from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizer_training import KINDS, bert, train_tokenizer
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.data.words import TaggingData, subwords, whole_words, word_rows

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "jim",
    "hen",
    "##son",
    "was",
    "a",
    "puppet",
    "##eer",
    "-",
]

SENTENCES = [["Jim", "Henson", "was"], [], ["a-Jím", "\x01", "puppeteer", "?"]]


@pytest.fixture
def tokenizer():
    return Tokenizer(
        bert({piece: i for i, piece in enumerate(PIECES)}, lowercase=True).to_str()
    )


def shown(pieces):
    return [[PIECES[i] for i in pieces[word]] for word in range(len(pieces))]


def test_every_word_has_its_pieces_or_is_unknown(tokenizer):
    """The first words are those of Devlin et al. 2019, Section 5.3.

    U+0001 is removed from text, and "?" is unknown.
    """
    assert shown(subwords(tokenizer, SENTENCES, unknown=1)) == [
        ["jim"],
        ["hen", "##son"],
        ["was"],
        ["a", "-", "jim"],
        ["[UNK]"],
        ["puppet", "##eer"],
        ["[UNK]"],
    ]
    assert shown(
        subwords(tokenizer, [["\x01"], ["a"], ["\x01", "\x02"]], unknown=3)
    ) == [
        ["[SEP]"],
        ["a"],
        ["[SEP]"],
        ["[SEP]"],
    ]
    assert len(subwords(tokenizer, [[], []], unknown=1)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_words_are_those_of_the_sentence(kind):
    """Where a space is a part of the text, it belongs to the word after it."""
    sentences = [
        ["the", "then", "I"],
        ["a"],
        ["then", "naïve", "the", "😀", "the"],
        ["I", "them"],
    ]
    lines = [" ".join(words) for words in sentences]
    tokenizer = train_tokenizer(kind, lines * 3, 300)
    pieces = subwords(tokenizer, sentences, unknown=0)
    spaced = " " if kind in ("bpe_bytes", "characters") else ""
    alone = [
        spaced * (k > 0) + word for words in sentences for k, word in enumerate(words)
    ]
    assert [pieces[i].tolist() for i in range(len(pieces))] == tokenizer.encode_batch(
        alone
    )
    assert pieces.values.tolist() == [
        i for ids in tokenizer.encode_batch(lines) for i in ids
    ]


def test_whole_words_by_hand():
    counts, owners = whole_words(Ragged.of([[3, 2, 2], [], [5], [1, 5]]), room=5)
    assert counts.tolist() == [2, 1, 0, 1, 1, 1]
    assert owners.tolist() == [0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("room", [3, 7, 50])
def test_rows_hold_all_words_and_none_has_room_for_the_next(room):
    draw = np.random.default_rng(room)
    sizes = Ragged.of(
        [draw.integers(1, 4, draw.integers(0, 23)).tolist() for _ in range(31)]
    )
    counts, owners = whole_words(sizes, room)
    assert np.bincount(owners, counts, minlength=31).tolist() == sizes.lengths.tolist()
    assert (np.diff(owners) <= 1).all()
    rows = Ragged(sizes.values, counts)
    for i in range(len(rows)):
        assert rows[i].sum() <= room
        if i and owners[i] == owners[i - 1]:
            assert rows[i - 1].sum() + rows[i][0] > room


def test_rows_by_hand(tokenizer, caplog):
    """Without its special tokens, a row has room for three subwords.

    The word a-a-a has five.
    """
    sentences = [["Jim", "Henson", "was"], [], ["a", "a-a-a", "a"]]
    rows, first, owners = word_rows(
        subwords(tokenizer, sentences, unknown=1),
        [3, 0, 3],
        limit=5,
        begin=2,
        end=3,
        source="val",
    )
    assert shown(rows) == [
        ["[CLS]", "jim", "hen", "##son", "[SEP]"],
        ["[CLS]", "was", "[SEP]"],
        ["[CLS]", "[SEP]"],
        ["[CLS]", "a", "[SEP]"],
        ["[CLS]", "a", "-", "a", "[SEP]"],
        ["[CLS]", "a", "[SEP]"],
    ]
    assert [first[i].tolist() for i in range(6)] == [
        [0, 1, 1, 0, 0],
        [0, 1, 0],
        [0, 0],
        [0, 1, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 0],
    ]
    assert owners.tolist() == [0, 0, 1, 2, 2, 2]
    assert (
        "val: 2 of 3 sentences divided into rows of data.max_length = 5 tokens, "
        "the first is sentence 1" in caplog.text
    )


def test_the_tags_of_a_scheme():
    assert TaggingData(types=("X", "Y")).tags == ("O", "B-X", "I-X", "B-Y", "I-Y")
    assert TaggingData(types=("X",), scheme="bioes").tags == (
        "O",
        "B-X",
        "I-X",
        "E-X",
        "S-X",
    )
