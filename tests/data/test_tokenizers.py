import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers as hugging_face

import transformer_jax.data.tokenizers as module
from helpers.corpus import real_data
from transformer_jax.data import workers
from transformer_jax.data.sources import parallel_files
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import (
    BERT_SPECIALS,
    SPECIALS,
    Tokenizer,
    TokenizerError,
)

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)

LINES = [
    "Ein Hund läuft über die Wiese .",
    "Two dogs , both <brown> , run </s> here  and there .",
    "  the 日本 café\twas closed",
    (
        "<pad> <s> </s> <unk> x</s> </s>y x</s> </s>y <unk> <pad>x "
        "[MASK] [SEP] [CLS]x [PAD] [SEP] [MASK]"
    ),
    "Straße",
] * 3
ODD = [
    "",
    " ",
    "  ",
    " a",
    "a ",
    "a  b",
    "</s>",
    "<pad>",
    " </s> <pad>",
    "a</s>b",
    "<s> <unk> a",
    "[MASK] x[SEP]",
    "[CLS]",
]


def train(kind, **arguments):
    return train_tokenizer(kind, LINES, 400, **arguments)


def ids(tokenizer, line):
    return tokenizer.encode_batch([line])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic_and_specials_come_first(kind):
    tokenizer = train(kind)
    assert train_tokenizer(kind, iter(LINES), 400).sha256 == tokenizer.sha256
    if kind == "bert":
        assert (
            tokenizer.tokens(range(5))
            == list(BERT_SPECIALS)
            == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        )
        assert special_ids(tokenizer) == (0, 2, 3, 1, 4)
    else:
        assert (
            tokenizer.tokens(range(4))
            == list(SPECIALS)
            == ["<pad>", "<s>", "</s>", "<unk>"]
        )
        assert special_ids(tokenizer) == (0, 1, 2, 3, None)
    added = json.loads(tokenizer.to_json())["added_tokens"]
    assert [token["content"] for token in added] == list(
        BERT_SPECIALS if kind == "bert" else SPECIALS
    )
    assert 5 < tokenizer.size <= 400
    used = tokenizer.tokens(range(tokenizer.size))
    assert len(set(used)) == tokenizer.size
    assert "" not in used
    assert tokenizer.tokens([tokenizer.size]) == [""]


