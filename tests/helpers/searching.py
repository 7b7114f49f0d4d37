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
