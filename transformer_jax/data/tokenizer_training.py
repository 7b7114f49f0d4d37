"""Train tokenizers. The same lines always give the same ids.

The padding, begin, end and unknown ids are 0, 1, 2 and 3; those of `bert` are 0, 2, 3
and 1, and its mask id is 4. Text is never encoded as a special token other than the
unknown one: a line that contains "</s>" is encoded as its characters (by `words`: as
unknown). The kinds of tokenizers differ in what they restore, i.e. in
decode(encode(text)):

- `bpe_bytes`: BPE over bytes, as in GPT-2. Restores any text, without unknowns. No
  space is put before a line, so decode(a + b) == decode(a) + decode(b) if both consist
  of whole characters.
- `bpe_metaspace`: BPE with "▁" for the space, as in SentencePiece. Restores the text
  with all its spaces, except that characters unseen in training become unknown and "▁"
  itself becomes a space. Suitable for text that is already split into tokens.
- `unigram`: the most probable pieces under a unigram model (Kudo 2018, section 3.2),
  with "▁" for the space. Restores the same as `bpe_metaspace`, except that several
  unseen characters in a row become one unknown.
- `wordpiece`: each word between whitespace is split from the left into the longest
  known pieces, all but the first written "##…" (Devlin et al. 2019). Restores the
  words, joined by single spaces, so it is suitable for text that is already split into
  tokens. A word with an unseen character or with more than 100 characters becomes one
  unknown. So does "##", or the name of a special token, at the start of a word.
  Differs: pieces are merged by count, not by likelihood (Schuster and Nakajima 2012,
  section 2); punctuation is not split off.
- `bert`: BERT's WordPiece (Devlin et al. 2019). Each punctuation mark, symbol of ASCII
  and Chinese character is a word of its own; control characters are removed. Other
  words are split into pieces as by `wordpiece`. Restores the words, joined by single
  spaces, but without a space before marks such as "." and "'": "don't stop." is
  restored, and "(a-b)" becomes "( a - b )". A word with an unknown character or with
  more than 100 characters becomes one unknown. With `lowercase=True`, accents are lost
  too. Differs: pieces are merged by count, as by `wordpiece`.
- `words`: the words between whitespace. Restores them joined by single spaces; rare
  words become unknown.
- `characters`: one id per character (code point). Restores the text if all its
  characters are known.

With `lowercase=True`, case is lost as well.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from transformer_jax.data import tokenizers as ours
from transformer_jax.data.tokenizers import (
    BERT_SPECIALS,
    NAMES,
    SPECIALS,
    Tokenizer,
    TokenizerError,
)
from transformer_jax.data.workers import NO_PROCESSES, workers

UNK = "<unk>"
KINDS = (
    "bpe_bytes",
    "bpe_metaspace",
    "wordpiece",
    "bert",
    "unigram",
    "words",
    "characters",
)

log = logging.getLogger(__name__)


def train_tokenizer(
    kind: str,
    lines: Iterable[str],
    vocab_size: int,
    *,
    min_count: int = 1,
    lowercase: bool = False,
    marks: Sequence[str] = (),
) -> Tokenizer:
    """Train a tokenizer with at most `vocab_size` ids, including special ids.

    The last ids are those of `marks`, special tokens that stand for no text.

    The same lines give the same `sha256`.

    Words and characters that occur less than `min_count` times are left out of the
    vocabulary. For BPE and wordpiece, `min_count` applies to merges instead, and the
    whole alphabet is kept. For bert, it applies to characters and to merges. `words`
    keeps the most frequent words that fit; the other kinds reject a `vocab_size` that
    is too small for their alphabet.

    Raises:
        TokenizerError: the kind is unknown, there is no text, `vocab_size` is below the
            smallest possible, or `min_count` is not 1 for unigram, which selects pieces
            by probability.
    """
    if kind not in KINDS:
        raise TokenizerError(
            f"Unknown kind of tokenizer {kind!r}: choose one of {', '.join(KINDS)}."
        )
    if kind == "unigram" and min_count != 1:
        raise TokenizerError(
            f"min_count={min_count}: unigram selects pieces by probability, not count; "
            "set it to 1."
        )
    lines = lines if isinstance(lines, Sequence) else list(lines)
    arguments = (kind, lines, vocab_size - len(marks), min_count, lowercase)
    return Tokenizer(_with_marks(_trained(*arguments), marks))


def _trained(
    kind: str, lines: Sequence[str], vocab_size: int, min_count: int, lowercase: bool
) -> str:
    """Return the JSON of a tokenizer, which another process trains if there are many
    lines.
    """
    if len(lines) >= ours.MANY:
        # In this process, `command_line.keep_freed_memory` would make the library's
        # threads contend for memory.
        try:
            with workers(1) as submit:
                return submit(
                    _train, kind, list(lines), vocab_size, min_count, lowercase
                ).result()
        except NO_PROCESSES as error:
            log.warning(
                "could not start a process, or it died (%s): "
                "training the tokenizer in this process",
                error,
            )
    return _train(kind, lines, vocab_size, min_count, lowercase)


def _with_marks(text: str, marks: Sequence[str]) -> str:
    """Return the JSON of a tokenizer with further special tokens."""
    if not marks:
        return text
    tokenizer = tokenizers.Tokenizer.from_str(text)
    if pieces := [mark for mark in marks if tokenizer.token_to_id(mark) is not None]:
        raise TokenizerError(
            f"the text itself has the piece {', '.join(pieces)}, which is a token "
            "of this run: replace it in the text."
        )
    tokenizer.add_special_tokens(list(marks))
    return tokenizer.to_str()


def _train(
    kind: str, lines: Sequence[str], vocab_size: int, min_count: int, lowercase: bool
) -> str:
    """Return the JSON of a trained tokenizer."""
    if not any(map(str.strip, lines)):
        raise TokenizerError(
            f"No text to train the tokenizer on: all {len(lines)} lines are empty."
        )
    tokenizer = _untrained(kind, lowercase)
    specials = BERT_SPECIALS if kind == "bert" else SPECIALS
    if kind.startswith("bpe"):
        _train_bpe(
            tokenizer, lines, vocab_size, min_count, by_bytes=kind == "bpe_bytes"
        )
        # exceeds vocab_size only if special tokens and alphabet alone do
        minimum = tokenizer.get_vocab_size()
    elif kind in ("wordpiece", "bert", "unigram"):
        if kind == "bert":
            lines = _frequent(tokenizer.normalizer, lines, min_count)
        _train_bpe(tokenizer, lines, 0)  # finds the alphabet
        alphabet = sorted(tokenizer.get_vocab().keys() - set(SPECIALS))
        minimum = len(specials) + len(alphabet) * (1 if kind == "unigram" else 2)
        if vocab_size >= minimum:
            if kind == "unigram":
                model = _unigram(tokenizer, lines, alphabet, vocab_size)
            else:
                model = _wordpiece(
                    tokenizer, lines, alphabet, specials, vocab_size, min_count
                )
            # the trainers leave special tokens of their own, e.g. "##a"
            tokenizer = _untrained(kind, lowercase)
            tokenizer.model = model
            tokenizer.add_special_tokens(list(specials))
    else:
        vocabulary = _count(
            tokenizer.normalizer, lines, min_count, by_word=kind == "words"
        )
        minimum = len(SPECIALS) + (1 if kind == "words" else len(vocabulary))
        ids = {
            token: i
            for i, token in enumerate((*SPECIALS, *vocabulary))
            if i < vocab_size
        }
        tokenizer.model = models.WordLevel(ids, unk_token=UNK)
        tokenizer.add_special_tokens(list(SPECIALS))
    if vocab_size < minimum:
        other = (
            "raise min_count"
            if kind == "bert"
            else f"use bpe_bytes (at least {len(SPECIALS) + 256})"
        )
        raise TokenizerError(
            f"vocab_size={vocab_size} is too small for {kind}: "
            "the special tokens and the alphabet "
            f"of these lines need at least {minimum}. Raise it, or {other}."
        )
    return tokenizer.to_str()


def _train_bpe(
    tokenizer: tokenizers.Tokenizer,
    lines: Sequence[str],
    vocab_size: int,
    min_count: int = 1,
    by_bytes: bool = False,
) -> None:
    tokenizer.model = models.BPE(unk_token=None if by_bytes else UNK)
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, 0),
        min_frequency=min_count,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if by_bytes else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))


def _wordpiece(
    tokenizer: tokenizers.Tokenizer,
    lines: Sequence[str],
    alphabet: list[str],
    specials: Sequence[str],
    vocab_size: int,
    min_count: int,
) -> models.Model:
    """Train WordPiece reproducibly.

    The trainer numbers "##a", "##b", … in the order of a hash map, and breaks ties
    between equal counts by number. They are passed as special tokens, which have fixed
    numbers. This also allows every known character anywhere in a word.
    """
    (unk,) = set(specials).intersection(NAMES["unk_id"])
    first = [*specials, *("##" + character for character in alphabet)]
    tokenizer.model = models.WordPiece(unk_token=unk)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=first,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    pieces = [
        *specials,
        *sorted(tokenizer.get_vocab(with_added_tokens=False).keys() - set(specials)),
    ]
    return models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=unk)


def _unigram(
    tokenizer: tokenizers.Tokenizer,
    lines: Sequence[str],
    alphabet: list[str],
    vocab_size: int,
) -> models.Model:
    """Train unigram reproducibly.

    The trainer adds up floats in a different order each time. It gives characters that
    are not likely pieces scores in steps of 0.0001 above the lowest one, in arbitrary
    order. Here, these characters get the lowest score, all scores are rounded, and
    pieces with equal scores are sorted. The rounding is coarse: sums differed by up to
    4e-11. Sums on both sides of a rounding boundary would still give different results.
    """
    tokenizer.model = models.Unigram()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        unk_token=UNK,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    learned = json.loads(tokenizer.to_str())["model"]["vocab"][len(SPECIALS) :]
    least = min(score for _, score in learned)
    near = least + 1e-4 * len(alphabet)
    characters = []
    longer = []
    for piece, score in learned:
        if len(piece) > 1:
            longer.append((piece, round(score, 3)))
        else:
            characters.append((piece, round(least if score < near else score, 3)))
    longer.sort(key=_likeliest_first)
    # Near the smallest possible size, the trainer keeps more pieces than requested:
    # drop the least likely.
    room = vocab_size - len(SPECIALS) - len(characters)
    scores = sorted(characters + longer[:room], key=_likeliest_first)
    # The 0 of the special tokens is the best score, but text is never encoded as one:
    # "<" is always a separate piece.
    return models.Unigram(
        [*((special, 0.0) for special in SPECIALS), *scores], unk_id=SPECIALS.index(UNK)
    )


def _likeliest_first(scored_piece: tuple[str, float]) -> tuple[float, str]:
    piece, score = scored_piece
    return -score, piece


def _frequent(normalizer: Any, lines: Sequence[str], min_count: int) -> list[str]:
    """Return normalized lines with a space in place of each character that occurs
    less than `min_count` times.
    """
    lines = [normalizer.normalize_str(line) for line in lines]
    counts = Counter(itertools.chain.from_iterable(lines))
    rare = {
        ord(character): " " for character, count in counts.items() if count < min_count
    }
    frequent = [line.translate(rare) for line in lines] if rare else lines
    if not any(map(str.strip, frequent)):
        raise TokenizerError(
            f"No character occurs min_count={min_count} "
            f"times in {len(lines)} lines: lower it."
        )
    return frequent


def _count(
    normalizer: Any, lines: Sequence[str], min_count: int, by_word: bool
) -> list[str]:
    """Return words or characters, most frequent first.

    WordLevelTrainer would give a literal "<unk>" a second id.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        line = normalizer.normalize_str(line)
        counts.update(line.split() if by_word else line)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    vocabulary = [
        token for token, count in ranked if count >= min_count and token not in SPECIALS
    ]
    if not vocabulary:
        raise TokenizerError(
            f"Nothing occurs min_count={min_count} "
            f"times in {len(lines)} lines: lower it."
        )
    return vocabulary