@pytest.mark.parametrize("kind", ["wordpiece", "bert", "unigram"])
def test_every_process_trains_the_same(kind):
    """The library's trainers number pieces in the order of a hash map and break ties
    by number.
    """
    code = (
        "import itertools, sys; from transformer_jax.data.tokenizer_training import "
        "train_tokenizer\nwords = [''.join(word) for word in itertools.product('abgh', "
        "'eiou', 'klmn', 'eo', 'stz')]\nlines = [' '.join(words[: i * i : i]) for i "
        "in range(1, 25)] + ['ÄÖÜß 0123456789']\nprint(*(train_tokenizer(sys.argv[1], "
        "lines, size).sha256 for size in (90, 120)))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, kind],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    printed = {run.communicate()[0] for run in runs}
    assert len(printed) == 1
    assert len(set(printed.pop().split())) == 2


@pytest.mark.parametrize(
    "kind", ["bpe_bytes", "bpe_metaspace", "unigram", "characters"]
)
def test_round_trip_is_exact(kind):
    tokenizer = train(kind)
    for line in LINES + ODD:
        assert tokenizer.decode(ids(tokenizer, line)) == line


def test_wordpiece_gives_the_words_back_joined_by_single_spaces():
    tokenizer = train("wordpiece")
    for line in (LINES[0], LINES[2], LINES[4], "x</s> die<s>x ", "dieüber", "##"):
        assert tokenizer.decode(ids(tokenizer, line)) == " ".join(line.split()).replace(
            "##", "<unk>"
        )
    assert (
        tokenizer.decode(ids(tokenizer, "the <s> </s>x ##b Hun☃ here " + "a" * 101))
        == "the <unk> <unk>x <unk>b <unk> here <unk>"
    )


def test_wordpiece_cuts_from_the_left_into_the_longest_pieces():
    tokenizer = train_tokenizer("wordpiece", ["unable un able table"] * 9, 40)
    assert tokenizer.tokens(ids(tokenizer, "unable untable")) == [
        "unable",
        "un",
        "##t",
        "##able",
    ]


def test_unigram_takes_the_likeliest_pieces():
    tokenizer = train_tokenizer(
        "unigram",
        [" ".join(a + b for a in ("rot", "blau") for b in ("haus", "berg"))] * 9,
        60,
    )
    model = json.loads(tokenizer.to_json())["model"]["vocab"]
    scores, word = dict(model[4:]), "▁blauberg"
    best = {0: (0.0, [])}
    for end in range(1, len(word) + 1):
        ways = [
            (
                best[start][0] + scores[word[start:end]],
                [*best[start][1], word[start:end]],
            )
            for start in range(end)
            if word[start:end] in scores
        ]
        best[end] = max(ways)
    assert tokenizer.tokens(ids(tokenizer, "blauberg")) == best[len(word)][1]
    assert [score for _, score in model[4:]] == sorted(scores.values(), reverse=True)


def test_words_come_back_joined_by_single_spaces():
    tokenizer = train("words")
    assert (
        tokenizer.decode(ids(tokenizer, "  the   Hund\tläuft here "))
        == "the Hund läuft here"
    )
    assert tokenizer.decode(ids(tokenizer, "the cat")) == "the <unk>"


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_text_never_becomes_padding_begin_or_end(kind, reload, tmp_path):
    # the lines spell special tokens, so a merge or a word could become one
    tokenizer = train(kind)
    if reload:
        tokenizer.save(tmp_path / "tokenizer.json")
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    special = {*special_ids(tokenizer)} - {tokenizer.unk_id}
    for line in LINES + ODD:
        assert not special.intersection(ids(tokenizer, line))
    if kind == "words":
        assert ids(tokenizer, "the </s> <unk>")[1:] == [UNK_ID, UNK_ID]


def test_unseen_characters():
    assert UNK_ID not in ids(train("bpe_bytes"), "☃\u2028é")
    assert train("bpe_bytes").decode(ids(train("bpe_bytes"), "☃\u2028é")) == "☃\u2028é"
    for kind in ("bpe_metaspace", "unigram", "characters"):
        tokenizer = train(kind)
        assert ids(tokenizer, "a☃").count(UNK_ID) == 1
        assert tokenizer.decode(ids(tokenizer, "a☃ b")) == "a<unk> b"
        if kind != "characters":
            assert tokenizer.decode(ids(tokenizer, "a▁b")) == "a b"


def test_bytes_concatenate():
    tokenizer = train("bpe_bytes")
    start, end = ids(tokenizer, "Ein Hund"), ids(tokenizer, " läuft")
    assert (
        tokenizer.decode(start) + tokenizer.decode(end)
        == tokenizer.decode(start + end)
        == "Ein Hund läuft"
    )


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


def count_processes(monkeypatch):
    """Return a list to which the size of every started process pool is appended."""
    started, pool = [], workers.ProcessPoolExecutor
    monkeypatch.setattr(
        workers,
        "ProcessPoolExecutor",
        lambda count, *rest: started.append(count) or pool(count, *rest),
    )
    return started


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


def test_many_lines_are_trained_on_in_another_process(monkeypatch, caplog, tmp_path):
    lines = ["Ein Hund läuft.", "Zwei Hunde."]
    for language in ("en", "de"):
        (tmp_path / f"train.{language}").write_text("\n".join(lines), encoding="utf-8")
    mapped = parallel_files(tmp_path, "train", ["de", "en"]).column("de")
    here, started = (
        train_tokenizer("bpe_bytes", lines, 300, min_count=2, lowercase=True),
        count_processes(monkeypatch),
    )
    monkeypatch.setattr(module, "MANY", 1)
    for text in (lines, mapped):
        there = train_tokenizer("bpe_bytes", text, 300, min_count=2, lowercase=True)
        assert there.sha256 == here.sha256
        assert there.encode_batch(["</s>"]) == here.encode_batch(["</s>"])
    with pytest.raises(TokenizerError, match="all 2 lines are empty"):
        train_tokenizer("bpe_bytes", ["", " "], 300)
    assert (started, caplog.text) == ([1, 1, 1], "")


def test_a_script_without_a_main_guard_trains_and_encodes_alone(tmp_path):
    """Python refuses to start child processes, because they would run the script again.

    The script then works in its own process, with the same result, and says so.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "from transformer_jax.data import tokenizer_training, tokenizers\n"
        "tokenizers.MANY = 1\n"
        "tokenizers._cores = lambda: 2\n"
        "tokenizer = tokenizer_training.train_tokenizer('words', ['ab b'], 10)\n"
        "print(tokenizer.encode(['ab', 'b'], end=2).values.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[4, 2, 5, 2]\n"
    assert "training the tokenizer in this process" in done.stderr
    assert "encoding 2 lines in this process" in done.stderr


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
def test_lowercase(kind):
    tokenizer = train(kind, lowercase=True)
    expected = "ein hund lauft" if kind == "bert" else "ein hund läuft"
    assert tokenizer.decode(ids(tokenizer, "EIN Hund LÄUFT")) == expected


def test_words_are_kept_by_count_then_alphabet():
    lines = ["b c a a", "c b c d"]  # counts: c 3, a 2, b 2, d 1
    assert train_tokenizer("words", lines, 7).tokens(range(4, 8)) == ["c", "a", "b", ""]
    assert train_tokenizer("words", lines, 99, min_count=3).size == 5
    assert train_tokenizer("characters", lines, 99, min_count=2).tokens(
        range(4, 9)
    ) == [" ", "c", "a", "b", ""]


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


def special_ids(tokenizer):
    return (
        tokenizer.pad_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
    )


def rows(ragged):
    return [ragged[i].tolist() for i in range(len(ragged))]


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


def test_unknown_kind():
    with pytest.raises(TokenizerError, match="'bpe': choose one of bpe_bytes"):
        train("bpe")


@pytest.mark.parametrize("lines", [[], ["", "  "]])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_corpus(kind, lines):
    with pytest.raises(TokenizerError, match=f"all {len(lines)} lines are empty"):
        train_tokenizer(kind, lines, 100)


@pytest.mark.parametrize(
    ("kind", "minimum"),
    [
        ("bpe_bytes", 260),
        ("bpe_metaspace", 8),
        ("wordpiece", 10),
        ("bert", 11),
        ("unigram", 8),
        ("characters", 7),
    ],
)
def test_vocabulary_holds_specials_and_alphabet(kind, minimum):
    lines = ["ab", "cab"]
    for size in (-1, 2, minimum - 1):
        with pytest.raises(
            TokenizerError,
            match=f"vocab_size={size} is too small for {kind}.* least {minimum}",
        ):
            train_tokenizer(kind, lines, size)
    assert train_tokenizer(kind, lines, minimum).size == minimum


@pytest.mark.parametrize("lines", [["eee", "a3Σ !Ä3/"], ["ab", "cab"]])
def test_unigram_keeps_no_more_than_it_is_told(lines):
    """For the first lines, the library's trainer returns 13 pieces, even if fewer
    are requested.
    """
    minimum = len(SPECIALS) + len({"▁", *"".join(lines)} - {" "})
    for size in range(minimum, minimum + 5):
        tokenizer = train_tokenizer("unigram", lines, size)
        assert minimum <= tokenizer.size <= size
        assert [tokenizer.decode(ids(tokenizer, line)) for line in lines] == lines


def test_vocabulary_of_words_holds_one():
    with pytest.raises(
        TokenizerError, match=r"vocab_size=4 is too small for words.* least 5"
    ):
        train_tokenizer("words", ["a b"], 4)
    assert train_tokenizer("words", ["a b"], 5).size == 5


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_min_count_above_all_counts(kind):
    with pytest.raises(
        TokenizerError, match="Nothing occurs min_count=9 times in 1 lines"
    ):
        train_tokenizer(kind, ["a b"], 100, min_count=9)


def test_min_count_of_pieces():
    lines = ["aaa bbb", "aaa bb"]
    assert "bbb" in train_tokenizer("wordpiece", lines, 99).tokens(range(99))
    pieces = train_tokenizer("wordpiece", lines, 99, min_count=2).tokens(range(99))
    assert "aaa" in pieces
    assert "bbb" not in pieces
    with pytest.raises(TokenizerError, match=r"min_count=2: unigram .* set it to 1"):
        train_tokenizer("unigram", lines, 99, min_count=2)


def test_bpe_on_multi30k_gives_its_tokens_back():
    data = real_data("multi30k") / "tok"
    read = {
        name: (data / name).read_text(encoding="utf-8").split("\n")[:-1]
        for name in ("val.en", "val.de", "test_2016_flickr.de")
    }
    tokenizer = train_tokenizer("bpe_metaspace", read["val.en"] + read["val.de"], 2000)
    assert tokenizer.size == 2000
    for line, encoded in zip(
        read["val.de"], tokenizer.encode_batch(read["val.de"]), strict=True
    ):
        assert tokenizer.decode(encoded) == line
    seen = set("".join(read["val.en"] + read["val.de"]))
    for line, encoded in zip(
        test := read["test_2016_flickr.de"], tokenizer.encode_batch(test), strict=True
    ):
        assert encoded.count(UNK_ID) == sum(character not in seen for character in line)


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
