"""Caches: what is written, which rows continue others, and what they may see."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models.caches import (
    Cache,
    KeyValue,
    Past,
    SharedPast,
    reorder_rows,
    repeat_rows,
)

B, J, K, S, H = 2, 3, 2, 6, 5
PARENTS = np.array([[2, 2, 0], [1, 0, 1]])


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def empty(rows, room=S):
    return KeyValue(jnp.zeros((rows, K, room, H)), jnp.zeros((rows, K, room, H)))


def test_repeated_rows_are_adjacent():
    repeated = repeat_rows({"x": jnp.array([[1], [2]])}, 2)
    assert repeated["x"][:, 0].tolist() == [1, 1, 2, 2]


def test_hypotheses_continue_others_of_their_own_row_only():
    x = jnp.arange(B * J)
    assert reorder_rows(x, PARENTS).tolist() == [2, 2, 0, 4, 3, 4]


@pytest.mark.parametrize("rows", [1, 2])
def test_new_keys_and_values_replace_the_entries_from_their_position_on(rows):
    old = KeyValue(normal(rows, K, S, H), normal(rows, K, S, H, seed=1))
    new = KeyValue(normal(rows, K, 2, H), normal(rows, K, 2, H, seed=1))
    written = old.write(new, at=3)
    for found, before, added in zip(written, old, new, strict=True):
        expected = before.copy()
        expected[:, :, 3:5] = added
        np.testing.assert_array_equal(found, expected)


def test_what_is_written_has_the_type_of_the_cache():
    new = KeyValue(normal(1, K, 2, H), normal(1, K, 2, H))
    half = KeyValue(*(x.astype(jnp.bfloat16) for x in empty(1)))
    assert half.write(new, at=0).key.dtype == jnp.bfloat16


def test_only_the_past_of_a_cache_is_reordered():
    past = Past((KeyValue(normal(B * J, K, S, H), normal(B * J, K, S, H)),))
    cache = Cache(past, memory=normal(B, 4, H))
    after = cache.reorder(jnp.asarray(PARENTS))
    assert after.memory is cache.memory
    key = past.layers[0].key
    np.testing.assert_array_equal(after.past.layers[0].key, key[[2, 2, 0, 4, 3, 4]])


def test_a_row_sees_no_position_after_its_own_or_before_its_beginning():
    mask = Past((empty(B),)).seen(3, 2, begins=jnp.array([0, 2]))
    allowed = np.asarray(mask.allowed)[:, 0]
    assert allowed[0].astype(int).tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert allowed[1].astype(int).tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]]


def test_a_hypothesis_owns_what_the_hypotheses_that_it_continues_have_written():
    """After two positions and a reordering in between, each row of `owned` is the
    path of one hypothesis.
    """
    cache = SharedPast((empty(1, 2 * J),), jnp.zeros((1, J, 2 * J), bool))
    cache = cache.advance(0).reorder(jnp.asarray(PARENTS[:1])).advance(1)
    assert cache.owned[0].astype(int).tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    assert cache.keys().tolist() == [0, 0, 0, 1, 1, 1]
    assert cache.entry(1) == J
