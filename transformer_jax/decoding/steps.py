"""Steps of a model, and the search that takes one token at a time. See the package for the shapes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Cache = Any
Step = Callable[[Cache, jax.Array, jax.Array], tuple[jax.Array, Cache]]

IMPOSSIBLE = -1e9  # used for log 0; finite, so that differences are never NaN


class Hypotheses(NamedTuple):
    """The K best outputs of each row, best first, or K samples.

    From a search, outputs that end in EOS come first, then outputs cut off at T tokens; each group is ordered by score.
    Samples are ordered by score alone. If there are fewer than K outputs, which happens with tiny vocabularies, the
    remaining places contain only PAD, and their scores are minus infinity.
    """

    tokens: jax.Array  # (B, K, T) int32: without BOS, with EOS, then PAD (EOS if the vocabulary has no PAD)
    scores: jax.Array  # (B, K) float32: log P(Y|X) / lp(Y)
    log_probabilities: jax.Array  # (B, K) float32: log P(Y|X), summed over the tokens including EOS


def certain(token: int, size: int) -> jax.Array:
    """Return logits (V,) of a distribution over `size` tokens in which `token` has probability 1."""
    return jnp.where(jnp.arange(size) == token, 0.0, IMPOSSIBLE)


def k_largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return `jax.lax.top_k(x, k)`, with the same order of ties, in about half the time for a vocabulary on CPUs.

    The last axis is split into groups of adjacent values. The k largest values are in the k groups with the largest
    maxima, so only these groups are searched.
    """
    size = math.gcd(x.shape[-1], 16)
    groups = x.reshape(*x.shape[:-1], -1, size)
    if size == 1 or groups.shape[-2] <= k:
        return jax.lax.top_k(x, k)
    chosen = jnp.sort(jax.lax.top_k(groups.max(axis=-1), k)[1], axis=-1)  # sorted, so that ties are ordered as in x
    members = jnp.take_along_axis(groups, chosen[..., None], axis=-2)
    values, places = jax.lax.top_k(members.reshape(*x.shape[:-1], -1), k)
    return values, jnp.take_along_axis(chosen, places // size, axis=-1) * size + places % size


def best_tokens(logits: jax.Array, k: int, forbidden: list[int]) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities and ids (N, C), C ≥ k if V ≥ k, of tokens that include the k best allowed ones.

    Forbidden tokens have the log-probability IMPOSSIBLE.
    """
    values, tokens = k_largest(logits, min(k + len(forbidden), logits.shape[-1]))
    log_probabilities = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    barred = jnp.isin(tokens, jnp.array(forbidden, jnp.int32))
    return jnp.where(barred, IMPOSSIBLE, jnp.maximum(log_probabilities, IMPOSSIBLE)), tokens


def never_chosen(bos_id: int | None, eos_id: int | None, pad_id: int | None) -> list[int]:
    return sorted({i for i in (bos_id, pad_id) if i is not None} - {eos_id})


def one_by_one(
    step: Step,
    cache: Cache,
    choose: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    *,
    rows: int,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Choose one token per row and step until EOS → tokens (N, T) and their total log-probabilities (N,).

    `choose` maps logits (N, V) and a position to the next token of each row and its log-probability, both (N,).
    """
    fill = eos_id if pad_id is None else pad_id

    def unfinished(state):
        position, _, _, finished, _ = state
        return (position < max_length) & ~finished.all()

    def advance(state):
        position, tokens, total, finished, cache = state
        logits, cache = step(cache, tokens[:, position], position)
        token, log_probability = choose(logits, position)
        total += jnp.where(finished, 0.0, log_probability)
        tokens = tokens.at[:, position + 1].set(jnp.where(finished, fill, token))
        return position + 1, tokens, total, finished | (token == eos_id), cache

    tokens = jnp.full((rows, 1 + max_length), fill, jnp.int32).at[:, 0].set(bos_id)
    total, finished = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, bool)
    state = (jnp.int32(0), tokens, total, finished, cache)
    _, tokens, total, _, _ = jax.lax.while_loop(unfinished, advance, state)
    return tokens[:, 1:], total


def take(beams: Any, chosen: jax.Array) -> Any:
    """Select the entries `chosen` (B, k) from leaves (B, K, …) → (B, k, …), row by row, so that B may be sharded."""
    take = jax.vmap(lambda row, i: row.at[i].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda x: take(x, chosen), beams)


def greedy(
    step: Step, cache: Cache, *, batch_size: int, max_length: int, bos_id: int, eos_id: int, pad_id: int | None
) -> Hypotheses:
    """Choose the most probable token at every position until EOS. K = 1, and scores are log-probabilities."""
    forbidden = never_chosen(bos_id, eos_id, pad_id)

    def choose(logits, _):
        log_probabilities, candidates = best_tokens(logits, 1, forbidden)
        best = log_probabilities.argmax(axis=-1, keepdims=True)
        return jnp.take_along_axis(candidates, best, axis=-1)[:, 0], log_probabilities.max(axis=-1)

    ids: dict[str, Any] = {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id}
    tokens, total = one_by_one(step, cache, choose, rows=batch_size, max_length=max_length, **ids)
    return Hypotheses(tokens[:, None], total[:, None], total[:, None])
