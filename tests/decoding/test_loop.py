"""Greedy search, and samples: frequencies against NumPy float64; seeds and rows that
draws depend on.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.searching import (
    BOS,
    EOS,
    IDS,
    PAD,
    PLAIN,
    PRIME,
    SETTINGS,
    expected_distribution,
    hashed,
    log_softmax,
    markov,
    padded,
    prefix_logits_hashed,
    random_logits,
    search,
)
from transformer_jax.decoding import sample


def draw(model, row_ids=None, seed=0, num_samples=3, max_length=7, **settings):
    step, cache = model
    rows = len(jax.tree.leaves(cache)[0])
    run = functools.partial(
        sample,
        step,
        batch_size=rows,
        num_samples=num_samples,
        max_length=max_length,
        **{**IDS, **PLAIN, **settings},
    )
    ids = jnp.arange(rows) if row_ids is None else jnp.asarray(row_ids)
    return jax.tree.map(
        np.asarray, jax.jit(run)(cache, key=jax.random.key(seed), row_ids=ids)
    )


@pytest.mark.parametrize("settings", SETTINGS[:5])
def test_frequencies(settings):
    """Compare 20,000 outputs of two tokens with the probabilities of the chain by a
    chi-square test.
    """
    table, count = random_logits(4, 7, 7, scale=1.0), 20_000
    # PAD and BOS must never be drawn, even if they are likely
    table[:, [PAD, BOS]] += 1
    found = draw(markov(table[None]), num_samples=count, max_length=2, **settings)
    allowed = table.copy()
    allowed[:, [PAD, BOS]] = -np.inf
    first = expected_distribution(allowed[BOS], **settings)
    probability = np.zeros((7, 7))
    for v in range(7):
        after = (
            np.eye(7)[PAD]
            if v == EOS
            else expected_distribution(allowed[v], **settings)
        )
        probability[v] = first[v] * after
    observed = np.zeros((7, 7))
    np.add.at(observed, tuple(found.tokens[0].T), 1)
    assert (observed[probability == 0] == 0).all()
    likely = probability > 0
    chi = (
        (observed - count * probability)[likely] ** 2 / (count * probability)[likely]
    ).sum()
    freedom = likely.sum() - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom) + 4, (chi, freedom)


def test_scores_are_the_models_own():
    tables = random_logits(5, 3, 7, 7)
    tables[:, :, [PAD, BOS]] += 2
    found = draw(markov(tables), num_samples=11, temperature=0.5, top_k=3, top_p=0.9)
    for row, table in enumerate(tables):
        for tokens, total in zip(
            found.tokens[row], found.log_probabilities[row], strict=True
        ):
            y = [BOS, *tokens[: (tokens != PAD).sum()]]
            expected = sum(log_softmax(table[a])[b] for a, b in itertools.pairwise(y))
            np.testing.assert_allclose(total, expected, rtol=2e-5)
    np.testing.assert_array_equal(found.scores, found.log_probabilities)
    assert (np.diff(found.scores, axis=1) <= 0).all()


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    tables = random_logits(5, 40, 7, 7)
    tables[:, :, 5:] += 20
    settings = {"num_samples": 5, "temperature": 1.5}
    found = draw(markov(tables), vocab_size=5, **settings)
    assert (draw(markov(tables), **settings).tokens >= 5).any()
    assert (found.tokens < 5).all()
    assert (found.tokens >= 0).all()
    assert (found.scores < -10).all(), "the probabilities must stay those of the model"


def test_only_padding_after_the_end():
    tables = random_logits(6, 5, 7, 7)
    tables[:, :, [PAD, BOS]] += 20
    found = draw(markov(tables), num_samples=13)
    assert found.tokens.shape == (5, 13, 7)
    assert not (found.tokens == BOS).any()
    ended = np.cumsum(found.tokens == EOS, axis=-1) - (found.tokens == EOS)
    assert ended.any()
    np.testing.assert_array_equal(found.tokens == PAD, ended > 0)


def test_a_vocabulary_without_padding():
    """Id 0 is drawn like any other, and EOS fills the positions after the end."""
    tables = random_logits(6, 5, 7, 7)
    tables[:, :, BOS] += 20
    found = draw(markov(tables), num_samples=13, pad_id=None)
    assert not (found.tokens == BOS).any()
    ended = np.cumsum(found.tokens == EOS, axis=-1) > 0
    assert ended.any()
    assert (found.tokens[ended] == EOS).all()
    assert (found.tokens[~ended] == 0).any()


@pytest.mark.parametrize("cold", [{"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-6}])
def test_the_coldest_is_greedy(cold):
    model = markov(random_logits(7, 5, 7, 7))
    found, best = draw(model, **cold), search(model, max_length=7)
    np.testing.assert_array_equal(found.tokens, np.repeat(best.tokens, 3, axis=1))
    np.testing.assert_allclose(
        found.scores, np.repeat(best.scores, 3, axis=1), rtol=1e-6
    )


def test_draws_depend_on_seed_and_row_and_draw_alone():
    """Draws are bitwise the same alone, together and in another order.

    Another seed, row or draw gives other tokens.
    """
    tables = np.repeat(random_logits(8, 1, 13, 13, scale=0.5), 5, axis=0)
    model, ids = markov(tables), np.array([41, 2, 3, 5, 7])
    together = draw(model, ids)
    again, backwards = draw(model, ids), draw(model, ids[::-1])
    for row in range(5):
        alone = draw(markov(tables[:1]), ids[row : row + 1])
        for a, b, c, d in zip(alone, together, again, backwards, strict=True):
            np.testing.assert_array_equal(a[0], b[row])
            np.testing.assert_array_equal(a[0], c[row])
            np.testing.assert_array_equal(a[0], d[4 - row])
    more = draw(model, ids, num_samples=4)
    for row in range(5):
        assert {tuple(y) for y in together.tokens[row]} <= {
            tuple(y) for y in more.tokens[row]
        }
    everything = np.concatenate(
        [together.tokens, draw(model, ids, seed=1).tokens]
    ).reshape(-1, 7)
    assert len({tuple(y) for y in everything}) > 27


def test_positions_draw_anew():
    """All positions have the same table, but the tokens of an output differ."""
    table = np.zeros((1, 31, 31), np.float32)
    table[:, :, EOS] = -np.inf
    found = draw(markov(table), num_samples=1, max_length=23).tokens[0, 0]
    assert len(set(found.tolist())) > 10


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
