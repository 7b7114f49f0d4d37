"""N-grams counted in sorted arrays against counts in dictionaries."""

import random
from collections import Counter

import numpy as np

from transformer_jax.baselines.ngrams import count_ngrams, find_ngrams
from transformer_jax.data.ragged import Ragged

SIZE, ORDER = 6, 4


def drawn(seed, count):
    draw = random.Random(seed)
    return [draw.choices(range(SIZE), k=draw.randint(0, 9)) for _ in range(count)]


def grams_of(tables):
    """Return the k-grams of each table as tuples."""
    grams = [[(i,) for i in range(SIZE)]]
    for table in tables[1:]:
        prefixes, last = np.divmod(table.keys, SIZE)
        pairs = zip(prefixes, last.tolist(), strict=True)
        grams.append([(*grams[-1][row], token) for row, token in pairs])
    return grams


def test_tables_hold_every_ngram_with_its_count_and_suffix():
    texts = drawn(0, 40)
    tables = count_ngrams(Ragged.of(texts), ORDER, SIZE)
    grams = grams_of(tables)
    for k in range(1, ORDER + 1):
        table = tables[k - 1]
        spans = [
            (start, tuple(text[start : start + k]))
            for text in texts
            for start in range(len(text) - k + 1)
        ]
        if k == 1:  # the first token of a text is given
            spans = [(start, gram) for start, gram in spans if start]
        counts = Counter(gram for _, gram in spans)
        found = dict(zip(grams[k - 1], table.counts.tolist(), strict=True))
        assert {gram: n for gram, n in found.items() if n} == counts
        assert (np.diff(table.keys) > 0).all()
        if k > 1:
            initial = {gram for start, gram in spans if not start}
            ours = {grams[k - 1][i] for i in np.flatnonzero(table.initial)}
            assert ours == initial
            for gram, suffix in zip(grams[k - 1], table.suffixes, strict=True):
                assert grams[k - 2][suffix] == gram[1:]


def test_ngrams_are_found_where_they_are_and_nowhere_else():
    tables = count_ngrams(Ragged.of(drawn(0, 12)), ORDER, SIZE)
    grams = grams_of(tables)
    others = drawn(1, 30)
    tokens = [(i, text) for text in others for i in range(len(text))]
    keys = [table.keys for table in tables]
    seen = 0
    for k, places in enumerate(find_ngrams(keys, Ragged.of(others), SIZE), 2):
        inside = [at for at, (i, _) in enumerate(tokens) if i >= k - 1]
        assert places.ends.tolist() == inside
        for end, context, row in zip(*places, strict=True):
            i, text = tokens[end]
            gram = tuple(text[i - k + 1 : i + 1])
            for known, at, part in (
                (grams[k - 1], row, gram),
                (grams[k - 2], context, gram[:-1]),
            ):
                assert (at >= 0) == (part in known)
                if at >= 0:
                    assert known[at] == part
            seen += row < 0
    assert seen
