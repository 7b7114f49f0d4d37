"""Masks against loops over all pairs of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.models.masks import (
    CAUSAL,
    Mask,
    as_mask,
    only_rules,
    padding,
    segments,
)

B, T, S, N = 2, 5, 7, 3
QUERIES = np.array([[1, 1, 2, 2, 0], [3, 3, 3, 4, 4]], np.int32)
KEYS = np.array([[1, 2, 2, 1, 0, 5, 0], [4, 4, 3, 3, 3, 0, 3]], np.int32)
VALID = np.array([[1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]], bool)


def some_mask(*shape):
    return np.random.default_rng(shape).random(shape) < 0.6


def within(b, t, s):
    return QUERIES[b, t] == KEYS[b, s] > 0


CASES = {
    "causal": (CAUSAL, lambda b, t, s: s <= t),
    "padding": (padding(jnp.asarray(VALID)), lambda b, t, s: VALID[b, s]),
    "segments": (segments(jnp.asarray(QUERIES), jnp.asarray(KEYS)), within),
    "causal and padding": (
        CAUSAL & padding(jnp.asarray(VALID)),
        lambda b, t, s: s <= t and VALID[b, s],
    ),
    "padding and segments": (
        padding(jnp.asarray(VALID))
        & segments(jnp.asarray(QUERIES), jnp.asarray(KEYS))
        & CAUSAL,
        lambda b, t, s: VALID[b, s] and within(b, t, s) and s <= t,
    ),
    "segments and padding": (
        segments(jnp.asarray(QUERIES), jnp.asarray(KEYS)) & padding(jnp.asarray(VALID)),
        lambda b, t, s: VALID[b, s] and within(b, t, s),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("t0", "queries", "s0", "keys"), [(0, T, 0, S), (2, 3, 4, 2)])
def test_parts(name, t0, queries, s0, keys):
    mask, allowed = CASES[name]
    part = jax.jit(lambda mask, t0, s0: mask.part(t0, queries, s0, keys))(mask, t0, s0)
    whole = np.array(
        [[[allowed(b, t, s) for s in range(S)] for t in range(T)] for b in range(B)]
    )
    expected = whole[:, None, t0 : t0 + queries, s0 : s0 + keys]
    np.testing.assert_array_equal(np.broadcast_to(part, expected.shape), expected)


@pytest.mark.parametrize(
    ("t0", "queries", "s0", "keys"),
    [
        (0, 5, 0, 5),
        (0, 3, 0, 7),
        (4, 3, 0, 7),
        (6, 1, 0, 7),
        (0, 5, 0, 2),
        (2, 3, 1, 4),
    ],
)
def test_causal(t0, queries, s0, keys):
    part = np.asarray(CAUSAL.part(t0, queries, s0, keys))
    assert part.shape == (1, 1, queries, keys)
    for t, s in np.ndindex(queries, keys):
        assert part[0, 0, t, s] == (s0 + s <= t0 + t)


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_padding(dtype):
    mask = np.asarray(padding(jnp.asarray(VALID, dtype)).whole(T, S))
    assert mask.shape == (B, 1, 1, S)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask[:, 0, 0], VALID)


def test_arrays_and_rules_are_combined():
    a, b = some_mask(B, 1, 1, S), some_mask(1, N, T, S)
    combined = Mask(allowed=a) & CAUSAL & Mask(allowed=b) & padding(jnp.asarray(VALID))
    whole = np.asarray(combined.whole(T, S))
    assert whole.shape == (B, N, T, S)
    for row, n, t, s in np.ndindex(B, N, T, S):
        expected = a[row, 0, 0, s] and s <= t and b[0, n, t, s] and VALID[row, s]
        assert whole[row, n, t, s] == expected
    np.testing.assert_array_equal((Mask() & Mask(allowed=a)).whole(T, S), a)
    # a part does not know the array
    np.testing.assert_array_equal(
        combined.part(0, T, 0, S), (CAUSAL & padding(jnp.asarray(VALID))).whole(T, S)
    )


def test_what_is_a_mask():
    allowed = some_mask(B, 1, 1, S)
    assert as_mask(CAUSAL) is CAUSAL
    assert as_mask(None).whole(T, S) is None
    assert as_mask(allowed).whole(T, S) is allowed
    assert only_rules(CAUSAL) is CAUSAL
    for array in (allowed, Mask(allowed=allowed)):
        with pytest.raises(UserError, match=r"is an array of shape \(2, 1, 1, 7\)"):
            only_rules(array)


def test_nothing_is_masked_by_default():
    assert Mask().whole(T, S) is None
    assert Mask().part(0, T, 0, S) is None
    assert (Mask() & Mask()).part(0, T, 0, S) is None


def test_padded_positions_are_masked():
    mask = padding(jnp.asarray(VALID)).padded(8, 4)
    part = mask.part(0, 8, 0, 8)
    np.testing.assert_array_equal(part[:, 0, 0], np.pad(VALID, ((0, 0), (0, 1))))


def test_segments_of_two_masks_are_refused():
    one = segments(jnp.asarray(QUERIES), jnp.asarray(KEYS))
    with pytest.raises(ValueError, match="both masks have query_segments"):
        one & one
