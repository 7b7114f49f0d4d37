"""Models of SentencePiece, in files written by hand: what is read, how text is
split, and what is refused.
"""

import json
import struct
import sys

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from transformer_jax.data import sentencepiece, sources, tokenizer_files
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.files import DataError
from transformer_jax.data.streams import Tokens
from transformer_jax.data.text import ParallelData
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.files import write_all

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
PIECES = {
    "▁": -2.5,
    "▁ab": -1.5,
    "b": -3.0,
    "a": -4.0,
    "▁a": -3.5,
    "cd": -2.0,
    "c": -6.0,
    "<": -5.0,
    "s": -5.5,
}
OTHERS = ["▁xy", "d", "ab", ">>de<<"]  # of the other language
TOKENS = ["</s>", "<unk>", *PIECES, *OTHERS, "<pad>"]
VOCABULARY = {token: i for i, token in enumerate(TOKENS)}
# a vocabulary of the target alone
OWN = {"<unk>": 0, "</s>": 1, "<pad>": 2, "ab": 3, "d": 4, "▁xy": 5}


def varint(value):
    digits = [
        value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)
    ]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


def number(field, value):
    return varint(field << 3) + varint(value)


def text(field, value):
    return varint(field << 3 | 2) + varint(len(value)) + value


def piece(token, score, kind=NORMAL):
    content = text(1, token.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
    return text(1, content + (b"" if kind == NORMAL else number(3, kind)))


def model(pieces=PIECES, *more, kind=1, normalization=b""):
    start = piece("<unk>", 0.0, UNKNOWN) + piece("</s>", 0.0, CONTROL)
    training = text(
        2, number(3, kind) + number(300, 2**40) + varint(15 << 3 | 1) + bytes(8)
    )
    return (
        start
        + b"".join(piece(*item) for item in pieces.items())
        + b"".join(more)
        + training
        + text(3, normalization)
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "source.spm").write_bytes(model())
    (tmp_path / "target.spm").write_bytes(model({"▁xy": -1.0, "d": -2.0, "ab": -3.0}))
    (tmp_path / "vocab.json").write_text(json.dumps(VOCABULARY))
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "marian", "decoder_start_token_id": VOCABULARY["<pad>"]}
        )
    )
    return tmp_path


def test_pieces_and_scores_are_read(folder):
    found = sentencepiece.read(folder / "source.spm")
    assert found == (PIECES, b"")


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("ab", ["▁ab"]),
        ("  ab   ab ", ["▁ab", "▁ab"]),
        ("aab", ["▁a", "a", "b"]),  # "ab" is a piece of the target only
        ("abcdd", ["▁ab", "cd", "d"]),  # a single character is known from the target
        ("abzzcd", ["▁ab", "<unk>", "cd"]),
        ("a</s>", ["▁a", "<", "<unk>", "s", "<unk>"]),
        (">>de<< ab", [">>de<<", "▁ab"]),
        ("▁xy", ["▁", "▁", "<unk>"]),
        ("", []),
    ],
)
def test_the_most_probable_pieces(folder, line, pieces):
    tokenizer = sentencepiece.from_folder(folder, "source")
    assert tokenizer.encode_batch([line]) == [[VOCABULARY[piece] for piece in pieces]]


def test_a_piece_that_the_vocabulary_lacks_is_unknown(folder, tmp_path):
    (folder / "source.spm").write_bytes(model(PIECES | {"qq": -1.0}))
    tokenizer = sentencepiece.from_folder(folder, "source")
    pieces = ["▁ab", "<unk>", "<unk>", "cd"]
    assert tokenizer.encode_batch(["abqqqqcd"]) == [
        [VOCABULARY[piece] for piece in pieces]
    ]
    assert tokenizer.size == len(VOCABULARY)
    write_all(
        tmp_path / "new", sentencepiece.contents(tokenizer, tokenizer, max_length=37)
    )
    assert sentencepiece.read(tmp_path / "new" / "source.spm").scores == PIECES | {
        "qq": -1.0
    }


