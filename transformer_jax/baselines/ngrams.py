"""Count the n-grams of texts, and find those of other texts, in sorted arrays.

The k-grams of a text are rows of the table of order k. A k-gram is stored as one
integer, the row of its first k - 1 tokens in the table of order k - 1 times the size of
the vocabulary, plus its last token. So a table of any order is sorted and searched like
an array of numbers, and needs no Python object per n-gram.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transformer_jax.data.ragged import Ragged, ranges


class Table(NamedTuple):
    """The distinct k-grams of texts.

    keys: (n,) the k-grams as integers, ascending.
    counts: (n,) the number of their occurrences.
    suffixes: (n,) the row of the last k - 1 tokens in the table of order k - 1.
    initial: (n,) True for a k-gram that a text begins with, False for all single
        tokens.
    """

    keys: np.ndarray
    counts: np.ndarray
    suffixes: np.ndarray
    initial: np.ndarray


def count_ngrams(texts: Ragged, order: int, vocab_size: int) -> list[Table]:
    """Return the tables of the orders 1 to `order`.

    That of order 1 has a row for each id of the vocabulary, which may have a count of
    0; the first token of each text, its begin token, does not count there. N-grams do
    not span several texts. Memory is about 100 bytes per token while
    counting, and at most 25 per token and order for the tables.
    """
    tokens = texts.values.astype(np.int64)
    place = ranges(0, texts.lengths)
    room = np.repeat(texts.lengths, texts.lengths) - place  # tokens up to the end
    ids = np.arange(vocab_size)
    # the first token of a text is given
    occurrences = np.bincount(tokens[place > 0], minlength=vocab_size)
    tables = [Table(ids, occurrences, np.zeros_like(ids), np.zeros(vocab_size, bool))]
    rows = tokens  # of the (k - 1)-gram that starts at each position
    for k in range(2, order + 1):
        starts = np.flatnonzero(room >= k)
        keys, first, inverse, counts = np.unique(
            rows[starts] * vocab_size + tokens[starts + k - 1],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        suffixes = rows[starts[first] + 1]
        initial = np.zeros(len(keys), bool)
        initial[inverse[place[starts] == 0]] = True
        tables.append(Table(keys, counts, suffixes, initial))
        rows = np.full(len(tokens), -1)
        rows[starts] = inverse
    return tables


class Places(NamedTuple):
    """The places of the k-grams of texts in a table of order k.

    Entries are those of the k-grams, in the order of the text.

    ends: the position of the last token.
    contexts: the row of the first k - 1 tokens in the table of order k - 1, or -1 if
        they are not in it.
    rows: the row of the k-gram, or -1 if it is not in the table.
    """

    ends: np.ndarray
    contexts: np.ndarray
    rows: np.ndarray


def find_ngrams(
    keys: list[np.ndarray], texts: Ragged, vocab_size: int
) -> Iterator[Places]:
    """Yield the places of the k-grams of `texts`, for k = 2, 3, …

    `keys` are the sorted keys of the tables, from order 1.
    """
    tokens = texts.values.astype(np.int64)
    room = np.repeat(texts.lengths, texts.lengths) - ranges(0, texts.lengths)
    rows = tokens
    for k, known in enumerate(keys[1:], 2):
        starts = np.flatnonzero(room >= k)
        contexts = rows[starts]
        wanted = contexts * vocab_size + tokens[starts + k - 1]
        found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        is_known = known[found] == wanted  # negative after an unknown context
        places = Places(starts + k - 1, contexts, np.where(is_known, found, -1))
        yield places
        rows = np.full(len(tokens), -1)
        rows[starts] = places.rows
