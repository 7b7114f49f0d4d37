"""Small models as step functions, and searches over them, for the tests of decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding import beam_search, greedy

PAD, BOS, EOS = 0, 1, 2

IDS = {"bos_id": BOS, "eos_id": EOS, "pad_id": PAD}


def markov_step(cache, tokens, position):
    """Return log P(next | previous). The cache holds each row's own table (B, V, V)."""
    return cache[jnp.arange(len(tokens)), tokens], cache


def markov(tables):
    return markov_step, jnp.asarray(tables)


def random_logits(seed, *shape, scale=1.5):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@functools.cache
def compiled(step, **arguments):
    run = beam_search if "beam_size" in arguments else greedy
    return jax.jit(functools.partial(run, step, **{**IDS, **arguments}))


def search(model, **arguments):
    """Run beam search if the arguments have a beam_size, and greedy search
    otherwise.
    """
    step, cache = model
    run = compiled(step, batch_size=len(jax.tree.leaves(cache)[0]), **arguments)
    return jax.tree.map(np.asarray, run(cache))


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


def padded(sequence, length):
    return [*sequence, *[PAD] * (length - len(sequence))]


def beams(beam_size, max_length, alpha=0.6, form="wu"):
    return {
        "beam_size": beam_size,
        "max_length": max_length,
        "length_penalty": alpha,
        "length_penalty_form": form,
    }


SETTINGS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.3, "top_k": 5, "top_p": 1.0},
    {"temperature": 1.3, "top_k": 0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 99, "top_p": 0.99},
    {"temperature": 0.7, "top_k": 3, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 0, "top_p": 1e-46},
]

PLAIN = SETTINGS[0]


def softmax(x):
    return np.exp(log_softmax(x))


def expected_distribution(logits, temperature, top_k, top_p):
    """Return the probabilities (V,), computed one token at a time from the
    definitions.
    """
    x = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))[: top_k or None]
    left = softmax([x[v] for v in order])
    kept, mass = [], 0.0
    while mass < top_p and len(kept) < len(order):
        kept.append(order[len(kept)])
        mass += left[len(kept) - 1]
    found = np.zeros(len(x))
    found[kept] = softmax(x[kept])
    return found
