import json

import numpy as np
import pytest
import tokenizers as hugging_face

import transformer_jax.data.tokenizers as module
from helpers.tokenizing import (
    BOS_ID,
    EOS_ID,
    LINES,
    ODD,
    PAD_ID,
    count_processes,
    ids,
    rows,
    special_ids,
    train,
)
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError


def test_decode_stops_at_the_first_end_and_drops_specials():
    tokenizer = train("bpe_metaspace")
    hund, dogs = ids(tokenizer, "Ein Hund"), ids(tokenizer, "dogs")
    assert (
        tokenizer.decode([BOS_ID, *hund, PAD_ID, EOS_ID, *dogs, EOS_ID]) == "Ein Hund"
    )
    assert tokenizer.decode([*dogs, tokenizer.size + 3]) == "dogs"
    assert tokenizer.decode([]) == tokenizer.decode([EOS_ID, *dogs]) == ""


@pytest.mark.parametrize("size", [30_000, 50])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_encoding_word_by_word_is_encoding_lines(kind, lowercase, size, monkeypatch):
    """Encode all kinds of spaces, names of specials, and unknown characters, with
    one chunk and table or with many.
    """
    monkeypatch.setattr(module, "CHUNK", size)
    monkeypatch.setattr(module, "REMEMBERED", 3 * size)
    tokenizer = train(kind, lowercase=lowercase)
    gaps = [
        "",
        " ",
        "  ",
        "   ",
        "\t",
        " \t",
        "\t ",
        "\xa0",
        " \u2028",
        "\x1f",
        "\n",
        "\r",
        "\0",
        "\u200b",
        "\ufffd",
    ]
    parts = [
        "Ein",
        "don't",
        "</s>",
        "##a",
        "▁x",
        "日☃☃本",
        "3rd",
        "!?",
        "ΑΣ",
        "\u0301é",
        "[SEP]",
    ]
    made = [f"{gap}{a}{gap}{b} {a}{gap}" for gap in gaps for a in parts for b in parts]
    lines = LINES + ODD + ["\n", "\n\n"] + made + [line.strip() for line in made]
    encoded = tokenizer.encode(lines, end=EOS_ID)
    assert [encoded[i].tolist() for i in range(len(encoded))] == [
        [*row, EOS_ID] for row in tokenizer.encode_batch(lines)
    ]
    assert encoded.values.dtype == np.uint16
    assert len(tokenizer.encode([], end=EOS_ID)) == 0


def test_many_lines_are_encoded_in_several_processes(monkeypatch, caplog):
    tokenizer = train("bpe_metaspace")
    alone, started = (
        tokenizer.encode(LINES * 20, end=EOS_ID),
        count_processes(monkeypatch),
    )
    monkeypatch.setattr(module, "CHUNK", 7)
    monkeypatch.setattr(module, "MANY", 1)
    monkeypatch.setattr(module, "_cores", lambda: 2)
    together = tokenizer.encode(LINES * 20, end=EOS_ID)
    assert (started, caplog.text) == ([2], "")
    np.testing.assert_array_equal(together.values, alone.values)
    np.testing.assert_array_equal(together.lengths, alone.lengths)


@pytest.mark.parametrize("lowercase", [False, True])
def test_characters_are_looked_up_as_the_library_encodes_them(lowercase):
    """The lines have code points beyond the first plane, unknown ones, line feeds,
    and the name of a special token.
    """
    tokenizer = train_tokenizer(
        "characters", ["aBc 😀é\n", "<s>"], 50, lowercase=lowercase
    )
    lines = ["Abc😀", "", "zé<s>\na", "\U0010ffffB"]
    found = tokenizer.encode(lines, begin=1, end=2)
    assert [row.tolist() for row in found] == [
        [1, *ids, 2] for ids in tokenizer.encode_batch(lines)
    ]
    assert (tokenizer._characters is None) == lowercase


def test_large_vocabularies_are_encoded_in_more_bits():
    words = " ".join(f"w{i}" for i in range(66_000))
    tokenizer = train_tokenizer("words", [words], 66_004)
    encoded = tokenizer.encode([words], end=EOS_ID)
    assert encoded.values.dtype == np.int32
    assert encoded.values.max() == 66_003


