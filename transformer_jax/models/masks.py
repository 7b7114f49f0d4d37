"""Masks of attention.

A mask is a set of rules, from which any part of it can be computed. So the T × S matrix
need not be in memory.

Shapes: B batch · T query positions · S key positions · N heads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.errors import UserError
from transformer_jax.models.checks import (
    MEANING,
    check_boolean,
    check_ids,
    check_mask,
    check_segments,
    check_valid,
)

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_segments", "query_segments", "allowed"],
    meta_fields=["causal"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """Rules of attention: a query may attend to a key if all of them hold.

    A rule is left out if its field is None or False. Masks are combined with `&`.

    key_segments: (B, S) segment ids. The key's id is above 0, which marks padding.
    query_segments: (B, T) segment ids. The query's id is that of the key. Needs
        `key_segments`.
    causal: The key is not later than the query.
    allowed: an array that broadcasts to (B, N, T, S). It is True at the pair. Kernels
        of accelerators do not support this rule.
    """

    key_segments: Array | None = None
    query_segments: Array | None = None
    causal: bool = False
    allowed: Array | None = None

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask that allows what both allow.

        Raises:
            ValueError: both have query segments, or an array is not boolean.
        """
        for mask in (self, other):
            if mask.allowed is not None:
                check_boolean("mask", mask.allowed, f"must be boolean, {MEANING}")
        if self.query_segments is not None and other.query_segments is not None:
            raise UserError(
                "both masks have query_segments: "
                "number the segments so that one mask holds them"
            )
        ids = self
        padding = other
        if other.query_segments is not None:
            ids = other
            padding = self
        keys = ids.key_segments
        if keys is None:
            keys = padding.key_segments
        elif padding.key_segments is not None:
            keys = jnp.where(padding.key_segments > 0, keys, 0)
        return Mask(
            keys,
            ids.query_segments,
            self.causal or other.causal,
            _both(self.allowed, other.allowed),
        )

    def part(
        self,
        first_query: Array | int,
        queries: int,
        first_key: Array | int,
        keys: int,
    ) -> Array | None:
        """Return a block of the mask without `allowed`; None if it allows everything.

        It is (B, 1, queries, keys), or (1, 1, queries, keys).
        """
        allowed: Array | None = None
        if self.causal:
            query_positions = first_query + jnp.arange(queries)[:, None]
            key_positions = first_key + jnp.arange(keys)[None]
            allowed = (key_positions <= query_positions)[None, None]
        if self.key_segments is not None:
            key_ids = jax.lax.dynamic_slice_in_dim(
                self.key_segments, first_key, keys, axis=1
            )[:, None, None]
            same = key_ids > 0
            if self.query_segments is not None:
                query_ids = jax.lax.dynamic_slice_in_dim(
                    self.query_segments, first_query, queries, axis=1
                )
                same &= query_ids[:, None, :, None] == key_ids
            allowed = _both(allowed, same)
        return allowed

    def of_rows(self, first: Array | int, count: int) -> "Mask":
        """Return the mask of `count` rows from `first` on, without `allowed`."""

        def take(segments: Array | None) -> Array | None:
            if segments is None or segments.shape[0] in (1, count):
                return segments
            return jax.lax.dynamic_slice_in_dim(segments, first, count)

        key_segments = take(self.key_segments)
        query_segments = take(self.query_segments)
        return Mask(key_segments, query_segments, self.causal)

    def whole(self, queries: int, keys: int) -> Array | None:
        """Return the mask, which broadcasts to (B, N, queries, keys).

        None stands for a mask that allows everything.
        """
        return _both(self.part(0, queries, 0, keys), self.allowed)

    def check(
        self,
        name: str,
        rows: Any,
        heads: Any,
        queries: Any,
        keys: Any,
    ) -> None:
        """Raise UserError unless the mask is one of (rows, heads, queries, keys)."""
        check_segments(
            f"the queries' side of {name}", self.query_segments, rows, queries
        )
        check_segments(f"the keys' side of {name}", self.key_segments, rows, keys)
        if self.allowed is not None:
            check_mask(name, self.allowed, (rows, heads, queries, keys))

    def padded(self, queries: int, keys: int) -> "Mask":
        """Return the mask with lengths rounded up.

        They become multiples of `queries` and `keys`.
        """

        def pad(segments: Array | None, size: int) -> Array | None:
            if segments is None:
                return None
            return jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % size)))

        return dataclasses.replace(
            self,
            key_segments=pad(self.key_segments, keys),
            query_segments=pad(self.query_segments, queries),
        )


ALL = Mask()
CAUSAL = Mask(causal=True)


def as_mask(mask: Mask | Array | None) -> Mask:
    """Return `mask` as a `Mask`. None allows everything.

    An array is True where attention is allowed, and broadcasts to (B, N, T, S).
    """
    if isinstance(mask, Mask):
        return mask
    return ALL if mask is None else Mask(allowed=mask)


def only_rules(mask: Mask | Array | None) -> Mask:
    """Return `mask` as a `Mask` from which any part can be computed.

    Raises:
        UserError: `mask` is an array, or has one.
    """
    mask = as_mask(mask)
    if mask.allowed is not None:
        raise UserError(
            f"mask: is an array of shape {mask.allowed.shape}, but this implementation "
            "of attention needs rules; combine masks.CAUSAL, masks.padding(valid) and "
            "masks.segments(…) with &, or use 'einsum'"
        )
    return mask


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
    check_ids("query_segments", query_segments, 2**31)
    check_ids("key_segments", key_segments, 2**31)
    return Mask(key_segments, query_segments)


def _both(a: Array | None, b: Array | None) -> Array | None:
    """Return a & b, where None is True everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
