"""Masks of attention in a form from which any part can be computed, so that the T × S matrix is never needed.

Shapes: B batch · T query positions · S key positions.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


@flax.struct.dataclass
class Mask:
    """Where attention is allowed: `key_segments` are above 0, equal `query_segments`, and keys precede queries.

    Each of the three rules is left out if its field is None or False. Masks are combined with `&`.

    key_segments: (B, S) segment ids, 0 at padding.
    query_segments: (B, T) segment ids. Needs `key_segments`.
    causal: the query at position t may attend to keys 0 … t.
    """

    key_segments: Array | None = None
    query_segments: Array | None = None
    causal: bool = flax.struct.field(pytree_node=False, default=False)

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask that allows what both allow.

        Raises:
            ValueError: both have query segments.
        """
        if self.query_segments is not None and other.query_segments is not None:
            raise ValueError("both masks have query_segments: number the segments so that one mask holds them")
        keys = [mask.key_segments for mask in (self, other) if mask.key_segments is not None]
        queries = other.query_segments if self.query_segments is None else self.query_segments
        if len(keys) == 2:
            valid, ids = (other, self) if self.query_segments is not None else (self, other)
            keys = [jnp.where(valid.key_segments > 0, ids.key_segments, 0)]
        return Mask(keys[0] if keys else None, queries, self.causal or other.causal)

    def part(self, first_query: Array | int, queries: int, first_key: Array | int, keys: int) -> Array | None:
        """Return the mask (B, 1, queries, keys), or (1, 1, queries, keys), of a block; None if all is allowed."""
        allowed: Any = None
        if self.causal:
            order = first_key + jnp.arange(keys)[None] <= first_query + jnp.arange(queries)[:, None]
            allowed = order[None, None]
        if self.key_segments is not None:
            below = jax.lax.dynamic_slice_in_dim(self.key_segments, first_key, keys, axis=1)[:, None, None]
            real = below > 0
            if self.query_segments is not None:
                rows = jax.lax.dynamic_slice_in_dim(self.query_segments, first_query, queries, axis=1)
                real &= rows[:, None, :, None] == below
            allowed = real if allowed is None else allowed & real
        return allowed

    def padded(self, queries: int, keys: int) -> "Mask":
        """Return the mask with lengths rounded up to multiples of `queries` and `keys`."""

        def pad(segments: Array | None, size: int) -> Array | None:
            return None if segments is None else jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % size)))

        return self.replace(key_segments=pad(self.key_segments, keys), query_segments=pad(self.query_segments, queries))


CAUSAL = Mask(causal=True)


def padding(valid: Array) -> Mask:
    """Return the mask that hides padding from every query. `valid` (B, S) is True at tokens."""
    return Mask(valid.astype(jnp.int32))


def segments(query_segments: Array, key_segments: Array) -> Mask:
    """Return the mask that allows attention only within a segment. The ids are (B, T) and (B, S), 0 at padding."""
    return Mask(key_segments, query_segments)