def test_spans_by_hand():
    def spans(kind, line, lowercase=False, size=300):
        tokenizer = train_tokenizer(kind, ["ab aé ☃ 한"], size, lowercase=lowercase)
        ids, starts, ends = tokenizer.spans(["b", line])
        assert len(ids) == 2
        return list(
            zip(
                tokenizer.tokens(ids[1]),
                starts[1].tolist(),
                ends[1].tolist(),
                strict=True,
            )
        )

    assert spans("bert", " Ae\u0301, ab", lowercase=True) == [
        ("ae", 1, 3),
        ("[UNK]", 4, 5),
        ("ab", 6, 8),
    ]
    assert spans("bert", "A\0e\u0301b a\u0301", lowercase=True) == [
        ("ae", 0, 3),
        ("##b", 4, 5),
        ("a", 6, 7),
    ]
    assert spans("bert", "b한", lowercase=True, size=19) == [
        ("b", 0, 1),
        ("##ᄒ", 1, 2),
        ("##ᅡ", 1, 2),
        ("##ᆫ", 1, 2),
    ]
    assert spans("bpe_bytes", "b é") == [
        ("b", 0, 1),
        ("Ġ", 1, 2),
        ("Ã", 2, 3),
        ("©", 2, 3),
    ]
    assert spans("words", "\tab  b") == [("ab", 1, 3), ("<unk>", 5, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_that_continue_a_word(kind):
    tokenizer = train(kind)
    if kind not in ("wordpiece", "bert"):
        with pytest.raises(
            TokenizerError,
            match=r"does not mark the pieces .* data\.tokenizer = 'bert'",
        ):
            _ = tokenizer.continues
    else:
        pieces = tokenizer.tokens(np.flatnonzero(tokenizer.continues))
        assert pieces == [
            piece
            for piece in tokenizer.tokens(range(tokenizer.size))
            if piece[:2] == "##"
        ]
        assert tokenizer.continues.shape == (tokenizer.size,)
        assert tokenizer.continues[ids(tokenizer, "Hundxx # the")].tolist() == [
            False,
            True,
            True,
            False,
            False,
        ]
        assert tokenizer.continues is tokenizer.continues


def test_encoding_adds_and_cuts_nothing():
    tokenizer = train("characters")
    assert tokenizer.encode_batch([]) == []
    assert [len(line) for line in tokenizer.encode_batch(["", "a" * 1000, "ab"])] == [
        0,
        1000,
        2,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, tmp_path):
    tokenizer, path = train(kind), tmp_path / "new" / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.to_json() == tokenizer.to_json() == path.read_text(encoding="utf-8")
    assert loaded.size == tokenizer.size
    assert loaded.encode_batch(LINES + ODD) == tokenizer.encode_batch(LINES + ODD)
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=2),
        encoding="utf-8",
    )
    assert Tokenizer.load(path).sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE"}}']
)
def test_a_broken_file_is_named(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(
        TokenizerError,
        match=r"Cannot load the tokenizer .*tokenizer\.json: .* Restore the file",
    ):
        Tokenizer.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        TokenizerError, match=r"Cannot load the tokenizer .*absent\.json"
    ):
        Tokenizer.load(tmp_path / "absent.json")


def foreign(vocabulary, specials, unk=None):
    """Return a tokenizer of words and punctuation that was not trained by this
    package.
    """
    tokenizer = hugging_face.Tokenizer(
        hugging_face.models.WordLevel(vocabulary, unk_token=unk)
    )
    tokenizer.pre_tokenizer = hugging_face.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def test_special_ids_of_bert():
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "a": 2, "[SEP]": 3, "[CLS]": 4, "b": 5}
    tokenizer = Tokenizer(
        foreign(vocabulary, ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], unk="[UNK]").to_str()
    )
    assert special_ids(tokenizer) == (1, 4, 3, 0, None)
    lines = ["b a", "", "a [SEP] x"]
    assert rows(tokenizer.encode(lines)) == [[5, 2], [], [2, 0, 0, 0, 0]]
    assert rows(tokenizer.encode(lines, begin=4, end=3)) == [
        [4, 5, 2, 3],
        [4, 3],
        [4, 2, 0, 0, 0, 0, 3],
    ]
    assert tokenizer.decode([4, 5, 1, 0, 2, 3, 5, 1]) == "b [UNK] a"


def test_special_ids_of_gpt2():
    """The end has the id 50256, there is no padding, and an ordinary token has the
    id 0.
    """
    vocabulary = {f"w{i}": i for i in range(50_256)} | {"<|endoftext|>": 50_256}
    tokenizer = Tokenizer(foreign(vocabulary, ["<|endoftext|>"]).to_str())
    assert special_ids(tokenizer) == (None, 50_256, 50_256, None, None)
    assert rows(tokenizer.encode(["w0 w3", "w1"], end=tokenizer.eos_id)) == [
        [0, 3, 50_256],
        [1, 50_256],
    ]
    assert tokenizer.decode([0, 3, 0, 2, 50_256, 1]) == "w0 w3 w0 w2"


def test_a_tokenizer_without_special_ids():
    tokenizer = Tokenizer(foreign({"a": 0, "b": 1}, []).to_str())
    assert special_ids(tokenizer) == (None,) * 5
    assert rows(tokenizer.encode(["a b", "b"])) == [[0, 1], [1]]
    assert tokenizer.decode([0, 1, 0]) == "a b a"


