"""Masks against loops over all pairs of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models.masks import CAUSAL, Mask, padding, segments

B, T, S = 2, 5, 7
QUERIES = np.array([[1, 1, 2, 2, 0], [3, 3, 3, 4, 4]], np.int32)
KEYS = np.array([[1, 2, 2, 1, 0, 5, 0], [4, 4, 3, 3, 3, 0, 3]], np.int32)
VALID = np.array([[1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]], bool)


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


def test_nothing_is_masked_by_default():
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
