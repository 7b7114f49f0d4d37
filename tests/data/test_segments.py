"""Segments and pairs drawn from documents: what they hold, how often, and that
lengths do not tell pairs apart.
"""

import itertools

import numpy as np
import pytest

from transformer_jax.data.ragged import Ragged
from transformer_jax.data.segments import Documents

ROOM = 23


def corpus(documents, seed=0, most=7, longest=11):
    """Return sentences of numbered tokens, no two of them the same, and the document
    of each sentence.
    """
    draw = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(documents), draw.integers(1, most + 1, documents))
    lengths = draw.integers(1, longest + 1, len(numbers))
    return Ragged(np.arange(lengths.sum()), lengths), numbers


SENTENCES, NUMBERS = corpus(97)
STARTS, ENDS = SENTENCES.offsets[:-1], SENTENCES.offsets[1:]
OF_TOKEN = np.repeat(NUMBERS, SENTENCES.lengths)


def drawn(documents, times, seed=1):
    """Draw from every chunk `times` times. Return (chunk, segments) for each."""
    draw = np.random.default_rng(seed)
    return [
        (i, documents.draw(i, draw))
        for _ in range(times)
        for i in range(len(documents.sizes))
    ]


def near(count, total, probability):
    return abs(count - total * probability) <= 4 * np.sqrt(
        total * probability * (1 - probability)
    )


def test_chunks_are_whole_sentences_and_cover_every_document_once():
    documents = Documents(SENTENCES, NUMBERS, ROOM, pairs=False, short_rate=0.0)
    found = [
        documents.draw(i, np.random.default_rng(0)) for i in range(len(documents.sizes))
    ]
    assert np.concatenate([segments.first for segments in found]).tolist() == list(
        range(len(OF_TOKEN))
    )
    for segments, size in zip(found, documents.sizes, strict=True):
        assert segments.second is None
        assert not segments.follows
        assert len(segments.first) == size <= ROOM
        assert segments.first[0] in STARTS
        assert segments.first[-1] + 1 in ENDS
        assert len(set(OF_TOKEN[segments.first])) == 1
    # A chunk ends where the next sentence does not fit or belongs to another document.
    for one, two in itertools.pairwise(found):
        following = SENTENCES.lengths[np.searchsorted(STARTS, two.first[0])]
        assert (
            len(one.first) + following > ROOM
            or OF_TOKEN[one.first[0]] != OF_TOKEN[two.first[0]]
        )


def test_half_of_the_pairs_follow_and_the_others_come_from_elsewhere():
    documents = Documents(SENTENCES, NUMBERS, ROOM, pairs=True, short_rate=0.0)
    pairs = [
        (i, segments)
        for i, segments in drawn(documents, 31)
        if segments.second is not None
    ]
    assert {i for i, _ in pairs} == set(np.flatnonzero(documents.paired))
    assert near(sum(segments.follows for _, segments in pairs), len(pairs), 0.5)
    for chunk, (first, second, follows) in pairs:
        assert len(first) + len(second) <= documents.sizes[chunk]
        assert first[0] in STARTS
        assert first[-1] + 1 in ENDS
        assert second[0] in STARTS
        assert len(first) > 0 < len(second)
        for segment in (first, second):
            np.testing.assert_array_equal(np.diff(segment), 1)
        assert follows == (first[-1] + 1 == second[0])
        assert follows == (OF_TOKEN[first[0]] == OF_TOKEN[second[0]])
        # Neither kind of second segment begins a document, or comes from a document of
        # one sentence.
        assert second[0] not in STARTS[np.unique(NUMBERS, return_index=True)[1]]


def test_neither_lengths_nor_ends_tell_whether_a_segment_follows():
    """A corpus of random lengths has no other signal.

    Compare the distributions, and classify by them.
    """
    sentences, numbers = corpus(1009, seed=3, most=11, longest=29)
    documents = Documents(sentences, numbers, 61, pairs=True, short_rate=0.1)
    pairs = [
        segments for _, segments in drawn(documents, 7) if segments.second is not None
    ]
    follows = np.array([segments.follows for segments in pairs])
    a, b = (np.array([len(segments[i]) for segments in pairs]) for i in (0, 1))
    # the last token of each document
    last = sentences.offsets[np.flatnonzero(np.diff(numbers, append=-1)) + 1] - 1
    ends = np.isin([segments.second[-1] for segments in pairs], last)
    for x in (a, b, a + b, ends):
        one, other = x[follows], x[~follows]
        error = np.sqrt(one.var() / len(one) + other.var() / len(other))
        assert abs(one.mean() - other.mean()) < 4 * error
    # The more frequent answer for each (length of a, length of b), counted on one half
    # and tested on the other.
    half = len(pairs) // 2
    votes = np.zeros((62, 62))
    np.add.at(votes, (a[:half], b[:half]), np.where(follows[:half], 1, -1))
    right = ((votes[a[half:], b[half:]] > 0) == follows[half:]).sum()
    assert near(right, len(pairs) - half, 0.5)