def test_tokenizers_of_earlier_versions_are_written(tmp_path):
    """Their special tokens are added tokens, and single characters of the other
    language have the lowest score.
    """
    scores = (
        PIECES | dict.fromkeys(["</s>", "<unk>", "<pad>", ">>de<<"], 0.0) | {"d": -16.0}
    )
    vocab = [
        ["\0" + token, 0.0] if token in ("▁xy", "ab") else [token, scores[token]]
        for token in TOKENS
    ]
    former = tokenizers.Tokenizer(models.Unigram(list(map(tuple, vocab)), unk_id=1))
    former.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    )
    apart = pre_tokenizers.Split(Regex("<(?=pad>|/s>|unk>)"), "isolated")
    former.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(split=False), apart]
    )
    former.add_tokens([">>de<<"])
    former.add_special_tokens(["</s>", "<unk>", "<pad>"])
    tokenizer = Tokenizer(former.to_str())
    assert tokenizer.encode_batch(["ab d"]) == [
        [VOCABULARY["▁ab"], VOCABULARY["▁"], VOCABULARY["d"]]
    ]
    write_all(tmp_path, sentencepiece.contents(tokenizer, tokenizer, max_length=37))
    assert sentencepiece.read(tmp_path / "source.spm") == (PIECES, b"")
    assert json.loads((tmp_path / "vocab.json").read_text()) == VOCABULARY


def test_both_sides_have_the_ids_of_the_vocabulary(folder):
    assert sentencepiece.is_folder(folder)
    target = sentencepiece.from_folder(folder, "target")
    ids = [VOCABULARY[token] for token in ("▁xy", "d", "▁xy", "ab")]
    assert target.encode_batch(["xyd xyab"]) == [ids]
    assert (
        target.decode([VOCABULARY["<pad>"], *ids, VOCABULARY["</s>"], ids[0]])
        == "xyd xyab"
    )
    assert target.size == len(VOCABULARY)
    assert (target.eos_id, target.unk_id, target.pad_id, target.bos_id) == (
        0,
        1,
        len(TOKENS) - 1,
        len(TOKENS) - 1,
    )


def test_pieces_of_the_other_language_are_decoded(folder):
    """A model may write them, although no text is encoded as them."""
    tokenizer = sentencepiece.from_folder(folder, "source")
    written = ["▁ab", "▁xy", "d", "ab", "▁xy", ">>de<<"]
    assert (
        tokenizer.decode([VOCABULARY[token] for token in written])
        == "ab xydab xy>>de<<"
    )
    assert tokenizer.decode([VOCABULARY["▁xy"], VOCABULARY["cd"]]) == "xycd"


def test_a_vocabulary_of_the_target(folder):
    (folder / "target_vocab.json").write_text(json.dumps(OWN))
    (folder / "config.json").write_text("{}")
    target = sentencepiece.from_folder(folder, "target")
    assert target.encode_batch(["xyd"]) == [[5, 4]]
    assert (target.eos_id, target.unk_id, target.pad_id, target.bos_id) == (1, 0, 2, 2)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (model()[:100], "is not a model of SentencePiece, or is damaged: copy"),
        (b"\xff" * 30, "is not a model of SentencePiece, or is damaged"),
        # a number instead of a piece
        (number(1, 7), "it is not a unigram model"),
        # a piece without a text
        (text(1, number(3, NORMAL)), "is not a model of SentencePiece, or is damaged"),
        (text(1, number(1, 7)), "is not a model of SentencePiece, or is damaged"),
        (
            model(normalization=text(2, b"\x09\0\0\0ab")),
            "is not a model of SentencePiece, or is damaged",
        ),
        (b"", "it is not a unigram model"),
        (model(kind=2), "it is not a unigram model"),
        (
            model(PIECES, piece("@", 0.0, USER_DEFINED)),
            "the piece '@' is neither text nor a control symbol",
        ),
        (
            model(normalization=number(4, 0)),
            "it does not add a space before the text, join spaces and write them",
        ),
        (
            model({"qq": -1.0}),
            "the vocabulary has none of the pieces: use the files of one model",
        ),
    ],
)
def test_other_models_are_refused(folder, content, rule):
    (folder / "source.spm").write_bytes(content)
    with pytest.raises(TokenizerError, match=rule):
        sentencepiece.from_folder(folder, "source")


