"""Train tokenizers: the same lines give the same ids.

In the tokenizers trained here padding, begin, end and unknown are the ids 0, 1, 2 and 3, and text never becomes one of
the first three: a line that spells "</s>" is encoded as its characters (`words`: as unknown). The kinds, and what
decode(encode(text)) gives back:

- `bpe_bytes`: BPE over bytes as in GPT-2, never unknown. Gives back the text, always. No space is put before a line, so
  decode(a + b) == decode(a) + decode(b) where both are whole characters.
- `bpe_metaspace`: BPE with "▁" for the space as in SentencePiece. Gives back the text with all its spaces, except for
  characters unseen in training (unknown) and "▁" itself (a space). Right for text already split into tokens.
- `unigram`: the most probable pieces under a unigram model (Kudo 2018, section 3.2), with "▁" for the space. Gives
  back the same as `bpe_metaspace`, but several unseen characters in a row are one unknown.
- `wordpiece`: each word between whitespace is cut from the left into the longest known pieces, all but the first
  written "##…" (Devlin et al. 2019). Gives back the words joined by single spaces: right for text already split into
  tokens. A word with an unseen character or of more than 100 characters is one unknown; so is "##", or the name of a
  special, at the start of a word. Differs: pieces are merged by count, not by likelihood (Schuster and Nakajima
  2012, section 2); punctuation is not split off.
- `words`: the words between whitespace. Gives them back joined by single spaces; rare ones are unknown.
- `characters`: one id for each character (code point). Gives back the text where its characters are known.

With `lowercase=True`, case is lost as well.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from transformer_jax.data import tokenizers as ours
from transformer_jax.data.tokenizers import SPECIALS, Tokenizer, TokenizerError

UNK = "<unk>"
KINDS = ("bpe_bytes", "bpe_metaspace", "wordpiece", "unigram", "words", "characters")

log = logging.getLogger(__name__)


def train_tokenizer(
    kind: str, lines: Iterable[str], vocab_size: int, *, min_count: int = 1, lowercase: bool = False
) -> Tokenizer:
    """Learn at most `vocab_size` ids, specials included. The same lines give the same `sha256`.

    What occurs less often than `min_count` does not become an entry (a word, a character) or a merge (BPE, wordpiece;
    their alphabet is kept whole). `words` keeps the most frequent words that fit; the other kinds refuse a
    `vocab_size` that cannot hold their alphabet.

    Raises:
        TokenizerError: unknown kind, nothing to learn from, `vocab_size` below the smallest possible, or a
            `min_count` for unigram, which goes by probability.
    """
    if kind not in KINDS:
        raise TokenizerError(f"Unknown kind of tokenizer {kind!r}: choose one of {', '.join(KINDS)}.")
    if kind == "unigram" and min_count != 1:
        raise TokenizerError(f"min_count={min_count}: unigram keeps the likeliest pieces, not by count; set it to 1.")
    lines = lines if isinstance(lines, Sequence) else list(lines)
    if len(lines) >= ours.MANY:
        # With `command_line.keep_freed_memory`, the library's threads wait for each other's memory.
        try:
            with ours._pool(1) as pool:
                return Tokenizer(pool.submit(_train, kind, list(lines), vocab_size, min_count, lowercase).result())
        except ours.NO_PROCESSES as error:
            log.warning("another process cannot be started, or died (%s): this one trains the tokenizer", error)
    return Tokenizer(_train(kind, lines, vocab_size, min_count, lowercase))


def _train(kind: str, lines: Sequence[str], vocab_size: int, min_count: int, lowercase: bool) -> str:
    """Return the JSON of a trained tokenizer."""
    if not any(map(str.strip, lines)):
        raise TokenizerError(f"No text to train the tokenizer on: all of {len(lines)} lines are empty.")
    tokenizer = _untrained(kind, lowercase)
    if kind.startswith("bpe"):
        _train_bpe(tokenizer, lines, vocab_size, min_count, by_bytes=kind == "bpe_bytes")
        minimum = tokenizer.get_vocab_size()  # exceeds vocab_size only if specials and alphabet alone do
    elif kind in ("wordpiece", "unigram"):
        _train_bpe(tokenizer, lines, 0)  # gives the alphabet
        alphabet = sorted(tokenizer.get_vocab().keys() - set(SPECIALS))
        minimum = len(SPECIALS) + len(alphabet) * (2 if kind == "wordpiece" else 1)
        if vocab_size >= minimum and kind == "wordpiece":
            tokenizer.model = _wordpiece(tokenizer, lines, alphabet, vocab_size, min_count)
        elif vocab_size >= minimum:
            tokenizer.model = _unigram(tokenizer, lines, alphabet, vocab_size)
        tokenizer.add_special_tokens(list(SPECIALS))
    else:
        vocabulary = _count(tokenizer.normalizer, lines, min_count, by_word=kind == "words")
        minimum = len(SPECIALS) + (1 if kind == "words" else len(vocabulary))
        ids = {token: i for i, token in enumerate((*SPECIALS, *vocabulary)) if i < vocab_size}
        tokenizer.model = models.WordLevel(ids, unk_token=UNK)
        tokenizer.add_special_tokens(list(SPECIALS))
    if vocab_size < minimum:
        raise TokenizerError(
            f"vocab_size={vocab_size} is too small for {kind}: specials and alphabet of these lines need at "
            f"least {minimum}. Raise it, or take bpe_bytes (at least {len(SPECIALS) + 256})."
        )
    return tokenizer.to_str()


def _train_bpe(
    tokenizer: tokenizers.Tokenizer, lines: Sequence[str], vocab_size: int, min_count: int = 1, by_bytes: bool = False
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
    tokenizer: tokenizers.Tokenizer, lines: Sequence[str], alphabet: list[str], vocab_size: int, min_count: int
) -> models.Model:
    """Train WordPiece reproducibly.

    The trainer numbers "##a", "##b" … in the order of a hash map, and breaks ties between equal counts by number. As
    specials they have fixed numbers, and every known character may stand anywhere in a word.
    """
    first = [*SPECIALS, *("##" + character for character in alphabet)]
    tokenizer.model = models.WordPiece(unk_token=UNK)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_count, special_tokens=first, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    pieces = [*SPECIALS, *sorted(tokenizer.get_vocab().keys() - set(SPECIALS))]
    return models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=UNK)


def _unigram(
    tokenizer: tokenizers.Tokenizer, lines: Sequence[str], alphabet: list[str], vocab_size: int
) -> models.Model:
    """Train unigram reproducibly.

    The trainer sums in a different order each time, and gives the characters that are not likely pieces scores in steps
    of 0.0001 above the lowest one, in any order. Here these get the lowest score, all scores are rounded, and equal
    ones are sorted. The rounding is coarse: sums were seen to differ by 4e-11, and one that straddles a rounding
    boundary would show.
    """
    tokenizer.model = models.Unigram()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    learned = json.loads(tokenizer.to_str())["model"]["vocab"][len(SPECIALS) :]
    least = min(score for _, score in learned)
    near = least + 1e-4 * len(alphabet)
    scores = [(piece, round(least if len(piece) == 1 and s < near else s, 3)) for piece, s in learned]
    scores.sort(key=lambda item: (-item[1], item[0]))
    # Near the smallest possible size, the trainer keeps more than asked for: drop the least likely.
    room = vocab_size - len(SPECIALS) - sum(len(piece) == 1 for piece, _ in scores)
    kept = {piece for piece, _ in [item for item in scores if len(item[0]) > 1][:room]}
    scores = [item for item in scores if len(item[0]) == 1 or item[0] in kept]
    # The specials' 0 would be the best score, but no text spells them, since "<" is always a piece of its own.
    return models.Unigram([*((special, 0.0) for special in SPECIALS), *scores], unk_id=SPECIALS.index(UNK))


def _count(normalizer: Any, lines: Sequence[str], min_count: int, by_word: bool) -> list[str]:
    """Return words or characters, most frequent first. (WordLevelTrainer gives a literal "<unk>" a second id.)"""
    counts: Counter[str] = Counter()
    for line in lines:
        line = normalizer.normalize_str(line)
        counts.update(line.split() if by_word else line)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    vocabulary = [token for token, count in ranked if count >= min_count and token not in SPECIALS]
    if not vocabulary:
        raise TokenizerError(f"Nothing occurs min_count={min_count} times in {len(lines)} lines: lower it.")
    return vocabulary


def _untrained(kind: str, lowercase: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer with an empty model: how text is split into pieces, and joined again."""
    normalizer: list[Any] = [normalizers.Lowercase()] if lowercase else []
    pieces: Any
    decoder: Any = None
    if kind == "bpe_bytes":
        # Its pattern separates "<", letters and ">", so no merge can spell a special.
        pieces, decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind in ("bpe_metaspace", "unigram"):
        # One "▁" goes before every line, even before a space, and decoding removes one space: Metaspace's own
        # prepending loses a leading space.
        normalizer.append(normalizers.Prepend("▁"))
        # "<" stands alone, so no piece can spell a special: training would give a merged "</s>" the id of the end.
        alone = pre_tokenizers.Split("<", "isolated")
        pieces = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), alone])
        decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif kind == "wordpiece":
        normalizer.append(normalizers.Replace(tokenizers.Regex(r"(?<!\S)(<(pad|s|/s)>|##)"), UNK))
        pieces, decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##", cleanup=False)
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
