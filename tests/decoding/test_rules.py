"""Rules of decoding against a search through all sequences, in NumPy float64, and in
continuations of prompts.
"""

import dataclasses
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
    log_softmax,
    markov_step,
    random_logits,
)
from transformer_jax import decoding
from transformer_jax.decoding import DecodingConfig, GenerationConfig, Writer

V, T = 6, 4

WIDE = DecodingConfig(beam_size=4**T, n_best=5, length_penalty=0.0)

RULES = {
    "renormalize": {"renormalize": True},
    "bigrams": {"no_repeat_ngram": 2},
    "trigrams": {"no_repeat_ngram": 3},
    "min_tokens": {"min_tokens": 3},
    "penalty": {"repetition_penalty": 1.7},
    "first": {"first_id": 4},
    "forbidden": {"forbidden_ids": (3,)},
    "ends": {"end_ids": (5,)},
    "all": {
        "renormalize": True,
        "no_repeat_ngram": 2,
        "min_tokens": 2,
        "repetition_penalty": 1.4,
        "first_id": 4,
        "end_ids": (5,),
    },
}


def repeats(sequence, n):
    """Return True if the last n-gram of a sequence occurs before."""
    grams = [sequence[i : i + n] for i in range(len(sequence) - n + 1)]
    return bool(grams) and grams[-1] in grams[:-1]


def changed(scores, prefix, options):
    """Return the scores (V,) of the next token after a prefix by the rules, written
    one by one.
    """
    ends = (EOS, *options.end_ids)
    found = np.array(scores, np.float64)
    for token in set(prefix):
        found[token] *= (
            options.repetition_penalty
            if found[token] < 0
            else 1 / options.repetition_penalty
        )
    for token in range(V):
        repeated = options.no_repeat_ngram and repeats(
            (*prefix, token), options.no_repeat_ngram
        )
        early = token in ends and len(prefix) < options.min_tokens
        if repeated or early or token in (PAD, BOS, *options.forbidden_ids):
            found[token] = -np.inf
    if options.first_id >= 0 and len(prefix) == 1:
        found = np.where(np.arange(V) == options.first_id, 0.0, -np.inf)
    return log_softmax(found) if options.renormalize else found


def best_of_all(table, options):
    """Return the best outputs that end, with their sums of changed
    log-probabilities.
    """
    ended = []

    def grow(total, prefix):
        scores = changed(log_softmax(table[prefix[-1]]), prefix, options)
        for token in np.flatnonzero(np.isfinite(scores)).tolist():
            longer, sum_ = (*prefix, token), total + scores[token]
            if token in (EOS, *options.end_ids):
                ended.append((sum_, longer[1:]))
            elif len(longer) <= T:
                grow(sum_, longer)

    grow(0.0, (BOS,))
    return sorted(ended, reverse=True)


@functools.cache
def compiled(options):
    sizes = {
        "batch_size": 3,
        "max_length": T,
        "vocab_size": V,
        "row_ids": jnp.arange(3),
        "only_greedy": False,
    }
    return jax.jit(
        lambda cache: decoding.search(markov_step, cache, options, **sizes, **IDS)
    )


def searched(options):
    tables = random_logits(3, 3, V, V)
    return tables, jax.tree.map(np.asarray, compiled(options)(jnp.asarray(tables)))


# outputs are too short for these
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "trigrams"])
def test_a_wide_beam_finds_the_best_outputs_by_the_rules(rule):
    options = dataclasses.replace(WIDE, **RULES[rule])
    tables, found = searched(options)
    plain = dataclasses.replace(
        options,
        **{
            f.name: f.default for f in dataclasses.fields(WIDE) if f.name in RULES[rule]
        },
    )
    differ = 0
    for row, table in enumerate(tables):
        expected = best_of_all(table, options)
        count = min(options.n_best, len(expected))
        for place, (total, tokens) in enumerate(expected[:count]):
            assert found.tokens[row, place].tolist() == [
                *tokens,
                *[PAD] * (T - len(tokens)),
            ]
            np.testing.assert_allclose(found.scores[row, place], total, rtol=1e-5)
        differ += expected[:count] != best_of_all(table, plain)[:count]
    assert differ


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "renormalize"])
def test_greedy_search_takes_the_best_token_by_the_rules(rule):
    """The rules change logits here, as in transformers, not log-probabilities."""
    options = dataclasses.replace(WIDE, beam_size=1, n_best=1, **RULES[rule])
    tables, found = searched(options)
    for row, table in enumerate(tables):
        prefix, total = (BOS,), 0.0
        while len(prefix) <= T and prefix[-1] not in (EOS, *options.end_ids):
            token = int(
                changed(
                    table[prefix[-1]],
                    prefix,
                    dataclasses.replace(options, renormalize=False),
                ).argmax()
            )
            total += log_softmax(table[prefix[-1]])[token]
            prefix = (*prefix, token)
        assert found.tokens[row, 0].tolist() == [
            *prefix[1:],
            *[PAD] * (T + 1 - len(prefix)),
        ]
        np.testing.assert_allclose(found.log_probabilities[row, 0], total, rtol=1e-5)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "renormalize"])
