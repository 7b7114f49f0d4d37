"""Random draws from a model, and the distributions to draw from.

See the package for the shapes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.steps import (
    IMPOSSIBLE,
    Cache,
    Change,
    Hypotheses,
    Step,
    k_largest,
    log_probability,
    never_chosen,
    one_by_one,
    take,
)
from transformer_jax.errors import UserError
from transformer_jax.models.caches import repeat_rows

LEAST_TEMPERATURE = 1e-6  # logits divided by a smaller temperature may overflow float32


def _nucleus(probabilities: jax.Array, p: float) -> jax.Array:
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

    def mass(kept):
        return jnp.where(kept, probabilities, 0.0).sum(axis=-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = mass(bits >= middle) >= p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(bits[:, :1])
    least, _ = jax.lax.fori_loop(
        0, 31, halve, (low, jnp.full_like(low, np.float32(2.0).view(np.int32)))
    )
    equal = bits == least
    before = mass(bits > least) + (jnp.cumsum(equal, axis=-1) - 1) * probabilities
    return (bits > least) | (equal & (before < p))


def truncate(
    logits: jax.Array, *, temperature: float, top_k: int, top_p: float
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
    if not (
        LEAST_TEMPERATURE <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1
    ):
        raise UserError(
            f"{temperature=}, {top_k=}, {top_p=}: temperature must be at least "
            f"{LEAST_TEMPERATURE}, top_k at least 0, and top_p in (0, 1]; "
            "use 1.0, 0 and 1.0 to sample from the model's own distribution"
        )
    # IMPOSSIBLE becomes minus infinity at any temperature. The largest logit becomes 0,
    # so it cannot overflow.
    largest = logits.max(axis=-1, keepdims=True)
    logits = jnp.where(logits <= IMPOSSIBLE, -jnp.inf, (logits - largest) / temperature)
    if 0 < top_k < logits.shape[-1]:
        logits, tokens = k_largest(logits, top_k)
    else:
        tokens = jnp.broadcast_to(jnp.arange(logits.shape[-1])[None], logits.shape)
    if top_p < 1:
        logits = jnp.where(_nucleus(jax.nn.softmax(logits), top_p), logits, -jnp.inf)
    return logits, tokens


def penalize(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
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
    known = logits[:, :size]
    return logits.at[:, :size].set(
        jnp.where(seen, jnp.where(known > 0, known / penalty, known * penalty), known)
    )


def row_keys(key: jax.Array, row_ids: jax.Array, count: int) -> jax.Array:
    """Return a key for each of `count` samples of each row, (B · count,).

    `row_ids` (B,) identify the rows.
    """
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(fold, in_axes=(0, None))(
        fold(key, row_ids), jnp.arange(count)
    ).reshape(-1)


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
    own = jax.vmap(jax.random.fold_in)(keys, positions)
    place = jax.vmap(jax.random.categorical)(own, likely)
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0]


def sample(
    step: Step,
    cache: Cache,
    *,
    key: jax.Array,
    row_ids: jax.Array,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    batch_size: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    end_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    change: Change | None = None,
) -> Hypotheses:
    """Draw K = `num_samples` independent outputs for each row, ordered by score.

    Outputs may be equal.

    The score of an output is its log-probability under the model's own distribution,
    before `change` and `truncate`.

    `cache` has B rows; this function repeats each of them K times, with the method
    `repeat` of a cache that has a method `reorder`. `row_ids` (B,) are
    integers that identify the rows. The draws of a row depend only on `key` and its id,
    not on the rest of the batch or on the row's place in it. Ids ≥ `vocab_size` are
    never drawn, although label smoothing gives them some probability. Tokens with a
    probability below about 1e-7 are hardly ever drawn, because of the limited range of
    Gumbel noise in float32.

    Raises ValueError if `temperature`, `top_k` or `top_p` is out of range, see
    `truncate`.
    """
    B, K, T = batch_size, num_samples, max_length
    forbidden = jnp.array(never_chosen(bos_id, pad_id, (eos_id, *end_ids)), jnp.int32)
    keys = row_keys(key, row_ids, K)

    def choose(logits, tokens, position):
        allowed = logits.at[:, forbidden].set(-jnp.inf)
        if vocab_size is not None:
            allowed = allowed.at[:, vocab_size:].set(-jnp.inf)
        if change is not None:
            allowed = change(allowed, tokens, position)
        positions = jnp.broadcast_to(position, keys.shape)
        token = draw(
            allowed, keys, positions, temperature=temperature, top_k=top_k, top_p=top_p
        )
        return token, log_probability(logits, token)

    if hasattr(cache, "reorder"):
        cache = cache.repeat(K)
    else:
        cache = repeat_rows(cache, K)
    ids: dict[str, Any] = {
        "bos_id": bos_id,
        "eos_id": eos_id,
        "pad_id": pad_id,
        "end_ids": end_ids,
    }
    tokens, total = one_by_one(step, cache, choose, rows=B * K, max_length=T, **ids)
    total, order = jax.lax.top_k(total.reshape(B, K), K)
    return Hypotheses(take(tokens.reshape(B, K, T), order), total, total)
