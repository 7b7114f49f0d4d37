"""Greedy search and beam search against a search through all sequences, in NumPy
float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.searching import (
    BOS,
    EOS,
    IDS,
    PAD,
    log_softmax,
    markov,
    markov_step,
    random_logits,
    search,
)
from transformer_jax import decoding
from transformer_jax.decoding import (
    DecodingConfig,
    SamplingConfig,
    beam_search,
    copies,
    greedy,
    lp,
)
from transformer_jax.decoding.distributions import k_largest

FORMS = [
    ("wu", 0.0),
    ("wu", 0.6),
    ("wu", 2.0),
    ("power", 0.7),
    ("power", 1.0),
    ("power", 1.5),
]
PRIME = 251


def hashed(table, multipliers):
    """Return a model whose logits depend on the whole prefix, through a rolling hash
    of it in the cache.
    """

    def step(cache, tokens, position):
        hashes = (cache["hash"] * cache["multiplier"] + tokens + position) % PRIME
        # A nested leaf of higher rank. Its last written column must belong to the same
        # beam as the hash.
        seen = cache["seen"]["tokens"].at[:, position, 0].set(tokens)
        logits = jnp.asarray(table)[(hashes + seen.sum(axis=(1, 2))) % PRIME]
        return logits, {
            "hash": hashes,
            "multiplier": cache["multiplier"],
            "seen": {"tokens": seen},
        }

    rows = len(multipliers)
    cache = {
        "hash": jnp.zeros(rows, jnp.int32),
        "multiplier": jnp.asarray(multipliers, jnp.int32),
    }
    return step, cache | {"seen": {"tokens": jnp.zeros((rows, 11, 1), jnp.int32)}}


def prefix_logits_markov(table):
    return lambda prefix: table[prefix[-1]]


def prefix_logits_hashed(table, multiplier):
    def logits(prefix):
        value = 0
        for position, token in enumerate(prefix):
            value = (value * multiplier + token + position) % PRIME
        return table[(value + sum(prefix)) % PRIME]

    return logits


def penalty(length, alpha, form):
    return (((5 + length) / 6) if form == "wu" else length) ** alpha


def brute_force(logits, vocabulary, max_length, alpha, form):
    """Return [(score, log P, tokens)], best first: all that end within max_length,
    then all that are cut off there.
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
    return sorted(ended, reverse=True) + sorted(cut_off, reverse=True)


def padded(sequence, length):
    return [*sequence, *[PAD] * (length - len(sequence))]


def beams(beam_size, max_length, alpha=0.6, form="wu"):
    return {
        "beam_size": beam_size,
        "max_length": max_length,
        "length_penalty": alpha,
        "length_penalty_form": form,
    }


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


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_length": 11}, 1),
        (beams(1, 11, 0.0), 1),  # log 0.9 is above log 0.05
        (beams(2, 11, 0.0), 2),  # log 0.045 is above log 0.0025
        ({**beams(2, 11, 0.0), "n_best": 1}, 1),
        (beams(2, 2, 0.0), 2),
        (beams(1, 11, 5.0, "power"), 11),  # log 0.05 / 11^5 could still become the best
    ],
)
def test_stops_when_nothing_can_get_ahead(arguments, steps):
    """EOS has probability 0.9 everywhere, and two words have 0.05 each."""
    calls = []

    def step(cache, tokens, position):
        jax.debug.callback(lambda p: calls.append(int(p)), position)
        return cache, cache

    search((step, jnp.log(jnp.array([[0.0, 0.0, 0.9, 0.05, 0.05]]))), **arguments)
    jax.effects_barrier()
    assert calls == list(range(steps))


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


def test_greedy_takes_the_most_probable_token():
    table, multipliers = random_logits(11, PRIME, 13), [3, 5, 7, 11, 13]
    found = search(hashed(table, multipliers), max_length=11)
    for row, multiplier in enumerate(multipliers):
        logits, prefix = prefix_logits_hashed(table, multiplier), [BOS]
        while len(prefix) <= 11 and prefix[-1] != EOS:
            allowed = np.array(logits(prefix))
            allowed[[PAD, BOS]] = -np.inf
            prefix.append(int(allowed.argmax()))
        assert found.tokens[row, 0].tolist() == padded(prefix[1:], 11)
        log_probabilities = [
            log_softmax(logits(prefix[:i]))[y] for i, y in enumerate(prefix) if i
        ]
        np.testing.assert_allclose(
            found.log_probabilities[row, 0], sum(log_probabilities), rtol=2e-5
        )
    np.testing.assert_array_equal(found.scores, found.log_probabilities)


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