def test_special_ids_can_be_given():
    text = foreign({"a": 0, "stop": 1, "[SEP]": 2}, ["[SEP]"]).to_str()
    assert Tokenizer(text).eos_id == 2
    tokenizer = Tokenizer(
        text, {"eos_id": 1, "pad_id": 0, "unk_id": None, "mask_id": 2}
    )
    assert special_ids(tokenizer) == (0, None, 1, None, 2)
    assert tokenizer.decode([2, 0, 1, 2]) == "[SEP]"
    with pytest.raises(
        TokenizerError,
        match=r"eos_id = 3, but the tokenizer has no such id: choose one below 3",
    ):
        Tokenizer(text, {"eos_id": 3})
    with pytest.raises(
        TokenizerError, match=r"special_ids has end: choose from pad_id, bos_id"
    ):
        Tokenizer(text, {"end": 1})


def test_special_ids_that_were_given_are_saved(tmp_path):
    text = foreign({"a": 0, "stop": 1, "[SEP]": 2}, ["[SEP]"]).to_str()
    tokenizer = Tokenizer(text, {"eos_id": 1, "pad_id": 0})
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (
        special_ids(loaded)
        == special_ids(Tokenizer(tokenizer.to_json()))
        == (0, None, 1, None, None)
    )
    assert loaded.sha256 == tokenizer.sha256 != Tokenizer(text).sha256
    assert special_ids(Tokenizer(loaded.to_json(), {"eos_id": 2})) == (
        0,
        None,
        2,
        None,
        None,
    )
    assert "special_ids" not in Tokenizer(text).to_json()
    with pytest.raises(
        TokenizerError, match="eos_id = 9, but the tokenizer has no such id"
    ):
        Tokenizer(tokenizer.to_json().replace('"eos_id": 1', '"eos_id": 9'))


def test_tokens_are_shown_as_the_text_that_they_are():
    tokenizer = train_tokenizer("bpe_bytes", ["hola está mañana"] * 9, 300)

    def shown(line):
        return tokenizer.shown([1, *ids(tokenizer, line), 2])

    assert "".join(shown("está mañana")) == "<s>está▁mañana</s>"
    assert shown("x\n\0")[1:-1] == ["x", "↵", "\\x00"]
    # no token holds the whole character
    assert "".join(shown("東")) == r"<s>\xe6\x9d\xb1</s>"
    assert tokenizer.shown([tokenizer.size]) == [""]
    characters = train_tokenizer("characters", ["a b\nĠ"], 99)
    assert characters.shown(ids(characters, "a b\nĠ")) == ["a", "▁", "b", "↵", "Ġ"]


def test_padding_and_cutting_of_others_are_switched_off():
    other = foreign({"a": 0, "b": 1}, [])
    other.enable_padding(length=5, pad_id=0, pad_token="a")
    other.enable_truncation(3)
    assert rows(Tokenizer(other.to_str()).encode(["a b", "b a b a b a"])) == [
        [0, 1],
        [1, 0, 1, 0, 1, 0],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_begin_and_end_are_put_around_lines(kind):
    tokenizer = train(kind)
    plain = tokenizer.encode_batch([*LINES, ""])
    assert rows(tokenizer.encode([*LINES, ""])) == plain
    assert rows(tokenizer.encode([*LINES, ""], begin=1)) == [[1, *row] for row in plain]
    assert rows(tokenizer.encode([*LINES, ""], begin=1, end=2)) == [
        [1, *row, 2] for row in plain
    ]


def test_not_json_is_refused():
    with pytest.raises(TokenizerError, match="Not a tokenizer's JSON"):
        Tokenizer("nonsense")


@pytest.mark.parametrize("change", ["lowercase", "sequence", "added"])
def test_characters_of_another_program(change):
    """What it normalizes or adds is the same for lines alone and for many lines."""
    ids = {"<unk>": 0, **{character: i for i, character in enumerate("ab<>r ", 1)}}
    tokenizer = hugging_face.Tokenizer(
        hugging_face.models.WordLevel(ids, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = hugging_face.pre_tokenizers.Split(
        hugging_face.Regex(r"[\s\S]"), "isolated"
    )
    tokenizer.add_special_tokens(["<unk>"])
    if change == "added":
        tokenizer.add_tokens(["<br>"])
    else:
        lower = hugging_face.normalizers.Lowercase()
        tokenizer.normalizer = (
            lower
            if change == "lowercase"
            else hugging_face.normalizers.Sequence([lower])
        )
    made = Tokenizer(tokenizer.to_str())
    line = "AB ab<br>"
    assert (
        made.encode([line])[0].tolist()
        == tokenizer.encode(line).ids
        == list(made.encode_batch([line])[0])
    )
