"""Convert text to ids and back with Hugging Face `tokenizers`.

A tokenizer is stored as one canonical JSON file.

Any tokenizer of that library can be loaded. Its padding, begin, end, unknown and mask
ids are attributes, which are None if the tokenizer has no such id. `tokenizer_training`
trains new tokenizers, and `tokenizer_files` reads those of others.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from transformer_jax.data import unigram
from transformer_jax.data.progress import progress
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.workers import NO_PROCESSES, workers
from transformer_jax.errors import UserError
from transformer_jax.files import is_for_user

# The tokens with ids 0, 1, 2, … of the tokenizers trained by this package: of kind
# "bert", and of the other kinds.
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
# Names under which special tokens are looked up in a tokenizer, in this order.
NAMES = {
    "pad_id": ("<pad>", "[PAD]"),
    "bos_id": ("<s>", "[CLS]", "<|endoftext|>"),
    "eos_id": ("</s>", "[SEP]", "<|endoftext|>"),
    "unk_id": ("<unk>", "[UNK]"),
    "mask_id": ("<mask>", "[MASK]"),
}
# The characters that stand for bytes in byte-level tokenizers: visible bytes stand for
# themselves, the others are mapped to U+0100 and up.
SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in SEEN]
BYTES = {chr(byte): byte for byte in SEEN} | {
    chr(0x100 + i): byte for i, byte in enumerate(HIDDEN)
}
VISIBLE = {" ": "▁", "\n": "↵"}
# How tokenizers trained by this package split text: at spaces, or into characters.
ALONE = {
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}
SPLITS = (
    {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    {"type": "WhitespaceSplit"},
    ALONE,
)
CHUNK = 100_000  # lines encoded at a time
REMEMBERED = 1_000_000  # words whose ids each process caches while encoding
MANY = 500_000  # from this many lines on, training and encoding run in other processes
MAX_PROCESSES = 16

log = logging.getLogger(__name__)


class TokenizerError(UserError):
    """Failure to train, load or use a tokenizer."""


class Tokenizer:
    """A trained tokenizer.

    Its canonical JSON describes it completely, and `sha256` identifies it.

    Args:
        text: the JSON of a tokenizer of Hugging Face's library.
        special_ids: {"pad_id", "bos_id", "eos_id", "unk_id" or "mask_id": id or None},
            for ids that cannot be found by `NAMES` among the special tokens of the
            JSON. They are stored in the JSON under "special_ids", a key that Hugging
            Face's library does not know. Another one is "sentencepiece", the settings
            of `unigram.Encoder`.

    Attributes:
        pad_id, bos_id, eos_id, unk_id, mask_id: the special ids, or None. Code must not
            rely on particular values, or on `pad_id` being set: batches mark valid
            positions by lengths.

    Raises:
        TokenizerError: `text` is not the JSON of a tokenizer, or a special id is not
            one of its ids.
    """

    pad_id: int | None
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    mask_id: int | None

    def __init__(self, text: str, special_ids: Mapping[str, int | None] | None = None):
        try:
            content = json.loads(text)
            given = content.pop("special_ids", {}) | dict(special_ids or {})
            marian = content.pop("sentencepiece", None)
            self._tokenizer = tokenizers.Tokenizer.from_str(
                json.dumps(content, ensure_ascii=False)
            )
        except Exception as error:  # the Rust library raises bare Exception
            raise TokenizerError(f"Not a tokenizer's JSON: {error}") from error
        self._encoder: Any = self._tokenizer
        if marian is not None:
            self._encoder = unigram.Encoder(self._tokenizer, marian, given["unk_id"])
        specials = {
            token["content"]: token["id"]
            for token in content["added_tokens"]
            if token["special"]
        }
        ids = {}
        for name, tokens in NAMES.items():
            ids[name] = next((specials[t] for t in tokens if t in specials), None)
        if unknown := set(given) - set(NAMES):
            raise TokenizerError(
                f"special_ids has {', '.join(sorted(unknown))}: "
                f"choose from {', '.join(NAMES)}."
            )
        for name, i in (ids | given).items():
            if i is not None and self._tokenizer.id_to_token(i) is None:
                raise TokenizerError(
                    f"{name} = {i}, but the tokenizer has no such id: "
                    f"choose one below {self.size}."
                )
            setattr(self, name, i)
        stored = dict(content)
        if given:
            stored["special_ids"] = given
        if marian:
            stored["sentencepiece"] = marian
        self._json = json.dumps(stored, ensure_ascii=False, sort_keys=True)
        self._characters = _characters(content)
        self._byte_level = '"ByteLevel"' in json.dumps(content.get("decoder"))
        self._continuing = content["model"].get("continuing_subword_prefix")
        self._added = {token["content"] for token in content["added_tokens"]}
        self._by_word = not marian and (_trained_here(content) or of_bert(content))
        # These settings do not define the tokenizer. The first is not part of the JSON;
        # without it, the text "</s>" would be encoded as the end id.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # it may leave spaces out of the characters of an id
        self._tokenizer.post_processor = None

    @classmethod
    def load(cls, path: epath.PathLike) -> Tokenizer:
        """Load a tokenizer that `save` has written.

        Raises:
            TokenizerError: the file is missing or unreadable, or is not a tokenizer.
        """
        try:
            return cls(epath.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not is_for_user(error):
                raise
            raise TokenizerError(
                f"Cannot load the tokenizer {path}: {error} "
                "Restore the file from a backup, or train again in a new workdir: "
                "old checkpoints do not work with the ids of another tokenizer."
            ) from error

    def save(self, path: epath.PathLike) -> None:
        """Write the canonical JSON atomically: a reader sees either the old file or
        the complete new one.
        """
        path = epath.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self._json, encoding="utf-8")
        temporary.replace(path)

    def to_json(self) -> str:
        """Return the text of the tokenizer's file."""
        return self._json

    @property
    def sha256(self) -> str:
        """The hash of the tokenizer's file, in hexadecimal digits."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    @functools.cached_property
    def size(self) -> int:
        """Number of ids, including special ids, and unused ones below the highest."""
        if isinstance(self._encoder, unigram.Encoder):
            return self._encoder.size
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        """Return the id of a piece as the vocabulary stores it, or None if there is
        none.
        """
        if isinstance(self._encoder, unigram.Encoder):
            return self._encoder.id_of(token)
        return self._tokenizer.token_to_id(token)

    @functools.cached_property
    def continues(self) -> np.ndarray:
        """(size,) bool, True for the ids of pieces that continue a word, e.g. "##ing".

        Raises:
            TokenizerError: the vocabulary does not mark these pieces.
        """
        if not self._continuing:
            raise TokenizerError(
                "The tokenizer does not mark the pieces that continue a word: "
                "use one of WordPiece, e.g. data.tokenizer = 'bert'."
            )
        return np.array(
            [
                token.startswith(self._continuing)
                for token in self.tokens(range(self.size))
            ],
            bool,
        )

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line, computed in parallel threads.

        No special ids are added; nothing is truncated.
        """
        encodings = self._encoder.encode_batch_fast(
            list(lines), add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def encodings(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return what Hugging Face's library says of each text: ids, and the words
        and characters of each id.
        """
        return self._encoder.encode_batch(texts, add_special_tokens=False)

    @property
    def by_character(self) -> bool:
        """True if each character of a text is an id, and nothing else."""
        return self._characters is not None

    def spans(self, lines: Sequence[str]) -> tuple[Ragged, Ragged, Ragged]:
        """Return the ids of each line as in `encode_batch`, and the starts and ends of
        the text that each stands for.

        An id stands for the characters [start, end) of the line as it was given, before
        normalization. Parts of one character, e.g. its bytes, have the same range. A
        "▁" that was put before the line has that of the first character. Outside all
        ranges are only characters that are dropped: in BERT's tokenizers, these are
        whitespace, control characters, and, if accents are stripped, combining accents
        at either end of a word.
        """
        encodings = self.encodings(lines)
        ids = Ragged.of((encoding.ids for encoding in encodings), dtype_of(self))
        flatten = itertools.chain.from_iterable
        offsets = flatten(flatten(encoding.offsets for encoding in encodings))
        starts, ends = np.fromiter(offsets, np.int32).reshape(-1, 2).T
        return ids, Ragged(starts, ids.lengths), Ragged(ends, ids.lengths)

    def encode(
        self, lines: Sequence[str], begin: int | None = None, end: int | None = None
    ) -> Ragged:
        """Return the ids of each line in flat arrays, for corpora of any size.

        Each line is preceded by `begin` and followed by `end`, unless they are None.

        In tokenizers trained by this package, and in those of BERT, no piece spans
        several words of a line whose words are separated by single spaces. Most words
        of a text repeat, so each is encoded once and then looked up. Other lines, and
        lines for other tokenizers, are encoded whole.
        """
        parts: Iterable[Ragged]
        if self._characters is not None:
            parts = (
                self._look_up(chunk, self._characters).framed(end=end)
                for chunk in _chunks(lines)
            )
        elif not self._by_word:
            parts = (
                Ragged.of(self.encode_batch(c), dtype_of(self)).framed(end=end)
                for c in _chunks(lines)
            )
        elif len(lines) < MANY or _cores() == 1:
            parts = map(_Words(self, end).encode, _chunks(lines))
        else:
            try:
                parts = [*_encode_in_processes(self, lines, end)]
            except NO_PROCESSES as error:
                log.warning(
                    "could not start worker processes, or they died (%s): "
                    "encoding %d lines in this process",
                    error,
                    len(lines),
                )
                parts = map(_Words(self, end).encode, _chunks(lines))
        nothing = Ragged.of([], dtype_of(self))
        return Ragged.join([nothing, *(part.framed(begin=begin) for part in parts)])

    def _look_up(self, lines: Sequence[str], table: np.ndarray) -> Ragged:
        """Return the id of each character of each line."""
        points = np.frombuffer("".join(lines).encode("utf-32-le"), np.uint32)
        lengths = np.fromiter(map(len, lines), np.int32, len(lines))
        return Ragged(table[points], lengths)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the piece of each id as the vocabulary stores it, e.g. "▁the",
        "Ġthe", "</s>"; "" for unused ids.
        """
        return [
            (self._tokenizer.id_to_token(int(i)) or "").removeprefix(unigram.HIDDEN)
            for i in ids
        ]

    def shown(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each id in readable form, with "▁" for a space and "↵" for
        a line feed.

        A token of a byte-level tokenizer may be a part of a character. Its bytes are
        then shown as e.g. "\\xe6".
        """
        return [self._shown(token) for token in self.tokens(ids)]

    def _shown(self, token: str) -> str:
        if (
            self._byte_level
            and token not in self._added
            and all(character in BYTES for character in token)
        ):
            content = bytes(BYTES[character] for character in token)
            token = content.decode(errors="backslashreplace")
        return "".join(
            VISIBLE.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in token
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text up to the first end id.

        Padding and begin ids are dropped, and ids ≥ `size` are skipped. An unknown id
        becomes "<unk>", or the tokenizer's own name for it.
        """
        ids_of_text = []
        for i in map(int, ids):
            if i == self.eos_id:
                break
            if i not in (self.pad_id, self.bos_id):
                ids_of_text.append(i)
        return self._tokenizer.decode(ids_of_text, skip_special_tokens=False)


def _characters(content: Mapping[str, Any]) -> np.ndarray | None:
    """Return the id of every code point, or None if the tokenizer normalizes text or
    has ids for other pieces.
    """
    model = content["model"]
    normalizer = content.get("normalizer") or {"normalizers": []}
    plain = normalizer.get("normalizers") == [] and all(
        token["special"] for token in content["added_tokens"]
    )
    if (
        model.get("type") != "WordLevel"
        or content.get("pre_tokenizer") != ALONE
        or not plain
    ):
        return None
    vocabulary = model["vocab"]
    table = np.full(
        0x110000,
        vocabulary[model["unk_token"]],
        np.uint16 if len(vocabulary) <= 2**16 else np.int32,
    )
    for token, i in vocabulary.items():
        if len(token) == 1:
            table[ord(token)] = i
    return table


def _trained_here(content: Mapping[str, Any]) -> bool:
    """Return True if a tokenizer has the special tokens, normalization and splitting
    of those trained here.
    """
    splits = content.get("pre_tokenizer") or {}
    normalizations = {
        part["type"]
        for part in (content.get("normalizer") or {}).get(
            "normalizers", [{"type": None}]
        )
    }
    added = content["added_tokens"]
    return (
        [token["content"] for token in added[: len(SPECIALS)]] == list(SPECIALS)
        and all(token["special"] for token in added)
        and splits.get("pretokenizers", [splits])[0] in SPLITS
        and normalizations <= {"Lowercase", "Prepend", "Replace"}
    )


def of_bert(content: Mapping[str, Any]) -> bool:
    """Return True if a tokenizer normalizes and splits text as BERT's do, and never
    takes text for an added token.
    """
    parts = [
        (content.get(part) or {}).get("type")
        for part in ("normalizer", "pre_tokenizer")
    ]
    return parts == ["BertNormalizer", "BertPreTokenizer"] and all(
        t["special"] for t in content["added_tokens"]
    )


def dtype_of(tokenizer: Tokenizer) -> np.typing.DTypeLike:
    """Return the type of arrays of ids."""
    return np.uint16 if tokenizer.size <= 2**16 else np.int32


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def _chunks(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the lines in chunks. The progress through them is logged."""
    if 0 < len(lines) <= CHUNK:
        yield lines
        return
    with progress("encoding text", len(lines)) as advance:
        for start in range(0, len(lines), CHUNK):
            yield lines[start : start + CHUNK]
            advance(CHUNK)


def _encode_in_processes(
    tokenizer: Tokenizer, lines: Sequence[str], end: int | None
) -> Iterator[Ragged]:
    """Encode with one process per core, since most of the work is in Python.

    Only a few chunks are in flight.
    """
    count = min(_cores(), MAX_PROCESSES)
    waiting = deque[Future[Ragged]]()
    with workers(count, _start_process, tokenizer.to_json(), end) as submit:
        for chunk in _chunks(lines):
            waiting.append(submit(_encode_chunk, list(chunk)))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


_words: _Words  # set in processes started for encoding


def _start_process(text: str, end: int | None) -> None:
    global _words
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _words = _Words(Tokenizer(text), end)


def _encode_chunk(lines: list[str]) -> Ragged:
    return _words.encode(lines)


class _Words:
    """Cache of the ids of words.

    Words are numbered in the order in which they first occur.

    Number 0 is the line feed, which ends a line. If `_spaced`, every word of a line
    except the first includes the space before it. Otherwise, the ids of a word already
    account for that space.
    """

    def __init__(self, tokenizer: Tokenizer, end: int | None):
        self._tokenizer = tokenizer
        both, first, second = tokenizer.encode_batch(["e e", "e", " e"])
        self._spaced = both == first + second
        self._numbers = {"\n": 0}
        self._ids = Ragged.of([[] if end is None else [end]], dtype_of(tokenizer))
        # True for strings that are not single words; their lines are encoded whole
        self._odd = np.zeros(1, bool)

    def _forget(self) -> None:
        """Drop the latest quarter of the words.

        The words that occurred early are mostly the frequent ones.
        """
        count = REMEMBERED * 3 // 4
        while next(reversed(self._numbers.values())) >= count:
            self._numbers.popitem()
        end = self._ids.offsets[count]
        self._ids = Ragged(self._ids.values[:end], self._ids.lengths[:count])
        self._odd = self._odd[:count]

    def _number(self, words: np.ndarray) -> np.ndarray:
        """Return the numbers of distinct words, and encode the new ones."""
        numbers = np.fromiter(
            map(self._numbers.get, words, itertools.repeat(-1)), np.int64, len(words)
        )
        new = words[numbers < 0].tolist()
        numbers[numbers < 0] = len(self._ids) + np.arange(len(new))
        self._numbers.update(zip(new, itertools.count(len(self._ids))))
        odd = np.array([word.split() != [word.removeprefix(" ")] for word in new], bool)
        single = [word for word, is_odd in zip(new, odd, strict=True) if not is_odd]
        pieces = self._pieces(single)
        lengths = np.zeros(len(new), np.int32)
        lengths[~odd] = pieces.lengths
        self._ids = Ragged.join([self._ids, Ragged(pieces.values, lengths)])
        self._odd = np.concatenate([self._odd, odd])
        return numbers

    def _pieces(self, words: Sequence[str]) -> Ragged:
        """Return the ids of each word.

        Words are encoded in long lines, which is twice as fast, and then separated.
        """
        gap = "" if self._spaced else " "
        first = [
            i
            for i, word in enumerate(words)
            if i % 100 == 0 or (self._spaced and word[0] != " ")
        ]
        lines = [
            gap.join(words[start:end])
            for start, end in itertools.pairwise([*first, len(words)])
        ]
        ids, token_starts, _ = self._tokenizer.spans(lines)
        # Count the gap before a word as part of it, even for the first word of a line,
        # which has none.
        ends = np.cumsum([len(word) + len(gap) for word in words], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]]) if len(words) else ends
        line_starts = np.repeat(starts[first] + len(gap), token_starts.lengths)
        positions = line_starts + token_starts.values
        word_of = np.searchsorted(ends, positions, "right")
        return Ragged(ids.values, np.bincount(word_of, minlength=len(words)))

    def encode(self, lines: Sequence[str]) -> Ragged:
        if len(self._ids) > REMEMBERED:
            self._forget()
        # "\t" stands for lines with the characters that separate words and lines here
        safe = ["\t" if "\0" in line or "\n" in line else line for line in lines]
        text = "\n".join(safe) + "\n"
        if self._spaced:
            text = text.replace(" ", "\0 ").replace("\n", "\0\n\0")
            words, indices = _split(text, "\0")
        else:
            words, indices = _split(text.replace("\n", " \n "), " ")
        numbers = self._number(words)[indices]
        ids_by_number = self._ids
        ends = np.flatnonzero(numbers == 0)
        odd_words = np.flatnonzero(self._odd[numbers])
        odd_lines = np.unique(np.searchsorted(ends, odd_words))
        if len(odd_lines):
            # The whole line takes the number of its first word; the other words go.
            rows = self._tokenizer.encode_batch([lines[i] for i in odd_lines])
            rows_of_ids = Ragged.of(rows, ids_by_number.values.dtype)
            sizes = np.diff(ends, prepend=-1)
            first = (ends - sizes + 1)[odd_lines]
            numbers[first] = len(ids_by_number) + np.arange(len(odd_lines))
            is_odd_line = np.isin(np.arange(len(lines)), odd_lines)
            remains = np.repeat(~is_odd_line, sizes)
            remains[first] = True
            remains[ends] = True
            numbers = numbers[remains]
            ends = np.flatnonzero(numbers == 0)
            ids_by_number = Ragged.join([ids_by_number, rows_of_ids])
        ids = ids_by_number.take(numbers)
        lengths = np.diff(ids.offsets[ends + 1], prepend=0)
        return Ragged(ids.values, lengths.astype(np.int32))


def _split(text: str, gap: str) -> tuple[np.ndarray, np.ndarray]:
    """Split `text`, in which `gap` follows every word.

    Return the distinct words, and for each word its index there.
    """
    import pyarrow.compute  # the import takes 0.1 s

    words = pyarrow.compute.split_pattern(
        pyarrow.array([text], pyarrow.large_string()), gap
    ).values
    encoded = words[:-1].dictionary_encode()
    return encoded.dictionary.to_numpy(zero_copy_only=False), encoded.indices.to_numpy()
