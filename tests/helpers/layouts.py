"""Small tokenizers of every layout, and a text to encode with them."""

import random

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.data.whole_texts import PART

SENTENCE = "the king of France is dead and I'll not speak of it"
WORDS = [
    *SENTENCE.split(),
    "1,234",
    "Ωmega",
    "naïve",
    "e\u0301",
    "日本語",
    "☃",
    "don't",
]
GAPS = [" ", " ", " ", "  ", ".\n", "!\n\n", "\r\n", " \n", "\n\n\n    ", "\t"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def running_text(characters):
    """Return text with blank lines, spaces at the ends of lines and two kinds of
    line breaks.
    """
    draw, parts = random.Random(0), []
    while characters > 0:
        parts += [draw.choice(WORDS), draw.choice(GAPS)]
        characters -= len(parts[-1]) + len(parts[-2])
    return "".join(parts)


TEXT = running_text(3 * PART)


def trained(model, splits, normalizer=None, **options):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = splits
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = (
        trainers.UnigramTrainer
        if isinstance(model, models.Unigram)
        else trainers.BpeTrainer
    )
    lines = [TEXT[i : i + 300] for i in range(0, 9000, 300)]
    tokenizer.train_from_iterator(
        lines, trainer(vocab_size=500, show_progress=False, **options)
    )
    return Tokenizer(tokenizer.to_str())


def layouts():
    """Yield tokenizers that have pieces across line breaks, or put a space before a
    text, or do not divide texts.
    """
    lines = TEXT[:20_000].split("\n")
    for kind in KINDS:
        yield kind, train_tokenizer(kind, lines, 900)
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    unknown = {"special_tokens": ["<unk>"]}
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    yield (
        "llama 3",
        trained(models.BPE(), pre_tokenizers.Sequence([split, unsplit]), **alphabet),
    )
    yield "bytes, not divided", trained(models.BPE(), unsplit, **alphabet)
    yield (
        "prefix space",
        trained(
            models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=True), **alphabet
        ),
    )
    undivided = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    yield (
        "bpe, not divided",
        trained(
            models.BPE(unk_token="<unk>"), undivided, normalizers.NFKC(), **unknown
        ),
    )
    options = {**unknown, "unk_token": "<unk>", "max_piece_length": 12}
    yield "unigram, not divided", trained(models.Unigram(), undivided, **options)


LAYOUTS = dict(layouts())