def test_without_sentencepiece_its_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(
        TokenizerError, match=r"need its package .*: pip install .*\[sentencepiece\]"
    ):
        sentencepiece.from_folder(folder, "source")


@pytest.mark.parametrize(
    ("vocabulary", "rule"),
    [
        (
            {token: i for token, i in VOCABULARY.items() if token != "<pad>"},
            "lacks <pad>",
        ),
        (VOCABULARY | {"d": 0}, "the ids of 16 tokens must be 0 to 15, each once"),
        (VOCABULARY | {"d": "12"}, "the ids of 16 tokens must be 0 to 15, each once"),
        ([], "is not a JSON object"),
    ],
)
def test_other_vocabularies_are_refused(folder, vocabulary, rule):
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(TokenizerError, match=rule):
        sentencepiece.from_folder(folder, "source")


@pytest.mark.parametrize("own", [False, True])
def test_what_is_written_is_read_again(folder, tmp_path, own):
    if own:
        (folder / "target_vocab.json").write_text(json.dumps(OWN))
        (folder / "config.json").write_text("{}")
    new = tmp_path / "new"
    new.mkdir()
    both = [sentencepiece.from_folder(folder, side) for side in ("source", "target")]
    write_all(new, sentencepiece.contents(*both, max_length=37))
    (new / "config.json").write_text((folder / "config.json").read_text())
    assert [
        sentencepiece.from_folder(new, side).sha256 for side in ("source", "target")
    ] == [x.sha256 for x in both]
    assert sentencepiece.read(new / "source.spm") == (PIECES, b"")
    assert json.loads((new / "vocab.json").read_text()) == VOCABULARY
    assert (new / "target_vocab.json").exists() == own
    assert json.loads((new / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": own,
        "model_max_length": 37,
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }


@pytest.mark.parametrize("kind", ["unigram", "bpe_bytes"])
def test_other_tokenizers_are_not_written(folder, tmp_path, kind):
    other = train_tokenizer(kind, ["ab cd", "cd ab"], 300)
    with pytest.raises(
        TokenizerError,
        match="transformers has two tokenizers only as unigram models of SentencePiece",
    ):
        write_all(
            tmp_path / "new",
            sentencepiece.contents(
                sentencepiece.from_folder(folder, "source"), other, 37
            ),
        )
    assert not (tmp_path / "new").exists()


def test_a_folder_of_two_tokenizers(folder):
    assert tokenizer_files.names_of(folder) == (
        "tokenizer.source.json",
        "tokenizer.target.json",
    )
    for side in ("source", "target"):
        found = tokenizer_files.from_folder(folder, f"tokenizer.{side}.json")
        assert found.sha256 == sentencepiece.from_folder(folder, side).sha256
    with pytest.raises(
        TokenizerError,
        match=r"has two tokenizers, .*: set data\.joint_tokenizer to False",
    ):
        tokenizer_files.from_folder(folder)


def test_a_run_starts_with_the_tokenizers_of_a_folder(folder, tmp_path):
    sides = ("source", "target")
    streams = {
        side: Tokens("text", f"tokenizer.{side}.json", 16, f"model.{side}_vocab_size")
        for side in sides
    }
    corpus = Corpus(
        ParallelData(), streams, tmp_path / "run", sources.parallel_files, start=folder
    )
    for side in sides:
        assert (
            corpus.tokenizers[side].sha256
            == sentencepiece.from_folder(folder, side).sha256
        )
        assert corpus.special_ids(side) == (15, 0, 15)


def test_a_missing_file_is_named(folder):
    (folder / "source.spm").unlink()
    assert not sentencepiece.is_folder(folder)
    with pytest.raises(DataError, match=r"source\.spm"):
        sentencepiece.from_folder(folder, "source")
