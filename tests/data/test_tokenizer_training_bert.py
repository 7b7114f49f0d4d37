"""BERT's tokenizers, trained. Their oracle is BERT's algorithm in plain Python."""

import unicodedata

import numpy as np
import pytest

from helpers.tokenizing import ids, rows
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.tokenizers import TokenizerError

KNOWN = [*"abAÉéİΣß日本😀.'#-«", "\u0301", "\u0327"]

# spaces, characters that are removed, and an unknown one
OTHERS = [*"     \t\u3000\u200b\0\ufffd☃"]


def train(lowercase):
    rng = np.random.default_rng(7)
    return train_tokenizer(
        "bert",
        ["".join(rng.choice([*KNOWN, " "], 31)) for _ in range(99)],
        300,
        lowercase=lowercase,
    )


def random_lines():
    rng = np.random.default_rng(8)
    return [
        "",
        " ",
        *(
            "".join(rng.choice([*KNOWN, *KNOWN, *OTHERS], rng.integers(41)))
            for _ in range(300)
        ),
    ]


def basic(line, lowercase):
    """Return the words of BERT's basic tokenization."""
    spaced = ""
    for c in line:
        if not c.isspace() and (unicodedata.category(c)[0] == "C" or c == "\ufffd"):
            continue
        alone = unicodedata.category(c)[0] == "P" or (
            c.isascii() and c.isprintable() and not c.isalnum()
        )
        spaced += f" {c} " if alone or "\u4e00" <= c <= "\u9fff" else c
    return [
        normal for word in spaced.split() if (normal := normalized(word, lowercase))
    ]


def normalized(word, lowercase):
    if not lowercase:
        return word
    return "".join(
        c.lower()
        for c in unicodedata.normalize("NFD", word)
        if unicodedata.category(c) != "Mn"
    )


def longest_first(word, vocabulary):
    """Return the pieces of a word: the longest known one from the left, again and
    again.
    """
    pieces, start = [], 0
    while start < len(word):
        known = [
            end
            for end in range(start + 1, len(word) + 1)
            if ("##" * (start > 0)) + word[start:end] in vocabulary
        ]
        if not known:
            return ["[UNK]"]
        pieces.append("##" * (start > 0) + word[start : known[-1]])
        start = known[-1]
    return pieces


@pytest.mark.parametrize("lowercase", [False, True])
def test_pieces_are_those_of_the_algorithm(lowercase):
    tokenizer = train(lowercase)
    vocabulary = set(tokenizer.tokens(range(tokenizer.size)))
    found = [tokenizer.tokens(row) for row in tokenizer.encode(random_lines())]
    assert found == [
        [
            piece
            for word in basic(line, lowercase)
            for piece in longest_first(word, vocabulary)
        ]
        for line in random_lines()
    ]
    counts = [
        sum(kind(piece) for row in found for piece in row)
        for kind in (len, lambda p: p[:2] == "##", "[UNK]".__eq__)
    ]
    assert min(counts) > 100


def left(text, lowercase):
    """Return what BERT's tokenizer keeps of a text."""
    return "".join(basic(text, lowercase))


@pytest.mark.parametrize("lowercase", [False, True])
def test_spans_of_bert_are_those_of_the_line_as_given(lowercase):
    """A piece is what remains of its span, spans are in order, and nothing remains
    of the text outside them.
    """
    tokenizer, lines = train(lowercase), random_lines()
    encoded, starts, ends = tokenizer.spans(lines)
    assert rows(encoded) == tokenizer.encode_batch(lines)
    unknown = 0
    for line, *row in zip(lines, encoded, starts, ends, strict=True):
        place = 0
        for i, start, end in zip(*row, strict=True):
            assert place <= start < end
            assert not left(line[place:start], lowercase)
            if i == tokenizer.unk_id:
                assert "☃" in line[start:end]
                unknown += 1
            else:
                assert left(line[start:end], lowercase) == tokenizer.tokens([i])[
                    0
                ].removeprefix("##")
            place = end
        assert not left(line[place:], lowercase)
    assert 100 < unknown < len(encoded.values) // 5


def test_bert_restores_words_and_joins_most_punctuation():
    lines = [
        "Ein Hund läuft über die Wiese .",
        "Two dogs , both <brown> , run here and there",
        "the 日本 [MASK] [SEP] x[CLS]",
    ]
    tokenizer = train_tokenizer("bert", lines, 400)
    for line, restored in {
        lines[0]: "Ein Hund läuft über die Wiese.",
        "Two dogs, the <brown>": "Two dogs, the < brown >",
        "  here\u200b\tand\0 there ": "here and there",
        "日本the": "日 本 the",
        "[MASK] x[SEP] [CLS]": "[ MASK ] x [ SEP ] [ CLS ]",
        "the c☃t Hun☃, here " + "a" * 101: "the [UNK] [UNK], here [UNK]",
    }.items():
        assert (
            tokenizer.decode(
                [tokenizer.bos_id, *ids(tokenizer, line), tokenizer.eos_id]
            )
            == restored
        )
    assert (
        tokenizer.decode([tokenizer.mask_id, *ids(tokenizer, "Hund")]) == "[MASK] Hund"
    )


@pytest.mark.parametrize(
    ("lowercase", "pieces"), [(True, "cafe naive"), (False, "Café naïve")]
)
def test_bert_strips_accents_with_case(lowercase, pieces):
    tokenizer = train_tokenizer(
        "bert", ["Café naïve", "Cafe\u0301 nai\u0308ve"] * 9, 90, lowercase=lowercase
    )
    assert tokenizer.tokens(ids(tokenizer, "Café naïve")) == pieces.split()


def test_bert_leaves_rare_characters_out():
    lines = ["aab aab ü日", "abé baa"]
    everything, common = (
        train_tokenizer("bert", lines, 99, min_count=count) for count in (1, 2)
    )
    assert [t.tokens(ids(t, "aaba é baü")) for t in (everything, common)] == [
        ["aab", "##a", "é", "b", "##a", "##ü"],
        ["aab", "##a", "[UNK]", "[UNK]"],
    ]
    with pytest.raises(
        TokenizerError,
        match="No character occurs min_count=9 times in 2 lines: lower it",
    ):
        train_tokenizer("bert", lines, 99, min_count=9)
    with pytest.raises(
        TokenizerError,
        match=r"is too small for bert.* at least 9. Raise it, or raise min_count",
    ):
        train_tokenizer("bert", lines, 8, min_count=2)


def test_a_trained_vocabulary_can_be_written_and_read(tmp_path):
    tokenizer, path = train(lowercase=False), tmp_path / "vocab.txt"
    path.write_text(
        "\n".join(tokenizer.tokens(range(tokenizer.size))) + "\n", encoding="utf-8"
    )
    assert (
        tokenizer_files.from_vocabulary(path, lowercase=False).sha256
        == tokenizer.sha256
    )