@pytest.mark.parametrize("arguments", [{"max_length": 11}, beams(1, 11), beams(3, 11)])
def test_rows_do_not_depend_on_the_batch(arguments):
    """Rows that end soon, late and never are bitwise the same alone, together and in
    another order.
    """
    tables = random_logits(13, 5, 7, 7)
    tables[:, :, EOS] += np.array([6.0, 2.0, 0.0, -2.0, -np.inf], np.float32)[:, None]
    together = search(markov(tables), **arguments)
    lengths = (together.tokens[:, 0] != PAD).sum(axis=-1)
    assert lengths.min() < 3
    assert lengths.max() == 11
    backwards = search(markov(tables[::-1]), **arguments)
    for row in range(5):
        alone = search(markov(tables[row : row + 1]), **arguments)
        for a, b, c in zip(alone, together, backwards, strict=True):
            np.testing.assert_array_equal(a[0], b[row])
            np.testing.assert_array_equal(a[0], c[4 - row])


@pytest.mark.parametrize("arguments", [{}, beams(3, 0, 0.0)])
def test_finished_hypotheses_are_frozen(arguments):
    """The logits of the finished row become infinite, which makes its probabilities
    NaN.
    """

    def step(cache, tokens, position):
        fair = jnp.full((len(tokens), 7), -5.0).at[:, EOS].set(5.0)
        slow = (
            jnp.full((len(tokens), 7), -5.0).at[:, 5].set(5.0).at[:, EOS].set(-jnp.inf)
        )
        logits = jnp.where(cache[:, None], fair, slow)
        return jnp.where(cache[:, None] & (position > 5), jnp.inf, logits), cache

    def run(rows, length):
        return search((step, jnp.array(rows)), **{**arguments, "max_length": length})

    both, soon = run([True, False], 11), run([True], 5)
    assert np.isfinite(both.scores).all()
    np.testing.assert_array_equal(both.tokens[0, :, :5], soon.tokens[0])
    np.testing.assert_array_equal(both.scores[0], soon.scores[0])
    assert not both.tokens[0, :, 5:].any()
    assert (both.tokens[1, 0] == 5).all()


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


@pytest.mark.parametrize("arguments", [{"max_length": 11}, beams(3, 11)])
def test_pad_and_bos_are_never_chosen(arguments):
    tables = random_logits(16, 5, 7, 7)
    tables[:, :, [PAD, BOS]] += 20
    found = search(markov(tables), **arguments)
    assert not (found.tokens == BOS).any()
    ended = np.cumsum(found.tokens == EOS, axis=-1) - (found.tokens == EOS)
    np.testing.assert_array_equal(found.tokens == PAD, ended > 0)
    assert (found.log_probabilities < -10).all(), (
        "the probabilities must stay those of the model"
    )


@pytest.mark.parametrize("arguments", [{"max_length": 5}, beams(3, 5)])
def test_one_id_for_bos_pad_and_eos(arguments):
    step, cache = markov(random_logits(17, 3, 7, 7))
    run = beam_search if "beam_size" in arguments else greedy
    one_id = functools.partial(
        run, step, batch_size=3, bos_id=EOS, eos_id=EOS, pad_id=EOS, **arguments
    )
    found = jax.jit(one_id)(cache)
    assert (found.tokens == EOS).any()


@pytest.mark.parametrize("arguments", [{"max_length": 11}, beams(3, 11)])
def test_traced_once_for_a_shape(arguments):
    step, cache = markov(random_logits(18, 3, 7, 7))
    traces = []

    def counted(cache, tokens, position):
        traces.append((tokens.shape, tokens.dtype, position.shape, position.dtype))
        return step(cache, tokens, position)

    run = beam_search if "beam_size" in arguments else greedy
    decode = jax.jit(functools.partial(run, counted, batch_size=3, **IDS, **arguments))
    decode(cache)
    decode(cache + 1)
    rows = 3 * arguments.get("beam_size", 1)
    assert traces == [((rows,), jnp.int32, (), jnp.int32)]


