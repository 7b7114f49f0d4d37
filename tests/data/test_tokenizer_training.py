"""Every kind of tokenizer: pieces, text that comes back, and sizes."""

import json
import os
import subprocess
import sys

import pytest

import transformer_jax.data.tokenizers as module
from helpers.corpus import real_data
from helpers.tokenizing import (
    LINES,
    ODD,
    UNK_ID,
    count_processes,
    ids,
    special_ids,
    train,
)
from transformer_jax.data.sources import parallel_files
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import (
    BERT_SPECIALS,
    SPECIALS,
    Tokenizer,
    TokenizerError,
)


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


def test_every_process_trains_the_same():
    """The library's trainers number pieces in the order of a hash map and break ties
    by number.
    """
    kinds = ["wordpiece", "bert", "unigram"]
    code = (
        "import itertools, sys; from transformer_jax.data.tokenizer_training import "
        "train_tokenizer\nwords = [''.join(word) for word in itertools.product('abgh', "
        "'eiou', 'klmn', 'eo', 'stz')]\nlines = [' '.join(words[: i * i : i]) for i "
        "in range(1, 25)] + ['ÄÖÜß 0123456789']\nfor kind in sys.argv[1:]: "
        "print(*(train_tokenizer(kind, lines, size).sha256 for size in (90, 120)))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, *kinds],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    printed = [run.communicate()[0].splitlines() for run in runs]
    for kind, *lines in zip(kinds, *printed, strict=True):
        assert len(set(lines)) == 1, kind
        assert len(set(lines[0].split())) == 2, kind


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
