"""Folders of Hugging Face: special ids, settings and broken files.

Ids are compared by hand; others have an oracle.
"""

import json

import numpy as np
import pytest
import tokenizers

from helpers.tokenizing import rows, special_ids
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.tokenizers import SPECIALS, Tokenizer, TokenizerError
from transformer_jax.files import OutputError

GPT2 = {"tokenizer_class": "GPT2TokenizerFast"}


def write(folder, **files):
    """Write JSON files, named without their ending, or text: "vocab_txt" is
    `vocab.txt`.
    """
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / (
            name.replace("_txt", ".txt") if name.endswith("_txt") else f"{name}.json"
        )
        path.write_text(
            content if isinstance(content, str) else json.dumps(content),
            encoding="utf-8",
        )


def word_level(*names):
    """Return a tokenizer of words, with special tokens `names` after the words."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "stop": 2}, unk_token="b")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(names))
    return tokenizer


def test_gpt2_by_hand(tmp_path):
    """ "Ġ" is the space.

    The merges apply in the order of the file. Line feeds at its end do not count.
    """
    vocabulary = {
        "a": 0,
        "b": 1,
        "Ġ": 2,
        "ab": 3,
        "Ġab": 4,
        "ba": 5,
        "<|endoftext|>": 6,
    }
    write(
        tmp_path,
        vocab=vocabulary,
        merges_txt="#version: 0.2\na b\nb a\nĠ ab\n\n",
        config={"model_type": "gpt2"},
    )
    tokenizer = tokenizer_files.from_folder(tmp_path)
    assert tokenizer.encode_batch(["ab ab bab"]) == [[3, 4, 2, 1, 3]]
    assert tokenizer.decode([3, 4, 2, 1, 3]) == "ab ab bab"
    assert special_ids(tokenizer) == (None, 6, 6, None, None)
    write(
        tmp_path,
        tokenizer_config=GPT2 | {"add_prefix_space": True, "bos_token": "ba"},
        added_tokens={"<x>": 7},
    )
    tokenizer = tokenizer_files.from_folder(tmp_path)
    assert tokenizer.encode_batch(["ab<x>"]) == [[4, 7]]
    assert special_ids(tokenizer) == (None, 5, 6, None, None)


def test_openai_gpt_by_hand(tmp_path):
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "b</w>": 3, "ab</w>": 4, ".</w>": 5}
    write(
        tmp_path,
        vocab=vocabulary,
        merges_txt="#version: 0.2\na b</w>\n",
        config={"model_type": "openai-gpt"},
    )
    tokenizer = tokenizer_files.from_folder(tmp_path)
    assert tokenizer.encode_batch(["ÁB  bab.é"]) == [[4, 2, 4, 5, 0]]
    assert tokenizer.encode(["ÁB  bab.é"]).values.tolist() == [4, 2, 4, 5, 0]
    assert special_ids(tokenizer) == (None, None, None, 0, None)


def test_settings_of_bert(tmp_path):
    text = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ne\né\nE\n日\n本\n日本\n"
    write(tmp_path, vocab_txt=text)

    def pieces(**settings):
        write(
            tmp_path,
            tokenizer_config=settings | {"unk_token": "[UNK]", "mask_token": None},
        )
        tokenizer = tokenizer_files.from_folder(tmp_path)
        tokenizer_files.to_folder(tokenizer, tmp_path / "written")
        again = tokenizer_files.from_folder(tmp_path / "written")
        line = "É e\u0301 E 日本"
        assert again.encode_batch([line]) == tokenizer.encode_batch([line])
        return " ".join(tokenizer.tokens(tokenizer.encode_batch([line])[0]))

    assert pieces() == "e e e 日 本"
    assert pieces(do_lower_case=False) == "[UNK] [UNK] E 日 本"
    assert pieces(strip_accents=False) == "é [UNK] e 日 本"
    assert (
        pieces(do_lower_case=False, strip_accents=True, tokenize_chinese_chars=False)
        == "E e E 日本"
    )


def test_settings_win_over_tokenizer_json(tmp_path):
    train_tokenizer("bert", ["E e"], 20, lowercase=True).save(
        tmp_path / "tokenizer.json"
    )
    assert tokenizer_files.from_folder(tmp_path).encode_batch(["E"]) == [[6]]
    write(tmp_path, tokenizer_config={"do_lower_case": False})
    assert tokenizer_files.from_folder(tmp_path).encode_batch(["E"]) == [[1]]


def test_padding_cutting_and_special_tokens_in_text(tmp_path):
    whole = word_level("<s>")
    whole.enable_padding(length=3)
    whole.enable_truncation(2)
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_files.from_folder(tmp_path)
    assert tokenizer.encode_batch(["a", "a b a b", "<s>"]) == [[0], [0, 1, 0, 1], [1]]
    assert tokenizer.sha256 == Tokenizer(word_level("<s>").to_str()).sha256


def test_special_ids(tmp_path):
    """A named token wins over one found by its name, and that over an id in
    config.json. Others do not count.
    """
    word_level("<s>", "</s>", "<begin>", "<end>").save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.from_folder
    assert special_ids(read(tmp_path)) == (None, 3, 4, None, None)
    write(
        tmp_path,
        config={
            "pad_token_id": 2,
            "bos_token_id": 0,
            "eos_token_id": [6, 7],
            "mask_token_id": -1,
        },
    )
    assert special_ids(read(tmp_path)) == (2, 3, 4, None, None)
    write(
        tmp_path,
        special_tokens_map={
            "eos_token": {"content": "<end>"},
            "bos_token": "<begin>",
            "sep_token": "a",
        },
    )
    assert special_ids(read(tmp_path)) == (2, 5, 6, None, None)
    write(
        tmp_path,
        tokenizer_config={
            "bos_token": "<absent>",
            "cls_token": "b",
            "eos_token": None,
            "mask_token": "a",
        },
    )
    assert special_ids(read(tmp_path)) == (2, 1, 6, None, 0)
    word_level().save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        special_tokens_map={},
        tokenizer_config={},
        config={"eos_token_id": [2], "bos_token_id": 3},
    )
    assert special_ids(read(tmp_path)) == (None, None, 2, None, None)


def test_a_decoder_begins_with_an_id_of_its_own(tmp_path):
    write(
        tmp_path,
        tokenizer=word_level("<pad>", "<s>", "</s>").to_str(),
        config={"decoder_start_token_id": 3},
    )
    assert special_ids(tokenizer_files.from_folder(tmp_path))[:3] == (3, 3, 5)


def test_special_ids_are_written(tmp_path):
    tokenizer = Tokenizer(word_level("<s>").to_str(), {"eos_id": 2, "unk_id": 1})
    tokenizer_files.to_folder(
        tokenizer, tmp_path / "new" / "folder", begin=True, end=True, max_length=7
    )
    again = tokenizer_files.from_folder(tmp_path / "new" / "folder")
    assert special_ids(again)[:3] == special_ids(tokenizer)[:3] == (None, 3, 2)
    library = tokenizers.Tokenizer.from_file(
        str(tmp_path / "new" / "folder" / "tokenizer.json")
    )
    assert library.encode("a b").ids == [3, 0, 1, 2]
    assert library.encode("a", "b").ids == [3, 0, 2, 1, 2]
    assert library.encode("a", "b").type_ids == [0, 0, 0, 1, 1]
    assert json.loads(
        (tmp_path / "new" / "folder" / "tokenizer_config.json").read_text()
    ) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 7,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "stop",
        "unk_token": "b",
    }
    tokenizer_files.to_folder(again, tmp_path)
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(
        "a b"
    ).ids == [0, 1]
    with pytest.raises(
        TokenizerError,
        match="The tokenizer has no end id to put around a text: use one th",
    ):
        tokenizer_files.to_folder(
            Tokenizer(word_level("<s>").to_str()), tmp_path, begin=True, end=True
        )


def test_what_begins_a_text_in_transformers(tmp_path):
    """The post-processor decides, unless a setting does; without a begin id, nothing
    begins a text.
    """
    library = word_level("<s>")
    write(tmp_path, tokenizer=library.to_str())
    assert not tokenizer_files.begins(tmp_path)
    template = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    library.post_processor = tokenizers.processors.Sequence(
        [tokenizers.processors.ByteLevel(), template]
    )
    write(tmp_path, tokenizer=library.to_str())
    assert tokenizer_files.begins(tmp_path)
    write(tmp_path, tokenizer_config={"add_bos_token": False})
    assert not tokenizer_files.begins(tmp_path)
    write(
        tmp_path,
        tokenizer=word_level("<s>").to_str(),
        tokenizer_config={"add_bos_token": True},
    )
    assert tokenizer_files.begins(tmp_path)
    write(tmp_path, tokenizer=word_level().to_str())
    assert not tokenizer_files.begins(tmp_path)


def test_another_id_may_pad(tmp_path):
    """A tokenizer with an id of padding is written with it by default."""
    for pad_id, token in ((None, "<pad>"), (2, "stop")):
        tokenizer_files.to_folder(
            Tokenizer(word_level("<pad>").to_str()), tmp_path, pad_id=pad_id
        )
        assert (
            json.loads((tmp_path / "tokenizer_config.json").read_text())["pad_token"]
            == token
        )


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        OutputError,
        match=(
            r"the folder \S+file cannot be made: File exists\. Name a folder elsewhere"
        ),
    ):
        tokenizer_files.to_folder(Tokenizer(word_level().to_str()), tmp_path / "file")


def test_words_of_others_are_not_looked_up():
    """A tokenizer with the special tokens of tokenizers trained here may have pieces
    that span words.
    """
    model = tokenizers.models.Unigram(
        [*((name, 0.0) for name in SPECIALS), ("▁a▁b", -1.0), ("▁a", -5.0)], unk_id=3
    )
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme="always", split=False
    )
    whole.add_special_tokens(list(SPECIALS))
    tokenizer = Tokenizer(whole.to_str())
    assert (
        tokenizer.encode(["a b a"]).values.tolist()
        == tokenizer.encode_batch(["a b a"])[0]
        == [4, 5]
    )


def test_ids_need_not_be_used(tmp_path):
    """The size counts unused ids below the highest one, since all need rows of the
    embedding.
    """
    tokenizer = Tokenizer(
        tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"a": 0, "b": 6}, unk_token="a")
        ).to_str()
    )
    assert tokenizer.size == 7
    assert tokenizer.tokens([0, 3, 6]) == ["a", "", "b"]
    assert (tokenizer.id_of("b"), tokenizer.id_of("c")) == (6, None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            (
                r"has no tokenizer, i\.e\. tokenizer\.json, .*The folder contains"
                r" nothing\. Copy the"
            ),
        ),
        (
            {"vocab": {}, "config": {}},
            r"has no tokenizer.* The folder contains config\.json, vocab\.json\. Copy",
        ),
        (
            {"tokenizer": "{\n"},
            (r"tokenizer\.json is not a JSON object \(Expecting .*\): copy it again"),
        ),
        (
            {"tokenizer": "[1]"},
            r"tokenizer\.json is not a JSON object \(list\): copy it",
        ),
        (
            {"tokenizer": {"model": {"type": "BPE"}}},
            r"tokenizer\.json: Not a tokenizer's JSON: .*\. Copy the folder",
        ),
        (
            {"vocab_txt": "[UNK]\n[CLS]\n"},
            r"vocab\.txt has 2 lines, none of which is \[SEP\]",
        ),
        (
            {"vocab_txt": "[UNK]\n[CLS]\n[SEP]", "config": {"vocab_size": 2}},
            r"vocab\.txt has 3 ids, but .* = 2: the",
        ),
        (
            {"vocab_txt": "[UNK]\n[CLS]\n[SEP]", "added_tokens": {"x": 4}},
            r"gives the added token 'x' the id 4, but in the vocabulary it has 3",
        ),
        (
            {"vocab": {"a": 0}, "merges_txt": "", "config": {"model_type": "clip"}},
            (
                r"tokenizer_class or model_type is clip: known are GPT2Tokenizer,"
                r" OpenAIGPTTokenizer, RobertaTokenizer"
            ),
        ),
        (
            {"vocab": {"a": 0}, "merges_txt": "", "config": {"model_type": "roberta"}},
            r"vocab.json lacks <s> or </s>: copy all files of one model",
        ),
        (
            {
                "vocab": {"a": 0},
                "merges_txt": "#version\na b c\n",
                "config": {"model_type": "gpt2"},
            },
            r"merges\.txt:2 has 3 parts instead of 2: 'a b c'",
        ),
        (
            {
                "vocab": {"a": 0, "b": 1},
                "merges_txt": "a b\n",
                "config": {"model_type": "gpt2"},
            },
            r"merges\.txt:1 has 'ab', which vocab\.json lacks",
        ),
        (
            {"vocab": {"a": "0"}, "merges_txt": "", "config": {"model_type": "gpt2"}},
            r"vocab\.json gives 'a' no id from 0 up",
        ),
        (
            {"config": {"vocab_size": "3"}},
            r"config\.json: vocab_size = '3' must be of type int\. Copy the file again",
        ),
        (
            {"tokenizer_config": {"do_lower_case": 1}},
            r"tokenizer_config\.json: do_lower_case = 1 must be of type bool",
        ),
        (
            {"special_tokens_map": {"sep_token": {"content": 5}}},
            r"map\.json: sep_token = 5 must be of type str",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": []}},
            r"added_tokens_decoder = \[\] must be of type dict",
        ),
        (
            {
                "vocab_txt": "[UNK]\n[CLS]\n[SEP]",
                "tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}},
            },
            (
                r"added_tokens_decoder must have ids and tokens: invalid literal.*\."
                r" Copy it again"
            ),
        ),
        (
            {
                "vocab_txt": "[UNK]\n[CLS]\n[SEP]",
                "tokenizer_config": {"added_tokens_decoder": {"3": "a"}},
            },
            r"added_tokens_decoder must have ids and tokens: .*\. Copy it again",
        ),
        (
            {"tokenizer": {"normalizer": 3}},
            r"tokenizer\.json: Not a tokenizer's JSON: .*\. Copy the folder",
        ),
    ],
)
def test_broken_folders(files, message, tmp_path):
    write(tmp_path / "model", **files)
    with pytest.raises(TokenizerError, match=message):
        tokenizer_files.from_folder(tmp_path / "model")


def test_a_missing_folder(tmp_path):
    with pytest.raises(TokenizerError, match=r"absent has no tokenizer"):
        tokenizer_files.from_folder(tmp_path / "absent")


def test_a_file_that_is_not_utf_8(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"{}\n\xff")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a JSON object \(.utf-8"
    ):
        tokenizer_files.from_folder(tmp_path)


def test_a_vocabulary_of_bert(tmp_path):
    """The special tokens of original files are not the first: [PAD] is 0, and the
    others follow 99 unused ones.
    """
    tokens = [
        "[PAD]",
        *(f"[unused{i}]" for i in range(99)),
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "é",
        "e",
        "##b",
        "E",
    ]
    path = tmp_path / "vocab.txt"
    path.write_text("\r\n".join([*tokens, ""]), encoding="utf-8")
    uncased, cased = (
        tokenizer_files.from_vocabulary(path, lowercase) for lowercase in (True, False)
    )
    assert special_ids(uncased) == special_ids(cased) == (0, 101, 102, 100, 103)
    assert uncased.tokens(range(uncased.size)) == tokens
    assert uncased.encode_batch(["ébB [SEP]"]) == [[105, 106, 106, 100, 100, 100]]
    assert cased.encode_batch(["ébb Eb"]) == [[104, 106, 106, 107, 106]]
    assert np.flatnonzero(uncased.continues).tolist() == [106]
    assert (
        rows(uncased.encode(["E  ebb"] * 2, begin=101, end=102))
        == [[101, 105, 105, 106, 106, 102]] * 2
    )
    path.write_text("[UNK]\n[SEP]\n[CLS]", encoding="utf-8")
    assert special_ids(tokenizer_files.from_vocabulary(path, False)) == (
        None,
        2,
        1,
        0,
        None,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"",
            (
                r"vocab\.txt has 0 lines, none of which is \[UNK\] or \[CLS\] or"
                r" \[SEP\]: use the vocab\.txt of a BERT"
            ),
        ),
        (b"[UNK]\n[SEP]\na\n", r"vocab\.txt has 3 lines, none of which is \[CLS\]: "),
        (
            b"[UNK]\na\nb\na\n[CLS]",
            r"vocab\.txt:4 repeats 'a' of line 2: a token must have one id",
        ),
        (b"[UNK]\n\n[CLS]", r"vocab\.txt:2 is empty: each line must be a token"),
        (b"[UNK]\na\xff\n", r"vocab\.txt:2 is not UTF-8"),
        (None, r"Cannot read .*vocab\.txt"),
    ],
)
def test_a_broken_vocabulary_is_named(content, message, tmp_path):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tokenizer_files.from_vocabulary(path, lowercase=True)