def test_one_of_ten_examples_is_shortened_to_a_random_length():
    for pairs in (True, False):
        documents = Documents(SENTENCES, NUMBERS, ROOM, pairs, short_rate=0.1)
        chunks = np.flatnonzero(documents.paired == pairs)
        found = [
            (i, segments)
            for i, segments in drawn(documents, 41)
            if i in chunks and documents.sizes[i] > 2
        ]
        sizes = np.array(
            [
                len(segments.first) + len(segments.second if pairs else ())
                for _, segments in found
            ]
        )
        # A random length of 2 … ROOM shortens an example of n tokens if it is below n.
        expected = [0.1 * (documents.sizes[i] - 2) / (ROOM - 1) for i, _ in found]
        shortened = np.array(
            [
                size < documents.sizes[i]
                for (i, s), size in zip(found, sizes, strict=True)
            ]
        )
        if pairs:  # a segment from elsewhere may also be shorter
            whole = np.array([segments.follows for _, segments in found])
            shortened, expected = shortened[whole], np.array(expected)[whole]
        assert near(shortened.sum(), len(shortened), np.mean(expected))
        assert sizes.min() == 2


def test_a_shortened_segment_loses_tokens_at_both_ends():
    documents = Documents(
        Ragged.of([range(20)]), np.zeros(1), ROOM, pairs=False, short_rate=1.0
    )
    draw = np.random.default_rng(0)
    found = [documents.draw(0, draw).first for _ in range(200)]
    assert all((np.diff(segment) == 1).all() for segment in found)
    cut = [segment for segment in found if len(segment) < 20]
    assert {2} < {len(segment) for segment in cut}
    assert any(segment[0] > 0 and segment[-1] < 19 for segment in cut)
    assert near(
        sum(int(segment[0]) for segment in cut),
        sum(20 - len(segment) for segment in cut),
        0.5,
    )


def test_a_long_sentence_is_cut_and_an_empty_one_left_out():
    sentences = Ragged.of([[], range(50), [101, 102], [], [103], [201], [202, 203]])
    documents = Documents(
        sentences, np.array([1, 1, 1, 1, 1, 7, 7]), 5, pairs=True, short_rate=0.0
    )
    assert documents.sizes.tolist() == [5, 3, 3]
    assert documents.paired.tolist() == [False, True, True]
    found = drawn(documents, 50)
    assert {(tuple(s.first.tolist()), s.second) for i, s in found if i == 0} == {
        ((0, 1, 2, 3, 4), None)
    }
    # A segment that is longer than the one it stands for is cut. One that is shorter
    # stays as it is.
    expected = {
        (1, (103,), True),
        (1, (202,), False),
        (2, (202, 203), True),
        (2, (103,), False),
    }
    assert {
        (i, tuple(s.second.tolist()), s.follows) for i, s in found if i > 0
    } == expected


@pytest.mark.parametrize(
    ("sentences", "numbers", "message"),
    [
        (
            [[1], [2], [3]],
            [0, 1, 2],
            (
                "0 of 3 documents have two consecutive "
                "sentences of at most 5 tokens together"
            ),
        ),
        (
            [[1], [2], [3]],
            [0, 0, 1],
            "1 of 2 documents have .* separate documents by blank lines",
        ),
        (
            [[1], [2], [3] * 3, [4] * 3],
            [0, 0, 1, 1],
            r"1 of 2 .*raise data\.max_length, or set masking\.next_sentence",
        ),
    ],
)
def test_too_few_documents_for_pairs(sentences, numbers, message):
    with pytest.raises(ValueError, match=message):
        Documents(
            Ragged.of(sentences), np.array(numbers), 5, pairs=True, short_rate=0.0
        )
    assert not Documents(
        Ragged.of(sentences), np.array(numbers), 5, pairs=False, short_rate=0.0
    ).paired.any()