def _untrained(kind: str, lowercase: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer with an empty model, set up to normalize and split text and
    to join pieces again.
    """
    if kind == "bert":
        return bert({}, lowercase)
    normalizer: list[Any] = [normalizers.Lowercase()] if lowercase else []
    pieces: Any
    decoder: Any = None
    if kind == "bpe_bytes":
        # The pattern of ByteLevel separates "<", letters and ">", so no merge can
        # produce a special token.
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
        decoder = decoders.ByteLevel()
    elif kind in ("bpe_metaspace", "unigram"):
        # Put one "▁" before every line, even before a space; decoding removes one
        # space. The prepending of Metaspace itself would lose a leading space.
        normalizer.append(normalizers.Prepend("▁"))
        # Separate "<", so that no piece is a special token: training would give a
        # merged "</s>" the end id.
        alone = pre_tokenizers.Split("<", "isolated")
        pieces = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="never"), alone]
        )
        decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif kind == "wordpiece":
        normalizer.append(
            normalizers.Replace(tokenizers.Regex(r"(?<!\S)(<(pad|s|/s)>|##)"), UNK)
        )
        pieces, decoder = (
            pre_tokenizers.WhitespaceSplit(),
            decoders.WordPiece(prefix="##", cleanup=False),
        )
    elif kind == "words":
        pattern = tokenizers.Regex(r"(?<!\S)<(pad|s|/s)>(?!\S)")
        normalizer.append(normalizers.Replace(pattern, UNK))
        pieces = pre_tokenizers.WhitespaceSplit()
    else:
        pieces = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        decoder = decoders.Fuse()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.pre_tokenizer = pieces
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def bert(vocabulary: Mapping[str, int], lowercase: bool) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer, which splits text at whitespace and punctuation, and
    words with WordPiece.

    Sources: Devlin et al. 2019; `tokenization.py` of google-research/bert.
    """
    model = models.WordPiece(
        dict(vocabulary), unk_token="[UNK]", max_input_chars_per_word=100
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=None,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(
        [token for token in BERT_SPECIALS if token in vocabulary]
    )
    return tokenizer