def test_samples_keep_the_rules(rule):
    options = dataclasses.replace(WIDE, temperature=2.0, n_best=64, **RULES[rule])
    _, found = searched(options)
    for sample in found.tokens.reshape(-1, T).tolist():
        prefix = (BOS,)
        for token in sample:
            assert np.isfinite(changed(np.zeros(V), prefix, options)[token])
            prefix = (*prefix, token)
            if token in (EOS, *options.end_ids):
                break
        assert set(sample[len(prefix) - 1 :]) <= {PAD}


def test_a_row_that_must_end_ends_whatever_the_rules():
    """An empty source ends at once, and `at_limit` ends the last token."""
    options = dataclasses.replace(
        WIDE, beam_size=2, n_best=1, min_tokens=3, renormalize=True
    )
    table = np.where(np.arange(V) == EOS, 0.0, decoding.IMPOSSIBLE).astype(np.float32)
    found = compiled(options)(jnp.broadcast_to(table, (3, V, V)))
    assert (found.tokens[:, 0, 0] == EOS).all()
    assert (found.scores[:, 0] == 0).all()


def continued(prompts, **options):
    """Return greedy continuations by a Markov chain."""
    table = jnp.asarray(random_logits(15, V, V, scale=0.6))

    def extend(cache, tokens, place, start):
        return table[tokens], cache

    width = max(map(len, prompts))
    padded = jnp.array(
        [[*prompt, *[PAD] * (width - len(prompt))] for prompt in prompts]
    )
    lengths = jnp.array(list(map(len, prompts)))
    options = GenerationConfig(max_extra=7, **options)
    writer = Writer(extend, options, True, V, BOS, EOS, PAD)

    def run(prompts, lengths):
        begun = writer.begin(jnp.zeros((len(prompts), 1)), prompts, lengths)
        return writer.proceed(begun, width, lengths, jnp.arange(len(prompts)), 7)

    return np.asarray(table), np.asarray(jax.jit(run)(padded, lengths).tokens)


@pytest.mark.parametrize(
    "rule", ["bigrams", "trigrams", "min_tokens", "penalty", "forbidden", "ends"]
)
def test_continuations_keep_the_rules(rule):
    """The prompt counts for repetitions, and not for the number of tokens."""
    prompts, differ = [(3, 4, 5, 3), (5, 5), (4,)], 0
    table, found = continued(prompts, **RULES[rule])
    options = dataclasses.replace(WIDE, **RULES[rule])
    for prompt, tokens in zip(prompts, found.tolist(), strict=True):
        sequence, plain, written = prompt, prompt, 0
        while written < 7 and (
            not written or sequence[-1] not in (EOS, *options.end_ids)
        ):
            shifted = dataclasses.replace(
                options,
                min_tokens=options.min_tokens and options.min_tokens + len(prompt) - 1,
            )
            sequence = (
                *sequence,
                int(changed(table[sequence[-1]], sequence, shifted).argmax()),
            )
            plain = (*plain, int(changed(table[plain[-1]], plain, WIDE).argmax()))
            written += 1
        assert tokens == [*sequence[len(prompt) :], *[PAD] * (7 - written)]
        differ += plain != sequence or rule == "ends"
    assert differ


def test_the_default_options_add_nothing_to_the_program():
    """A search with the default options is compiled to the same program as before
    the rules.
    """
    assert decoding.rules.rules(DecodingConfig(), (EOS,), (PAD, BOS)) is None
    assert decoding.rules.rules(GenerationConfig(), (EOS,), (PAD, BOS), 7) is None
    for name, value in itertools.chain(*(rule.items() for rule in RULES.values())):
        if name != "end_ids":
            options = dataclasses.replace(WIDE, **{name: value})
            assert decoding.rules.rules(options, (EOS,), (PAD, BOS)) is not None
