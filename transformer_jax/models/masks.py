"""Masks of attention in a form from which any part can be computed.

So the T × S matrix is never needed.

Shapes: B batch · T query positions · S key positions.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.errors import UserError
from transformer_jax.models.checks import check_ids, check_segments, check_valid

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_segments", "query_segments"],
    meta_fields=["causal"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask with up to three rules.

    `key_segments` are above 0, they equal `query_segments`, and no key is later than
    the query. A rule is left out if its field is None or False. Masks are combined with
    `&`.

    key_segments: (B, S) segment ids, 0 at padding.
    query_segments: (B, T) segment ids. Needs `key_segments`.
    causal: the query at position t may attend to keys 0 … t.
    """

    key_segments: Array | None = None
    query_segments: Array | None = None
    causal: bool = False

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask that allows what both allow.

        Raises:
            ValueError: both have query segments.
        """
        if self.query_segments is not None and other.query_segments is not None:
            raise UserError(
                "both masks have query_segments: "
                "number the segments so that one mask holds them"
            )
        # ids are those of `first`
        first, second = (self, other) if other.query_segments is None else (other, self)
        keys = first.key_segments
        if second.key_segments is not None:
            keys = (
                second.key_segments
                if keys is None
                else jnp.where(second.key_segments > 0, keys, 0)
            )
        return Mask(keys, first.query_segments, self.causal or other.causal)

    def part(
        self, first_query: Array | int, queries: int, first_key: Array | int, keys: int
    ) -> Array | None:
        """Return the mask of a block; None if all is allowed.

        It is (B, 1, queries, keys), or (1, 1, queries, keys).
        """
        allowed: Any = None
        if self.causal:
            order = (
                first_key + jnp.arange(keys)[None]
                <= first_query + jnp.arange(queries)[:, None]
            )
            allowed = order[None, None]
        if self.key_segments is not None:
            below = jax.lax.dynamic_slice_in_dim(
                self.key_segments, first_key, keys, axis=1
            )[:, None, None]
            real = below > 0
            if self.query_segments is not None:
                rows = jax.lax.dynamic_slice_in_dim(
                    self.query_segments, first_query, queries, axis=1
                )
                real &= rows[:, None, :, None] == below
            allowed = real if allowed is None else allowed & real
        return allowed

    def check(self, name: str, rows: Any, queries: Any, keys: Any) -> None:
        """Raise UserError unless the mask is one of (rows, queries, keys)."""
        check_segments(
            f"the queries' side of {name}", self.query_segments, rows, queries
        )
        check_segments(f"the keys' side of {name}", self.key_segments, rows, keys)

    def padded(self, queries: int, keys: int) -> "Mask":
        """Return the mask with lengths rounded up.

        They become multiples of `queries` and `keys`.
        """

        def pad(segments: Array | None, size: int) -> Array | None:
            return (
                None
                if segments is None
                else jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % size)))
            )

        return Mask(
            pad(self.key_segments, keys), pad(self.query_segments, queries), self.causal
        )


CAUSAL = Mask(causal=True)


def as_mask(mask: Mask | None) -> Mask:
    """Return `mask`, or the mask that allows everything if it is None.

    Raises:
        UserError: `mask` is something else, e.g. an array.
    """
    if not isinstance(mask, Mask | None):
        raise UserError(
            f"mask of type {type(mask).__name__}: "
            "must be a masks.Mask; only 'einsum' and 'jax' take arrays"
        )
    return mask or Mask()


def padding(valid: Array) -> Mask:
    """Return the mask that hides padding from every query.

    `valid` (B, S) is True at tokens.
    """
    check_valid("valid", valid)
    return Mask(valid.astype(jnp.int32))


def segments(query_segments: Array, key_segments: Array) -> Mask:
    """Return the mask that allows attention only within a segment.

    The ids are (B, T) and (B, S), 0 at padding.
    """
    for name, ids in (
        ("query_segments", query_segments),
        ("key_segments", key_segments),
    ):
        check_ids(name, ids, 2**31)
    return Mask(key_segments, query_segments)
