"""Continuations of prompts against loops in NumPy float64, in pieces and as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.searching import BOS, EOS, IDS, PAD, log_softmax, random_logits
from transformer_jax.decoding import GenerationConfig, Writer

PRIME, V, E = 251, 13, 7

TABLE = random_logits(31, PRIME, V, scale=2.0)

TABLE[:, EOS] -= 1

TABLE[:, [PAD, BOS]] += 5  # PAD and BOS must never be chosen, even if they are likely

PROMPTS = [[5, 6, 7, 3, 9], [4], [8, 8, 3], []]


def hashed(prefix):
    return sum(token * (i + 2) ** 2 for i, token in enumerate(prefix)) % PRIME


def extend(cache, tokens, place, start):
    """Return logits that depend on all tokens of a row from its start on, and on
    their order.
    """
    cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens, place, axis=1)
    own = jnp.arange(cache.shape[1])[None] - start[:, None]
    logits = []
    for i in range(tokens.shape[1]):
        read = (own >= 0) & (jnp.arange(cache.shape[1]) <= place + i)[None]
        logits.append(
            jnp.asarray(TABLE)[
                jnp.where(read, cache * (own + 2) ** 2, 0).sum(axis=1) % PRIME
            ]
        )
    return jnp.stack(logits, axis=1), cache


@functools.partial(jax.jit, static_argnames=("writer", "width"))
def begin(writer, prompts, lengths, width):
    return writer.begin(
        jnp.zeros((len(prompts), width + E - 1), jnp.int32), prompts, lengths
    )


proceed = jax.jit(Writer.proceed, static_argnames=("self", "width"))


def write(
    prompts, options, steps=(E,), width=5, row_ids=None, greedy=False, step=extend
):
    """Return the continuations after pieces of `steps` tokens, with rows of `width`
    for the prompts.
    """
    writer = Writer(step, options, greedy, V, **IDS)
    padded = np.array(
        [prompt + [0] * (width - len(prompt)) for prompt in prompts], np.int32
    )
    lengths = np.array(list(map(len, prompts)), np.int32)
    ids = np.arange(len(prompts)) if row_ids is None else np.array(row_ids)
    state = begin(writer, padded, lengths, width)
    for count in steps:
        state = proceed(writer, state, width, lengths, ids, count)
    return jax.tree.map(np.asarray, state)


def expected_logits(prefix, penalty=1.0):
    """Return the logits after the exclusion of PAD and BOS and the penalty, one
    token at a time.
    """
    found = np.array(TABLE[hashed(prefix)], np.float64)
    for token in set(prefix):
        found[token] = (
            found[token] / penalty if found[token] > 0 else found[token] * penalty
        )
    found[[PAD, BOS]] = -np.inf
    return found


def padded(tokens):
    return [*tokens, *[PAD] * (E - len(tokens))]


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
def test_without_a_temperature_each_token_is_the_most_probable(penalty):
    found = write(PROMPTS, GenerationConfig(max_extra=E, repetition_penalty=penalty))
    ends = 0
    for prompt, tokens, added in zip(
        PROMPTS, found.tokens, found.log_probabilities, strict=True
    ):
        text = list(prompt)
        while prompt and len(text) < len(prompt) + E and text[-1] != EOS:
            text.append(int(expected_logits(text, penalty).argmax()))
        ends += text[-1:] == [EOS]
        assert tokens.tolist() == padded(text[len(prompt) :])
        own = [
            log_softmax(TABLE[hashed(text[:i])])[text[i]]
            for i in range(len(prompt), len(text))
        ]
        np.testing.assert_allclose(added, [*own, *[0] * (E - len(own))], rtol=2e-5)
    assert 0 < ends < 3 or penalty != 1


def test_greedy_ignores_the_options():
    drawn = GenerationConfig(max_extra=E, temperature=1.0, n_best=3)
    plain = write(PROMPTS, GenerationConfig(max_extra=E))
    np.testing.assert_array_equal(
        write(PROMPTS, drawn, greedy=True).tokens, plain.tokens
    )


OPTIONS = GenerationConfig(
    max_extra=E,
    temperature=0.8,
    top_k=5,
    top_p=0.9,
    n_best=3,
    repetition_penalty=1.4,
    seed=17,
)


@pytest.mark.parametrize(
    "options", [GenerationConfig(max_extra=E), OPTIONS], ids=["search", "draws"]
)
@pytest.mark.parametrize("steps", [(1,) * E, (3, 3, 3), (99,)])
def test_pieces_are_the_whole(options, steps):
    jax.tree.map(
        np.testing.assert_array_equal,
        write(PROMPTS, options, steps),
        write(PROMPTS, options),
    )
    assert write(PROMPTS, options, steps[:1]).written[0] == min(steps[0], E)


def test_draws_depend_on_the_seed_the_row_and_its_text_alone():
    together = write(PROMPTS, OPTIONS, row_ids=[11, 2, 3, 5]).tokens.reshape(4, 3, E)
    assert len({tuple(tokens) for tokens in together[:3].reshape(9, E)}) >= 8
    backwards = write(
        PROMPTS[::-1], OPTIONS, row_ids=[5, 3, 2, 11], width=11
    ).tokens.reshape(4, 3, E)
    np.testing.assert_array_equal(backwards[::-1], together)
    for row, number in enumerate([11, 2, 3, 5]):
        alone = write(
            PROMPTS[row : row + 1],
            OPTIONS,
            row_ids=[number],
            width=max(1, len(PROMPTS[row])),
        ).tokens
        np.testing.assert_array_equal(alone, together[row])
    same = write([[4]] * 2, OPTIONS, row_ids=[2, 3]).tokens.reshape(2, 3, E)
    np.testing.assert_array_equal(same[0], together[1])
    assert not np.array_equal(*same)


def test_frequencies():
    """Compare 20,000 continuations of two tokens with the chain's probabilities, by
    the definition of each stage.
    """
    count, prompt = 20_000, [5, 6, 7]
    settings = {"temperature": 1.3, "top_k": 6, "top_p": 0.8, "repetition_penalty": 1.5}
    found = write(
        [prompt], GenerationConfig(max_extra=E, n_best=count, **settings), (2,)
    ).tokens[:, :2]

    def distribution(prefix):
        x = expected_logits(prefix, 1.5) / 1.3
        order = np.argsort(-x, kind="stable")[:6]
        kept = np.exp(log_softmax(x[order]))
        order = order[: int((np.cumsum(kept) < 0.8).sum()) + 1]
        whole = np.zeros(V)
        whole[order] = np.exp(log_softmax(x[order]))
        return whole

    first = distribution(prompt)
    probability = np.stack(
        [p * distribution([*prompt, v]) for v, p in enumerate(first)]
    )
    probability[EOS] = first[EOS] * np.eye(V)[PAD]
    observed = np.zeros((V, V))
    np.add.at(observed, tuple(found.T), 1)
    likely = probability > 0
    assert (observed[~likely] == 0).all()
    chi = (
        (observed - count * probability)[likely] ** 2 / (count * probability)[likely]
    ).sum()
    freedom = likely.sum() - 1
    assert freedom > 8
    assert chi < freedom + 4 * np.sqrt(2 * freedom) + 4, (chi, freedom)


def test_nothing_is_computed_once_all_rows_are_finished():
    calls = []

    def counted(cache, tokens, place, start):
        jax.debug.callback(lambda place: calls.append(int(place)), place)
        logits, cache = extend(cache, tokens, place, start)
        return jnp.where(
            jnp.arange(V) == EOS, jnp.where(place > 6, 99.0, -99.0), logits
        ), cache

    found = write(
        [[4], [5, 6, 7, 8, 9]], GenerationConfig(max_extra=E), (2, 99), step=counted
    )
    jax.effects_barrier()
    # the prompts are read at once, except for their last tokens
    assert calls == [0, 4, 5, 6, 7]
    assert (found.tokens[:, 3] == EOS).all()
    assert (found.written == 4).all()


def test_a_vocabulary_without_padding_is_filled_by_its_end():
    writer = Writer(
        extend,
        GenerationConfig(max_extra=E),
        False,
        V,
        bos_id=EOS,
        eos_id=EOS,
        pad_id=None,
    )
    one = np.ones(1, np.int32)
    found = proceed(writer, begin(writer, 4 * one[None], one, 1), 1, one, one, 2)
    assert (np.asarray(found.tokens)[:, 2:] == EOS).all()


def test_a_vocabulary_without_an_end_is_written_to_the_limit():
    """An empty prompt is filled by an id beyond the vocabulary. Every id can be
    chosen.
    """
    writer = Writer(
        extend,
        GenerationConfig(max_extra=E),
        False,
        V,
        bos_id=None,
        eos_id=None,
        pad_id=None,
    )
    prompts, lengths = np.array([[4, 5], [0, 0]], np.int32), np.array([2, 0], np.int32)
    found = proceed(
        writer, begin(writer, prompts, lengths, 2), 2, lengths, np.arange(2), E
    )
    prefix = [4, 5]
    for _ in range(E):
        prefix.append(int(TABLE[hashed(prefix)].argmax()))
    assert {PAD, BOS} & set(prefix)
    assert found.tokens.tolist() == [prefix[2:], [V] * E]
    assert found.finished.tolist() == [False, True]
