"""Distributions of the next token: the best tokens, what to draw from, and draws.

See the package for the shapes.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.steps import IMPOSSIBLE
from transformer_jax.errors import UserError

LEAST_TEMPERATURE = 1e-6  # logits divided by a smaller temperature may overflow float32


def k_largest(
    x: jax.Array,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """Return `jax.lax.top_k(x, k)`, with the same order of ties, in about half the time
    for a vocabulary on CPUs.

    The last axis is split into groups of adjacent values. The k largest values are in
    the k groups with the largest maxima, so only these groups are searched.
    """
    size = math.gcd(x.shape[-1], 16)
    groups = x.reshape(*x.shape[:-1], -1, size)
    if size == 1 or groups.shape[-2] <= k:
        return jax.lax.top_k(x, k)
    _, best_groups = jax.lax.top_k(groups.max(axis=-1), k)
    # sorted, so that ties are ordered as in x
    chosen = jnp.sort(best_groups, axis=-1)
    members = jnp.take_along_axis(groups, chosen[..., None], axis=-2)
    members = members.reshape(*x.shape[:-1], -1)
    values, indices = jax.lax.top_k(members, k)
    group = jnp.take_along_axis(chosen, indices // size, axis=-1)
    return values, group * size + indices % size


def log_probability(
    logits: jax.Array,
    token: jax.Array,
) -> jax.Array:
    """Return the log-probability (N,) of a token (N,) by logits (N, V)."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def best_tokens(
    logits: jax.Array,
    k: int,
    forbidden: list[int],
) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities and ids (N, C), C ≥ k if V ≥ k, of tokens that include
    the k best allowed ones.

    Forbidden tokens have the log-probability IMPOSSIBLE.
    """
    count = min(k + len(forbidden), logits.shape[-1])
    values, tokens = k_largest(logits, count)
    log_probabilities = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    barred = jnp.isin(tokens, jnp.array(forbidden, jnp.int32))
    log_probabilities = jnp.maximum(log_probabilities, IMPOSSIBLE)
    return jnp.where(barred, IMPOSSIBLE, log_probabilities), tokens


def exclude(
    logits: jax.Array,
    forbidden: Sequence[int],
    vocab_size: int | None,
) -> jax.Array:
    """Return logits (N, V) that are minus infinity for the ids `forbidden` and for ids
    ≥ `vocab_size`.
    """
    allowed = logits.at[:, jnp.array(forbidden, jnp.int32)].set(-jnp.inf)
    if vocab_size is None:
        return allowed
    return allowed.at[:, vocab_size:].set(-jnp.inf)


def _nucleus(
    probabilities: jax.Array,
    p: float,
) -> jax.Array:
    """Return a mask (N, C) of the smallest set in each row whose total probability is
    at least p.

    Among equal probabilities, the first are included first. The smallest probability in
    the set is found by bisection; on CPUs, this takes a small fraction of the time of
    sorting a vocabulary.
    """
    # same order as the floats, none of which is negative
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)
    # a smaller p would be rounded to 0 in float32, and the set would be empty
    p = max(p, 1e-30)

    def mass(included):
        return jnp.where(included, probabilities, 0.0).sum(axis=-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = mass(bits >= middle) >= p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(bits[:, :1])
    high = jnp.full_like(low, np.float32(2.0).view(np.int32))
    least, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    equal = bits == least
    before = mass(bits > least) + (jnp.cumsum(equal, axis=-1) - 1) * probabilities
    return (bits > least) | (equal & (before < p))


def truncate(
    logits: jax.Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[jax.Array, jax.Array]:
    """Return the distribution to sample from, as logits (N, C) and their tokens (N, C),
    for logits (N, V).

    Three steps are applied in this order:
    1. Temperature: softmax(x / temperature) (Ackley et al. 1985).
    2. Top-k: keep the k most probable tokens (Fan et al. 2018). 0 keeps all.
    3. Top-p: renormalize, then keep the smallest set of most probable tokens whose
       total probability is at least p (Holtzman et al. 2020). 1 keeps all.

    The logits of removed tokens are left out or minus infinity. The most probable token
    is always kept. Among equally probable tokens, those with smaller ids are kept
    first.

    Raises ValueError if `temperature`, `top_k` or `top_p` is out of range.
    """
    is_temperature = LEAST_TEMPERATURE <= temperature < math.inf
    if not is_temperature or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            f"{temperature=}, {top_k=}, {top_p=}: temperature must be at least "
            f"{LEAST_TEMPERATURE}, top_k at least 0, and top_p in (0, 1]; "
            "use 1.0, 0 and 1.0 to sample from the model's own distribution"
        )
    # IMPOSSIBLE becomes minus infinity at any temperature. The largest logit becomes 0,
    # so it cannot overflow.
    largest = logits.max(axis=-1, keepdims=True)
    is_impossible = logits <= IMPOSSIBLE
    scaled = (logits - largest) / temperature
    logits = jnp.where(is_impossible, -jnp.inf, scaled)
    vocab_size = logits.shape[-1]
    if 0 < top_k < vocab_size:
        logits, tokens = k_largest(logits, top_k)
    else:
        tokens = jnp.broadcast_to(jnp.arange(vocab_size)[None], logits.shape)
    if top_p < 1:
        nucleus = _nucleus(jax.nn.softmax(logits), top_p)
        logits = jnp.where(nucleus, logits, -jnp.inf)
    return logits, tokens


def penalize(
    logits: jax.Array,
    seen: jax.Array,
    penalty: float,
) -> jax.Array:
    """Make tokens that occurred before less probable: divide their positive logits by
    θ, multiply negative ones by it.

    Keskar et al. 2019, Section 4.1, with θ = `penalty`; 1 changes nothing, and values
    below 1 favor repetitions. logits (N, V); seen (N, S), S ≤ V, is True at the tokens
    of the prompt and of the text so far.

    Differs: the paper divides all logits, which would make tokens with negative logits
    more probable. This is the rule of the authors' code and of Hugging Face, and as
    there, a token is penalized once however often it occurred.
    """
    size = seen.shape[-1]
    unchanged = logits[:, :size]
    penalized = jnp.where(unchanged > 0, unchanged / penalty, unchanged * penalty)
    return logits.at[:, :size].set(jnp.where(seen, penalized, unchanged))


def row_keys(
    key: jax.Array,
    row_ids: jax.Array,
    count: int,
) -> jax.Array:
    """Return a key for each of `count` samples of each row, (B · count,).

    `row_ids` (B,) identify the rows.
    """
    fold_all = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys_of_rows = fold_all(key, row_ids)
    keys = jax.vmap(fold_all, in_axes=(0, None))(keys_of_rows, jnp.arange(count))
    return keys.reshape(-1)


def draw(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> jax.Array:
    """Draw a token (N,) from the distribution of `truncate` for logits (N, V).

    `keys` (N,) are those of the rows, and `positions` (N,) count the draws of each.
    """
    likely, tokens = truncate(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    draw_keys = jax.vmap(jax.random.fold_in)(keys, positions)
    chosen = jax.vmap(jax.random.categorical)(draw_keys, likely)
    return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]
