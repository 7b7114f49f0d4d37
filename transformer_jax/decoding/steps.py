"""Parts that all searches share: steps of a model, outputs, and their ends.

See the package for the shapes.
"""

import functools
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


def take(beams: Any, chosen: jax.Array) -> Any:
    """Select the entries `chosen` (B, k) from leaves (B, K, …) → (B, k, …), row by
    row, so that B may be sharded.
    """
    take = jax.vmap(lambda row, i: row.at[i].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda x: take(x, chosen), beams)
