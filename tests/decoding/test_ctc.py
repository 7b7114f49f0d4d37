"""Decoding of CTC, compared with all alignments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import labellings
from transformer_jax.decoding import (
    IMPOSSIBLE,
    beam_search,
    certain,
    ctc,
    greedy,
    sample,
)

S, V, T, BLANK, PAD, BOS = 4, 5, 5, 2, 0, 1
LENGTHS = np.array([4, 3, 0])
ROWS = len(LENGTHS)
# Labels are 3 and 4. Padding and the begin of a text are improbable.
LOGITS = np.random.default_rng(3).normal(size=(ROWS, S, V)).astype(np.float32)
LOGITS[:, :, [PAD, BOS]] -= 30
VALID = np.arange(S) < LENGTHS[:, None]
SHARES = [
    labellings.probabilities(LOGITS[row, :length], BLANK)
    for row, length in enumerate(LENGTHS)
]
SEARCH = {"bos_id": BOS, "eos_id": BLANK, "pad_id": PAD, "max_length": T}
RANKING = {"length_penalty": 0.0, "length_penalty_form": "wu"}


def posteriors():
    return ctc.log_probabilities(jnp.asarray(LOGITS), jnp.asarray(VALID), BLANK)


def labels_of(tokens):
    """Return the labels before the end."""
    tokens = tokens.tolist()
    return tuple(tokens[: tokens.index(BLANK)])


def ranked(row):
    """Return the labellings of a row, best first."""
    return sorted(SHARES[row].items(), key=lambda item: -item[1])


@pytest.fixture(scope="module")
def hypotheses():
    """The search with so many beams that no prefix is given up."""

    @jax.jit
    def search():
        step, empty = ctc.prefixes(posteriors(), BLANK)
        options = {"batch_size": ROWS, "beam_size": 32, **RANKING}
        return beam_search(step, empty, **options, **SEARCH)

    return search()


def test_a_search_finds_the_most_probable_labellings(hypotheses):
    for row, count in enumerate((8, 6, 1)):
        for place, (labels, share) in enumerate(ranked(row)[:count]):
            assert labels_of(hypotheses.tokens[row, place]) == labels
            assert hypotheses.scores[row, place] == pytest.approx(
                np.log(share), rel=1e-4, abs=1e-5
            )


def test_the_best_labelling_may_differ_from_that_of_the_best_alignment():
    """So the search is worth its price."""
    logits = np.log([[[0.4, 0.6], [0.4, 0.6]]]).astype(np.float32)
    everywhere = jnp.ones((1, 2), bool)
    scores = ctc.log_probabilities(jnp.asarray(logits), everywhere, 1)
    assert labellings.probabilities(logits[0], 1) == pytest.approx(
        {(): 0.36, (0,): 0.64}
    )
    path = ctc.best_path(scores, 3, 1)
    assert path.tokens.tolist() == [[[1, 1, 1]]]  # no label
    assert path.scores[0, 0] == pytest.approx(np.log(0.36), rel=1e-5)
    step, empty = ctc.prefixes(scores, 1)
    options = {"bos_id": 1, "eos_id": 1, "pad_id": None, "max_length": 3}
    options |= {"batch_size": 1}
    found = jax.jit(lambda: greedy(step, empty, **options))()
    assert found.tokens[0, 0, 0] == 0
    assert found.scores[0, 0] == pytest.approx(np.log(0.64), rel=1e-5)


def test_the_best_path_is_that_of_the_most_probable_alignment():
    path = jax.jit(ctc.best_path, static_argnums=(1, 2))(posteriors(), T, BLANK)
    assert path.tokens.shape == (ROWS, 1, T)
    for row, length in enumerate(LENGTHS):
        best = tuple(LOGITS[row, :length].argmax(axis=1).tolist())
        assert labels_of(path.tokens[row, 0]) == labellings.merged(best, BLANK)
        shares = jax.nn.log_softmax(LOGITS[row, :length])
        expected = float(shares.max(axis=1).sum())
        assert path.scores[row, 0] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_labels_beyond_the_largest_length_are_cut():
    scores = jnp.log(jnp.eye(3)[jnp.array([[0, 1, 0, 1, 2]])] + 1e-9)
    path = ctc.best_path(scores, 3, 2)
    assert path.tokens.tolist() == [[[0, 1, 0]]]


def test_the_next_label_has_the_probability_of_all_labellings_that_begin_so():
    step, prefix = ctc.prefixes(posteriors(), BLANK)
    labels = [3, 4, 3]
    for count, newest in enumerate([BOS, *labels[:2]]):
        logits, prefix = jax.jit(step)(prefix, jnp.full(ROWS, newest), count)
        given = tuple(labels[:count])
        for label in (3, 4):
            begin = (*given, label)
            expected = sum(
                p for text, p in SHARES[0].items() if text[: count + 1] == begin
            )
            assert np.exp(logits[0, label]) == pytest.approx(expected, rel=1e-4)
        whole = SHARES[0].get(given, 0)
        assert np.exp(logits[0, BLANK]) == pytest.approx(whole, rel=1e-4)


WEIGHT = 0.4
# The scores of a language model of three sources after two labels. It needs its cache:
# the source, and the label before the newest.
LANGUAGE = np.random.default_rng(4).normal(size=(ROWS, V, V, V)).astype(np.float32)
LANGUAGE[..., [PAD, BOS]] -= 30


def decoder(cache, newest, position):
    source, previous = cache
    return jnp.asarray(LANGUAGE)[source, previous, newest], (source, newest)


def joint(beams):
    start = (jnp.arange(ROWS), jnp.full(ROWS, BOS))
    search = ctc.prefixes(posteriors(), BLANK)
    return ctc.joint((decoder, start), search, WEIGHT, beams=beams, unused=BOS)


def weighted(row, labels):
    """Return the weighted sum of both log-probabilities of a labelling."""
    read = [BOS, BOS, *labels]
    scores = jax.nn.log_softmax(LANGUAGE[row])
    written = [*labels, BLANK]
    of_language = sum(
        float(scores[read[i], read[i + 1], label]) for i, label in enumerate(written)
    )
    return WEIGHT * np.log(SHARES[row][labels]) + (1 - WEIGHT) * of_language


def test_a_joint_search_ranks_by_the_weighted_sum_of_both_scores():
    @jax.jit
    def search():
        options = {"batch_size": ROWS, "beam_size": 32, **RANKING}
        return beam_search(*joint(beams=32), **options, **SEARCH)

    found = search()
    for row in range(ROWS):
        expected = {
            labels: weighted(row, labels)
            for labels in SHARES[row]
            if set(labels) <= {3, 4}
        }
        best = sorted(expected, key=lambda labels: -expected[labels])[:4]
        for place, labels in enumerate(best):
            assert labels_of(found.tokens[row, place]) == labels
            assert found.scores[row, place] == pytest.approx(
                expected[labels], rel=1e-4, abs=1e-5
            )


def test_a_joint_sample_has_the_weighted_sum_of_both_scores():
    @jax.jit
    def draw():
        return sample(
            *joint(beams=1),
            key=jax.random.key(0),
            row_ids=jnp.arange(ROWS),
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_samples=6,
            batch_size=ROWS,
            **SEARCH,
        )

    drawn = draw()
    for row in range(ROWS):
        for tokens, score in zip(drawn.tokens[row], drawn.scores[row], strict=True):
            expected = weighted(row, labels_of(tokens))
            assert score == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_two_steps_that_are_certain_leave_nothing_else_possible():
    def ended(cache, newest, position):
        return jnp.tile(certain(BLANK, V), (len(newest), 1)), cache

    nothing = ctc.log_probabilities(jnp.zeros((1, S, V)), jnp.zeros((1, S), bool), 2)
    search = ctc.prefixes(nothing, BLANK)
    step, cache = ctc.joint((ended, jnp.zeros(1)), search, 0.5, beams=1, unused=BOS)
    logits, _ = step(cache, jnp.array([BOS]), jnp.int32(0))
    expected = [[IMPOSSIBLE, IMPOSSIBLE, 0, IMPOSSIBLE, IMPOSSIBLE]]
    np.testing.assert_array_equal(logits, np.float32(expected))
