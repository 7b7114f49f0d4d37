"""What all searches have in common, and which one the options choose."""

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
    beams,
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