@pytest.mark.parametrize(
    ("size", "k"), [(10_000, 12), (992, 3), (7, 5), (48, 7), (2 * 211, 5)]
)
@pytest.mark.parametrize("mean", [0.02, 1.0, 1e5])
def test_top_k_is_lax_top_k_ties_included(size, k, mean):
    x = jnp.asarray(
        np.random.default_rng(19).poisson(mean, size=(3, 5, size)), jnp.float32
    )
    for ours, theirs in zip(k_largest(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


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


VALID = DecodingConfig(
    beam_size=4,
    length_penalty=0.6,
    length_penalty_form="wu",
    max_ratio=1.0,
    max_extra=50,
)


def test_valid_config_has_no_problems_and_limits_the_output():
    assert list(VALID.problems()) == []
    assert VALID.max_length(7) == 57
    assert dataclasses.replace(VALID, max_ratio=1.5, max_extra=3).max_length(7) == 13
    assert dataclasses.replace(VALID, max_ratio=1e308).max_length(100) > 10**9
    assert (
        list(
            dataclasses.replace(
                VALID, temperature=0.7, top_k=5, top_p=0.9, n_best=9
            ).problems()
        )
        == []
    )
    assert list(dataclasses.replace(VALID, n_best=4).problems()) == []


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("beam_size", 0, "at least 1; use 1"),
        ("length_penalty", -0.1, "at least 0; use 0 "),
        ("length_penalty", float("nan"), "finite"),
        ("length_penalty", float("inf"), "finite"),
        ("length_penalty_form", "gnmt", "one of wu, power; use wu"),
        (
            "stopping_rule",
            "soon",
            "one of exact, hf_never, hf_false, hf_true; use exact",
        ),
        ("at_limit", "stop", "cut, or end for outputs"),
        ("max_ratio", -1.0, "at least 0; use 1.0"),
        ("max_ratio", float("inf"), "finite"),
        (
            "max_extra",
            0,
            "at least 1, because outputs could otherwise be empty; use 50",
        ),
        (
            "temperature",
            -0.1,
            "0 or at least 1e-06; use 0 for the most probable output, 1.0 to sample",
        ),
        (
            "temperature",
            1e-7,
            "0 or at least 1e-06; use 0 for the most probable output, 1.0 to sample",
        ),
        ("temperature", float("inf"), "finite"),
        ("top_k", -1, "at least 0; use 0"),
        (
            "top_k",
            5,
            "needs sampling: set decoding.temperature, e.g. to 1.0, or top_k to 0",
        ),
        ("top_p", 0.0, "in (0, 1]; use 1.0"),
        ("top_p", 1.1, "in (0, 1]; use 1.0"),
        (
            "top_p",
            0.9,
            "needs sampling: set decoding.temperature, e.g. to 1.0, or top_p to 1.0",
        ),
        ("seed", -1, "in [0, 2³¹)"),
        ("n_best", 0, "at least 1"),
        (
            "n_best",
            5,
            (
                "at most 4, the number of outputs that a search finds: "
                "raise decoding.beam_size to n_best (encoder–decoders only), "
                "or sample with decoding.temperature = 1.0"
            ),
        ),
    ],
)
def test_problems(field, value, rule):
    [(name, message)] = dataclasses.replace(VALID, **{field: value}).problems()
    assert name == field
    assert rule in message


def test_all_problems_at_once():
    wrong = {
        "max_extra": 0,
        "temperature": -1.0,
        "top_k": -1,
        "top_p": 0.0,
        "seed": -1,
        "n_best": 0,
        "end_ids": (-1,),
        "forbidden_ids": (3, -2),
        "min_tokens": -1,
        "no_repeat_ngram": -1,
        "repetition_penalty": 0.0,
        "beam_size": 0,
        "length_penalty": -1.0,
        "length_penalty_form": "",
        "stopping_rule": "",
        "at_limit": "",
        "first_id": -2,
        "max_ratio": -1.0,
    }
    assert {*wrong, "renormalize"} == {
        field.name for field in dataclasses.fields(DecodingConfig)
    }
    assert [name for name, _ in DecodingConfig(**wrong).problems()] == list(wrong)


def test_without_beams_a_search_finds_one():
    assert list(SamplingConfig().problems()) == []
    ((name, rule),) = SamplingConfig(n_best=2).problems()
    assert name == "n_best"
    assert "at most 1, the number of outputs that a search finds" in rule
    assert list(SamplingConfig(n_best=2, temperature=1.0).problems()) == []


