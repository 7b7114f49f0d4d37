"""Beam search against a search through all sequences, in NumPy float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.searching import (
    BOS,
    EOS,
    PAD,
    PRIME,
    beams,
    hashed,
    log_softmax,
    markov,
    padded,
    penalty,
    prefix_logits_hashed,
    prefix_logits_markov,
    random_logits,
    search,
)
from transformer_jax import decoding
from transformer_jax.decoding import lp

FORMS = [
    ("wu", 0.0),
    ("wu", 0.6),
    ("wu", 2.0),
    ("power", 0.7),
    ("power", 1.0),
    ("power", 1.5),
]


def brute_force(logits, vocabulary, max_length, alpha, form, ranks_cut=False):
    """Return [(score, log P, tokens)], best first: all that end within max_length,
    then all that are cut off there, or both together with `ranks_cut`.
    """
    ended, cut_off = [], []

    def grow(total, y):
        log_probabilities = log_softmax(logits([BOS, *y]))
        for token in set(range(vocabulary)) - {PAD, BOS}:
            longer, length = (*y, token), len(y) + 1
            grown = total + log_probabilities[token]
            if token == EOS or length == max_length:
                kind = ended if token == EOS else cut_off
                kind.append((grown / penalty(length, alpha, form), grown, longer))
            else:
                grow(grown, longer)

    grow(0.0, ())
    if ranks_cut:
        return sorted(ended + cut_off, reverse=True)
    return sorted(ended, reverse=True) + sorted(cut_off, reverse=True)


def assert_is_best(found, row, expected, max_length):
    """Assert that the K outputs are the first K expected, in order, with their scores.

    Ties may be in any order.
    """
    K = found.tokens.shape[1]
    known = {
        tuple(padded(y, max_length)): (score, total) for score, total, y in expected
    }
    sequences = [tuple(y) for y in found.tokens[row].tolist()]
    assert len(set(sequences)) == K
    numbers = np.stack([found.scores[row], found.log_probabilities[row]], axis=1)
    np.testing.assert_allclose(
        numbers, [known[y] for y in sequences], rtol=2e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        found.scores[row], [e[0] for e in expected[:K]], rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize(("form", "alpha"), FORMS)
def test_wide_beam_is_brute_force_markov(form, alpha):
    tables = random_logits(7, 3, 7, 7)
    found = search(markov(tables), **beams(4**4, 4, alpha, form))
    for row, table in enumerate(tables):
        assert_is_best(
            found, row, brute_force(prefix_logits_markov(table), 7, 4, alpha, form), 4
        )


@pytest.mark.parametrize(("form", "alpha"), FORMS[::2])
def test_what_is_cut_off_may_rank_among_what_has_ended(form, alpha):
    tables = random_logits(7, 3, 7, 7)
    options = beams(4**4, 4, alpha, form) | {"ranks_cut": True}
    found = search(markov(tables), **options)
    for row, table in enumerate(tables):
        logits = prefix_logits_markov(table)
        expected = brute_force(logits, 7, 4, alpha, form, ranks_cut=True)
        assert_is_best(found, row, expected, 4)
        assert {EOS in tokens for _, _, tokens in expected[:20]} == {True, False}


@pytest.mark.parametrize(("form", "alpha"), FORMS[1::2])
def test_wide_beam_is_brute_force_whole_prefix(form, alpha):
    table, multipliers = random_logits(8, PRIME, 5), [3, 5]
    found = search(hashed(table, multipliers), **beams(2**7, 7, alpha, form))
    for row, multiplier in enumerate(multipliers):
        assert_is_best(
            found,
            row,
            brute_force(prefix_logits_hashed(table, multiplier), 5, 7, alpha, form),
            7,
        )


def reference_beam(logits, vocabulary, max_length, K, alpha, form, rule="exact"):
    """Run the narrow beam in plain Python.

    The rule "exact" has no bound, so it always runs to max_length.
    """
    alive, finished = [(0.0, (BOS,))], []
    for length in range(1, max_length + 1):
        candidates = []
        for total, prefix in alive:
            added = log_softmax(logits(list(prefix)))
            candidates += [
                (total + added[v], (*prefix, v))
                for v in range(vocabulary)
                if v not in (PAD, BOS)
            ]
        candidates = sorted(candidates, reverse=True)[: 2 * K]
        may_end = [
            (total, y)
            for total, y in candidates[: 2 * K if rule == "exact" else K]
            if y[-1] == EOS
        ]
        finished += [
            (total / penalty(length, alpha, form), total, y[1:]) for total, y in may_end
        ]
        finished = sorted(finished, reverse=True)[:K]
        alive = [(total, y) for total, y in candidates if y[-1] != EOS][:K]
        if len(finished) == K and (
            rule == "hf_true"
            or (
                rule == "hf_false"
                and alive[0][0] / penalty(length, alpha, form) <= finished[-1][0]
            )
        ):
            break
    return finished + [
        (t / penalty(max_length, alpha, form), t, y[1:]) for t, y in alive
    ]


@pytest.mark.parametrize(
    ("beam_size", "form", "alpha"),
    [
        (1, "wu", 0.6),
        (2, "power", 1.0),
        (3, "wu", 0.0),
        (5, "wu", 0.6),
        (5, "power", 1.5),
    ],
)
def test_narrow_beam_is_the_reference_that_never_stops(beam_size, form, alpha):
    """Stopping early changes no row, and the cache follows its beam."""
    table, multipliers = random_logits(10, PRIME, 13), [3, 5, 7, 11, 13, 17, 19]
    table[:, EOS] += np.linspace(-1, 3, PRIME, dtype=np.float32)
    table[:, [PAD, BOS]] += 5  # PAD and BOS must not be among the 2K candidates
    found = search(hashed(table, multipliers), **beams(beam_size, 11, alpha, form))
    for row, multiplier in enumerate(multipliers):
        logits = prefix_logits_hashed(table, multiplier)
        assert_is_best(
            found, row, reference_beam(logits, 13, 11, beam_size, alpha, form), 11
        )
    for n_best in {1, beam_size - 1} - {0}:
        fewer = search(
            hashed(table, multipliers),
            **beams(beam_size, 11, alpha, form),
            n_best=n_best,
        )
        for one, other in zip(fewer, found, strict=True):
            np.testing.assert_array_equal(one[:, :n_best], other[:, :n_best])


@pytest.mark.parametrize(
    ("rule", "alpha"), [("hf_never", 0.0), ("hf_false", 1.5), ("hf_true", 1.5)]
)
def test_stopping_rules_of_hugging_face(rule, alpha):
    """Each rule gives the result of its reference.

    For some row, that is another than the one of "exact".
    """
    table, multipliers = random_logits(10, PRIME, 13), [3, 5, 7, 11, 13, 17, 19]
    table[:, EOS] += np.linspace(-1, 3, PRIME, dtype=np.float32)
    arguments, differ = beams(3, 11, alpha, "power"), []
    found = search(hashed(table, multipliers), **arguments, stopping_rule=rule)
    for row, multiplier in enumerate(multipliers):
        run = functools.partial(
            reference_beam,
            prefix_logits_hashed(table, multiplier),
            13,
            11,
            3,
            alpha,
            "power",
        )
        assert_is_best(found, row, run(rule), 11)
        differ.append(run(rule)[:3] != run("exact")[:3])
    assert any(differ)
    fewer = search(
        hashed(table, multipliers), **arguments, stopping_rule=rule, n_best=1
    )
    np.testing.assert_array_equal(fewer.tokens, found.tokens)


def test_an_unknown_stopping_rule_is_refused():
    with pytest.raises(
        ValueError, match=r"stopping_rule='soon': must be one of .*; use 'exact'"
    ):
        search(markov(random_logits(20, 3, 7, 7)), **beams(2, 3), stopping_rule="soon")


def test_beam_of_one_without_penalty_is_greedy_where_eos_is_never_second():
    """EOS is certain after word 3 and impossible elsewhere, so no shorter output
    competes.
    """
    tables = random_logits(12, 5, 7, 7)
    tables[:, :, EOS] = -80
    tables[:, 3, EOS] = 80
    one, best = (
        search(markov(tables), **beams(1, 11, alpha=0.0)),
        search(markov(tables), max_length=11),
    )
    assert (best.tokens == 3).any()
    np.testing.assert_array_equal(one.tokens, best.tokens)
    np.testing.assert_allclose(one.scores, best.scores, rtol=1e-6)


def test_cut_off_at_max_length():
    """No sequence ends.

    The outputs are the K best sequences of T tokens, scored with lp(T).
    """
    table = random_logits(14, PRIME, 5)
    table[:, EOS] = -np.inf
    found = search(hashed(table, [3]), **beams(2**5, 5, 0.6))
    expected = brute_force(prefix_logits_hashed(table, 3), 5, 5, 0.6, "wu")
    assert_is_best(found, 0, [e for e in expected if EOS not in e[2]], 5)
    best = search(hashed(table, [3]), max_length=5)
    assert best.tokens.shape == (1, 1, 5)
    assert not np.isin(best.tokens, [PAD, BOS, EOS]).any()


def test_finished_come_before_better_ones_that_were_cut_off():
    table = np.full((1, 5, 5), -np.inf, np.float32)
    table[0, :, 3] = 5.0
    table[0, :, 4] = -3.0
    table[0, 4, EOS] = 9.0
    found = search(markov(table), **beams(3, 2, 0.0))
    assert found.tokens[0].tolist() == [[4, EOS], [3, 3], [3, 4]]
    assert found.scores[0, 0] < found.scores[0, 1]


def test_places_that_nothing_is_left_for():
    """One word and two positions allow three outputs, whatever the beam: EOS, w EOS,
    and w w cut off.
    """
    logits = random_logits(15, 1, 4, 4)
    found = search(markov(logits), **beams(5, 2))
    expected = brute_force(prefix_logits_markov(logits[0]), 4, 2, 0.6, "wu")
    assert_is_best(decoding.Hypotheses(*(x[:, :3] for x in found)), 0, expected, 2)
    assert not found.tokens[0, 3:].any()
    assert np.isneginf(found.scores[0, 3:]).all()
    assert np.isneginf(found.log_probabilities[0, 3:]).all()


def test_length_penalty_by_hand():
    np.testing.assert_allclose(lp(1, 0.6, "wu"), 1.0)
    np.testing.assert_allclose(lp(7, 2.0, "wu"), 4.0)
    np.testing.assert_allclose(lp(jnp.arange(1, 4), 2.0, "power"), [1.0, 4.0, 9.0])
    np.testing.assert_allclose(lp(17, 0.0, "power"), 1.0)


@pytest.mark.parametrize(
    ("alpha", "form"), [(-0.1, "wu"), (float("nan"), "power"), (0.6, "gnmt")]
)
def test_length_penalty_refuses(alpha, form):
    with pytest.raises(ValueError, match=r"form=.*alpha=.*must be one of .*use 0"):
        search(markov(random_logits(20, 3, 7, 7)), **beams(2, 3, alpha, form))
