"""The rows of a cache, when a search has several hypotheses of each batch row.

A cache is any pytree whose leaves have the rows as their first axis. An `Arranged`
cache, e.g. that of an encoder–decoder, repeats and reorders its rows itself.
"""

from typing import Any, Protocol, Self, runtime_checkable

import jax

from transformer_jax.decoding.steps import Step
from transformer_jax.models.caches import pack, reorder_rows, repeat_rows, unpack


@runtime_checkable
class Arranged(Protocol):
    """A cache that repeats and reorders its rows itself, see `models.caches.Cache`."""

    def repeat(self, count: int) -> Self: ...

    def reorder(self, parents: jax.Array) -> Self: ...


def for_beams(cache: Any, beam_size: int) -> Any:
    """Return a cache with `beam_size` beams of each row.

    An `Arranged` cache is made with them: see `EncoderDecoder.start`.
    """
    if isinstance(cache, Arranged):
        return cache
    return repeat_rows(cache, beam_size)


def repeat(cache: Any, count: int) -> Any:
    """Return the cache with every row `count` times, next to each other."""
    if isinstance(cache, Arranged):
        return cache.repeat(count)
    return repeat_rows(cache, count)


def reorder(cache: Any, parents: jax.Array) -> Any:
    """Return the cache in which hypothesis j of row b continues the old hypothesis
    parents[b, j]; `parents` is (B, K).
    """
    if isinstance(cache, Arranged):
        return cache.reorder(parents)
    return reorder_rows(cache, parents)


def packing(step: Step, rows: int) -> Step:
    """Return `step` for a loop whose state is the packed cache: see `pack`."""

    def packed_step(
        packed: Any, newest: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Any]:
        logits, cache = step(unpack(packed, rows), newest, position)
        return logits, pack(cache, rows)

    return packed_step
