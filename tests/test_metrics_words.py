"""The word error rate."""

import functools
import itertools

import numpy as np
import pytest

from transformer_jax.metrics import edits, word_error_rate


@functools.cache
def fewest(hypothesis, reference):
    """Return the least (edits, insertions + deletions) by trying every last step."""
    if not hypothesis or not reference:
        left = len(hypothesis) + len(reference)
        return left, left
    wrong = hypothesis[-1] != reference[-1]
    aligned = fewest(hypothesis[:-1], reference[:-1])
    inserted = fewest(hypothesis[:-1], reference)
    deleted = fewest(hypothesis, reference[:-1])
    return min(
        (aligned[0] + wrong, aligned[1]),
        (inserted[0] + 1, inserted[1] + 1),
        (deleted[0] + 1, deleted[1] + 1),
    )


def test_edits_are_the_fewest_of_all_alignments():
    """For all pairs of texts of up to three words of two kinds."""
    texts = [
        text for length in range(4) for text in itertools.product("ab", repeat=length)
    ]
    for hypothesis, reference in itertools.product(texts, texts):
        found = edits(hypothesis, reference)
        count, indels = fewest(hypothesis, reference)
        assert sum(found) == count
        assert found.insertions + found.deletions == indels
        assert found.insertions - found.deletions == len(hypothesis) - len(reference)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("one two three", "one two three", (0, 0, 0)),
        ("one four three", "one two three", (1, 0, 0)),
        ("one three", "one two three", (0, 1, 0)),
        ("one two two three", "one two three", (0, 0, 1)),
        ("", "one two", (0, 2, 0)),
        ("one two", "", (0, 0, 2)),
        ("two one", "one two", (2, 0, 0)),  # not one insertion and one deletion
    ],
)
def test_an_edit_has_its_name(hypothesis, reference, expected):
    assert edits(hypothesis.split(), reference.split()) == expected


def test_the_rate_is_of_all_words_and_not_the_mean_of_the_texts():
    scores = word_error_rate(["a b c d", "x", ""], ["a b c d", "y z", "u v"])
    assert scores == pytest.approx(
        {
            "word_error_rate": 4 / 8,
            "substitutions": 1 / 8,
            "deletions": 3 / 8,
            "insertions": 0,
        }
    )
    assert word_error_rate(["a b c"], ["x"])["word_error_rate"] == 3


def test_the_rate_is_that_of_jiwer():
    jiwer = pytest.importorskip("jiwer", reason="jiwer is not installed")
    draw = np.random.default_rng(0)

    def texts(least):
        lengths = draw.integers(least, 9, 50)
        return [" ".join(draw.choice([*"abcd"], length)) for length in lengths]

    references = texts(1)
    hypotheses = texts(0)
    expected = jiwer.process_words(references, hypotheses)
    scores = word_error_rate(hypotheses, references)
    assert scores["word_error_rate"] == pytest.approx(expected.wer)


def test_texts_that_do_not_match_and_references_without_a_word_are_refused():
    with pytest.raises(ValueError, match="1 predictions for 2 references"):
        word_error_rate(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="2 references have no word"):
        word_error_rate(["a", "b"], ["", " "])
