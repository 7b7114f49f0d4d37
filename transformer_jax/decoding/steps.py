"""Steps of a model, and the search that takes one token at a time.

See the package for the shapes.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Cache = Any
Step = Callable[[Cache, jax.Array, jax.Array], tuple[jax.Array, Cache]]
# Changes scores (N, V) of the next token, given the tokens so far (N, S) and the
# position of the newest, see `rules`.
Change = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

IMPOSSIBLE = -1e9  # used for log 0; finite, so that differences are never NaN


class Hypotheses(NamedTuple):
    """The K best outputs of each row, best first, or K samples.

    From a search, outputs that end in EOS come first, then outputs cut off at T tokens;
    each group is ordered by score. Samples are ordered by score alone. If there are
    fewer than K outputs, which happens with tiny vocabularies, the remaining places
    contain only PAD, and their scores are minus infinity.
    """

    # (B, K, T) int32: without BOS, with EOS, then PAD (EOS if the vocabulary has no
    # PAD)
    tokens: jax.Array
    scores: jax.Array  # (B, K) float32: log P(Y|X) / lp(Y)
    # (B, K) float32: log P(Y|X), summed over the tokens including EOS
    log_probabilities: jax.Array


def certain(token: int, size: int) -> jax.Array:
    """Return logits (V,) of a distribution over `size` tokens in which `token` has
    probability 1.
    """
    return jnp.where(jnp.arange(size) == token, 0.0, IMPOSSIBLE)


def k_largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return `jax.lax.top_k(x, k)`, with the same order of ties, in about half the time
    for a vocabulary on CPUs.

    The last axis is split into groups of adjacent values. The k largest values are in
    the k groups with the largest maxima, so only these groups are searched.
    """
    size = math.gcd(x.shape[-1], 16)
    groups = x.reshape(*x.shape[:-1], -1, size)
    if size == 1 or groups.shape[-2] <= k:
        return jax.lax.top_k(x, k)
    # sorted, so that ties are ordered as in x
    chosen = jnp.sort(jax.lax.top_k(groups.max(axis=-1), k)[1], axis=-1)
    members = jnp.take_along_axis(groups, chosen[..., None], axis=-2)
    values, places = jax.lax.top_k(members.reshape(*x.shape[:-1], -1), k)
    return values, jnp.take_along_axis(
        chosen, places // size, axis=-1
    ) * size + places % size


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Return the log-probability (N,) of a token (N,) by logits (N, V)."""
    return jnp.take_along_axis(logits, token[:, None], axis=-1)[
        :, 0
    ] - jax.nn.logsumexp(logits, axis=-1)


def best_tokens(
    logits: jax.Array, k: int, forbidden: list[int]
) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities and ids (N, C), C ≥ k if V ≥ k, of tokens that include
    the k best allowed ones.

    Forbidden tokens have the log-probability IMPOSSIBLE.
    """
    values, tokens = k_largest(logits, min(k + len(forbidden), logits.shape[-1]))
    log_probabilities = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    barred = jnp.isin(tokens, jnp.array(forbidden, jnp.int32))
    return jnp.where(
        barred, IMPOSSIBLE, jnp.maximum(log_probabilities, IMPOSSIBLE)
    ), tokens


def never_chosen(
    bos_id: int | None, pad_id: int | None, ends: Sequence[int]
) -> list[int]:
    """Return BOS and PAD, unless they are among `ends`, the ids that end an output."""
    return sorted({i for i in (bos_id, pad_id) if i is not None} - {*ends})


def is_end(tokens: jax.Array, ends: Sequence[int]) -> jax.Array:
    """Return True where a token is one of the ids `ends`, of which there is at least
    one.
    """
    return functools.reduce(operator.or_, [tokens == i for i in ends])


def one_by_one(
    step: Step,
    cache: Cache,
    choose: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    *,
    rows: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    end_ids: Sequence[int] = (),
) -> tuple[jax.Array, jax.Array]:
    """Choose one token per row and step until EOS → tokens (N, T) and their total
    log-probabilities (N,).

    `choose` maps logits (N, V), the tokens so far (N, 1 + T) and the position of the
    newest to the next token of each row and its log-probability, both (N,).
    """
    fill = eos_id if pad_id is None else pad_id

    def unfinished(state):
        position, _, _, finished, _ = state
        return (position < max_length) & ~finished.all()

    def advance(state):
        position, tokens, total, finished, cache = state
        logits, cache = step(cache, tokens[:, position], position)
        token, log_probability = choose(logits, tokens, position)
        total += jnp.where(finished, 0.0, log_probability)
        tokens = tokens.at[:, position + 1].set(jnp.where(finished, fill, token))
        return (
            position + 1,
            tokens,
            total,
            finished | is_end(token, (eos_id, *end_ids)),
            cache,
        )

    tokens = jnp.full((rows, 1 + max_length), fill, jnp.int32).at[:, 0].set(bos_id)
    total, finished = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, bool)
    state = (jnp.int32(0), tokens, total, finished, cache)
    _, tokens, total, _, _ = jax.lax.while_loop(unfinished, advance, state)
    return tokens[:, 1:], total


def take(beams: Any, chosen: jax.Array) -> Any:
    """Select the entries `chosen` (B, k) from leaves (B, K, …) → (B, k, …), row by
    row, so that B may be sharded.
    """
    take = jax.vmap(lambda row, i: row.at[i].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda x: take(x, chosen), beams)


def greedy(
    step: Step,
    cache: Cache,
    *,
    batch_size: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    end_ids: Sequence[int] = (),
    change: Change | None = None,
) -> Hypotheses:
    """Choose the most probable token at every position until EOS. K = 1, and scores are
    log-probabilities.

    With `change`, the token is the best one by the changed logits. `change` excludes
    PAD and BOS.
    """
    forbidden = never_chosen(bos_id, pad_id, (eos_id, *end_ids))

    def choose(logits, tokens, position):
        if change is not None:
            token = change(logits, tokens, position).argmax(axis=-1).astype(jnp.int32)
            return token, log_probability(logits, token)
        log_probabilities, candidates = best_tokens(logits, 1, forbidden)
        best = log_probabilities.argmax(axis=-1, keepdims=True)
        return jnp.take_along_axis(candidates, best, axis=-1)[
            :, 0
        ], log_probabilities.max(axis=-1)

    ids: dict[str, Any] = {
        "bos_id": bos_id,
        "eos_id": eos_id,
        "pad_id": pad_id,
        "end_ids": end_ids,
    }
    tokens, total = one_by_one(
        step, cache, choose, rows=batch_size, max_length=max_length, **ids
    )
    return Hypotheses(tokens[:, None], total[:, None], total[:, None])
