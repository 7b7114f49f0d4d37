"""Rows of caches: those that arrange themselves, and those of any other pytree."""

import jax.numpy as jnp

from transformer_jax.decoding.caches import for_beams, packing, reorder, repeat
from transformer_jax.models.caches import Cache, KeyValue, Past, pack, unpack

ROWS = jnp.array([[1], [2]])


def arranged():
    layer = KeyValue(*(jnp.arange(2.0)[:, None, None, None],) * 2)
    return Cache(Past((layer,)), memory=ROWS)


def test_every_row_of_a_pytree_is_repeated():
    assert repeat({"x": ROWS}, 2)["x"].tolist() == [[1], [1], [2], [2]]
    assert for_beams({"x": ROWS}, 2)["x"].tolist() == [[1], [1], [2], [2]]


def test_a_cache_that_arranges_itself_repeats_what_it_does_not_share():
    repeated = repeat(arranged(), 2)
    assert repeated.memory is ROWS
    assert repeated.past.layers[0].key.ravel().tolist() == [0, 0, 1, 1]


def test_a_cache_that_arranges_itself_is_made_with_its_beams():
    cache = arranged()
    assert for_beams(cache, 2) is cache


def test_rows_continue_others_of_their_group():
    parents = jnp.array([[1, 1]])
    assert reorder({"x": ROWS}, parents)["x"].tolist() == [[2], [2]]
    assert reorder(arranged(), parents).past.layers[0].key.ravel().tolist() == [1, 1]


def test_a_single_row_has_no_axis_between_the_steps_of_a_loop():
    def step(cache, newest, position):
        return newest, cache + 1

    for rows, shape in ((1, (3,)), (2, (2, 3))):
        cache = jnp.zeros((rows, 3))
        packed = pack(cache, rows)
        _, after = packing(step, rows)(packed, jnp.zeros(rows), 0)
        assert after.shape == shape
        assert unpack(after, rows).tolist() == (cache + 1).tolist()
