"""Tagged sentences: the subwords of each word, and rows of whole words."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_jax import fields
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.text import TextData
from transformer_jax.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

PREFIXES = {"iob2": "BI", "bioes": "BIES"}  # of the tags of an entity, e.g. B-PER


@dataclasses.dataclass(frozen=True)
class TaggingData(TextData):
    """Data from sentences {split}.conll: a word per line with its tag, and a blank line
    between sentences.

    types: the types of entities, e.g. "PER".
    scheme: "iob2", where B begins an entity and I continues it; or "bioes", where E
        ends it and S is a single word.
    """

    types: tuple[str, ...] = fields.outputs(("PER", "ORG", "LOC", "MISC"))
    scheme: str = fields.outputs("iob2")

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, e.g. O, B-PER, I-PER. The number of a tag is its place."""
        return (
            "O",
            *(
                f"{prefix}-{kind}"
                for kind in self.types
                for prefix in PREFIXES[self.scheme]
            ),
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.scheme not in PREFIXES:
            yield (
                "scheme",
                (
                    f"must be one of {', '.join(PREFIXES)}; "
                    "convert the tags if they have another scheme"
                ),
            )
        if (
            not self.types
            or len(set(self.types)) != len(self.types)
            or not all(self.types)
        ):
            yield "types", "must be one or more different types, e.g. ('PER', 'LOC')"
        if self.max_length < 3:
            yield "max_length", "must be at least 3: one subword and two special tokens"


def subwords(
    tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], unknown: int
) -> Ragged:
    """Return the ids of each word of all sentences, one word after another.

    The ids of a sentence are those of its words separated by single spaces. A word
    without an id, e.g. one of control characters only, gets the id `unknown`, so that
    every word has a first subword.
    """
    words = [word for sentence in sentences for word in sentence]
    lines = [" ".join(sentence) for sentence in sentences if sentence]
    ids, _, ends = tokenizer.spans(lines)
    # positions in all lines, one after another, each with a space at its end
    line_starts = np.cumsum([0, *(len(line) + 1 for line in lines)])[:-1]
    last_characters = np.repeat(line_starts, ends.lengths) + ends.values - 1
    # the space after each word; it belongs to the next word
    gaps = np.cumsum([len(word) + 1 for word in words]) - 1
    word_of = np.searchsorted(gaps, last_characters, "right")
    counts = np.bincount(word_of, minlength=len(words))
    pieces = Ragged(ids.values, counts)
    empty = np.flatnonzero(counts == 0)
    values = np.insert(pieces.values, pieces.offsets[empty], unknown)
    return Ragged(values, np.maximum(counts, 1))


def whole_words(sizes: Ragged, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide sentences into rows of whole words, each with as many words as fit.

    Args:
        sizes: the number of subwords of each word of each sentence, at most `room`.
        room: most subwords of a row.

    Returns:
        (rows,) the number of words of each row, and (rows,) its sentence, ascending. A
        sentence has at least one row.
    """
    counts = list[int]()
    owners = list[int]()
    for number in range(len(sizes)):
        count = total = 0
        for size in sizes[number].tolist():
            if total + size > room:
                counts.append(count)
                owners.append(number)
                count = total = 0
            count = count + 1
            total = total + size
        counts.append(count)
        owners.append(number)
    return np.array(counts, np.int64), np.array(owners, np.int64)


def word_rows(
    pieces: Ragged,
    counts: Sequence[int],
    *,
    limit: int,
    begin: int,
    end: int,
    source: str,
) -> tuple[Ragged, Ragged, np.ndarray]:
    """Lay out sentences as [CLS] subwords [SEP] (Devlin et al. 2019, Section 5.3).

    A sentence that is too long is continued in further rows, as a warning says. A word
    that does not fit a row alone keeps its first subwords.

    Args:
        pieces: the ids of each word, from `subwords`.
        counts: the number of words of each sentence.
        limit: most tokens of a row, including special tokens; at least 3.
        begin: id of [CLS].
        end: id of [SEP].
        source: name of the source of the sentences, for the warning.

    Returns:
        The rows; 1 for the first subword of each word and 0 for other tokens, in the
        same layout; and (rows,) the sentence of each row.
    """
    room = limit - 2
    pieces = pieces.first(room)
    sizes = Ragged(pieces.lengths, np.asarray(counts, np.int64))
    words, owners = whole_words(sizes, room)
    is_continued = np.diff(owners) == 0
    split = np.unique(owners[1:][is_continued])
    if len(split):
        log.warning(
            "%s: %d of %d sentences divided into rows of data.max_length = %d tokens, "
            "the first is sentence %d",
            source,
            len(split),
            len(counts),
            limit,
            split[0] + 1,
        )
    row_offsets = pieces.offsets[np.cumsum([0, *words])]
    lengths = np.diff(row_offsets).astype(np.int32)
    first = np.zeros_like(pieces.values)
    first[pieces.offsets[:-1]] = 1

    def framed(values: np.ndarray, before: int, after: int) -> Ragged:
        n = len(lengths)
        befores = Ragged.repeated(before, n)
        afters = Ragged.repeated(after, n)
        return Ragged.beside([befores, Ragged(values, lengths), afters])

    return framed(pieces.values, begin, end), framed(first, 0, 0), owners