@pytest.mark.parametrize("arguments", [{"max_length": 11}, beams(3, 11)])
def test_a_vocabulary_without_padding(arguments):
    """Id 0 is an ordinary token, and EOS fills the positions after the end."""
    tables = random_logits(16, 5, 7, 7)
    tables[:, :, [0, BOS]] += 2
    tables[:, :, EOS] += 1
    found = search(markov(tables), **arguments, pad_id=None)
    lengths = (np.cumsum(found.tokens == EOS, axis=-1) == 0).sum(axis=-1)
    after = np.arange(11) >= lengths[:, :, None]
    assert after.any()
    assert (found.tokens[after] == EOS).all()
    assert (found.tokens[~after] == 0).any()
    assert not (found.tokens == BOS).any()


ROW_IDS = np.array([5, 3, 11])


def by_options(options, only_greedy=False, **more):
    """Return the outputs of `decoding.search` for a model whose probabilities change
    with the position.
    """
    tables = random_logits(21, 3, 13, 13)
    rows = []

    def step(cache, tokens, position):
        rows.append(len(tokens))
        return cache[jnp.arange(len(tokens)), (tokens + position) % 13], cache

    run = functools.partial(
        decoding.search,
        step,
        options=options,
        only_greedy=only_greedy,
        batch_size=3,
        max_length=7,
        **IDS,
    )
    found = jax.jit(functools.partial(run, vocab_size=13, **more))(
        jnp.asarray(tables), row_ids=ROW_IDS
    )
    assert set(rows) == {3 * copies(options, only_greedy)}
    return jax.tree.map(np.asarray, found)


def test_search_takes_the_options():
    """The options select greedy search, beam search or sampling, and the number of
    copies of each row.
    """
    narrow, beam = DecodingConfig(beam_size=1), DecodingConfig(beam_size=4, n_best=2)
    best = by_options(narrow)
    drawn = DecodingConfig(temperature=0.8, n_best=5, seed=3, beam_size=2)
    for options, only_greedy in (
        (beam, True),
        (drawn, True),
        (SamplingConfig(), False),
    ):
        for one, other in zip(by_options(options, only_greedy), best, strict=True):
            np.testing.assert_array_equal(one, other)
    two, four = by_options(beam), by_options(dataclasses.replace(beam, n_best=4))
    assert two.tokens.shape == (3, 2, 7)
    for fewer, more in zip(two, four, strict=True):
        np.testing.assert_array_equal(fewer, more[:, :2])
    assert (two.scores[:, 0] > two.log_probabilities[:, 0]).all(), (
        "the length penalty must change the score"
    )
    by_probability = by_options(dataclasses.replace(beam, length_penalty=0.0))
    np.testing.assert_array_equal(
        by_probability.scores, by_probability.log_probabilities
    )
    squared = by_options(
        dataclasses.replace(beam, length_penalty=2.0, length_penalty_form="power")
    )
    assert (squared.scores[:, 0] > two.scores[:, 0]).all()
    first = by_options(dataclasses.replace(beam, stopping_rule="hf_true"))
    assert (first.tokens != two.tokens).any()
    samples = by_options(drawn)
    assert samples.tokens.shape == (3, 5, 7)
    np.testing.assert_array_equal(samples.tokens, by_options(drawn).tokens)
    for change in ({"seed": 4}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.2}):
        other = by_options(dataclasses.replace(drawn, **change))
        assert not np.array_equal(other.tokens, samples.tokens), change


@pytest.mark.parametrize(
    "options", [DecodingConfig(beam_size=1), DecodingConfig(beam_size=3, n_best=3)]
)
def test_an_output_may_end_at_the_limit_at_no_cost(options):
    """Without an end before, the outputs are those of one token less, with EOS
    behind them.
    """
    tables = random_logits(21, 3, 13, 13)
    tables[:, :, EOS] = -np.inf

    def run(length, **change):
        decode = functools.partial(
            decoding.search, markov_step, options=dataclasses.replace(options, **change)
        )
        decode = functools.partial(
            decode,
            only_greedy=False,
            batch_size=3,
            vocab_size=13,
            max_length=length,
            **IDS,
        )
        return jax.jit(decode)(jnp.asarray(tables), row_ids=ROW_IDS)

    ended, cut_off = run(5, at_limit="end"), run(4)
    np.testing.assert_array_equal(ended.tokens[:, :, :4], cut_off.tokens)
    assert (ended.tokens[:, :, 4] == EOS).all()
    np.testing.assert_allclose(
        ended.log_probabilities, cut_off.log_probabilities, rtol=1e-6
    )
