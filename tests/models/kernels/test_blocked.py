"""Blocked attention against the reference, which is tested against NumPy: values,
gradients, dropout, memory.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models import masks
from transformer_jax.models.attention import dot_product_attention
from transformer_jax.models.kernels import blocked, platforms
from transformer_jax.models.kernels.blocked import blocked_attention

B, T, S, N, H, W = 2, 37, 53, 3, 5, 7
# the second row has padding
SEGMENTS = np.array([[1] * 5 + [2] * 19 + [3] * 13, [4] * 23 + [0] * 14], np.int32)
# no key for the segment 3
KEYS = np.array([[1] * 17 + [2] * 3 + [7] * 33, [4] * 31 + [0] * 22], np.int32)


def normal(*shape, seed=0):
    return jnp.asarray(
        np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32
    )


def apart(a, b):
    return max(
        float(jnp.abs(x - y).max() / jnp.abs(x).max())
        for x, y in zip(a, b, strict=True)
    )


MASKS = {
    "none": (S, None),
    "causal": (T, masks.CAUSAL),
    "padding": (S, masks.padding(jnp.asarray(KEYS > 0))),
    "segments": (S, masks.segments(jnp.asarray(SEGMENTS), jnp.asarray(KEYS))),
    "packed": (
        T,
        masks.CAUSAL & masks.segments(jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS)),
    ),
}


def reference(query, key, value, **options):
    """Compute the reference, with key-value heads copied for the heads that share
    them.
    """
    key, value = (
        jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value)
    )
    return dot_product_attention(query, key, value, **options)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads"),
    [*((kind, N, N) for kind in MASKS), ("packed", 6, 2), ("padding", N, 1)],
)
def test_equals_the_reference(kind, heads, kv_heads, dropout_rate):
    keys, mask = MASKS[kind]
    q, k, v, cotangent = (
        normal(B, T, heads, H),
        normal(B, keys, kv_heads, H, seed=1),
        normal(B, keys, kv_heads, W),
        normal(B, T, heads, W),
    )
    options = {
        "dropout_rate": dropout_rate,
        "dropout_key": jax.random.key(3) if dropout_rate else None,
    }
    dense = None if mask is None else mask.part(0, T, 0, keys)

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend, *x):
        output, pull = jax.vjp(attend, *x)
        return output, *pull(cotangent)

    expected = both(lambda *x: reference(*x, mask=dense, **options), q, k, v)
    found = both(
        lambda *x: blocked_attention(*x, mask=mask, block=16, **options), q, k, v
    )
    assert apart(expected, found) < 2e-6


def test_a_query_without_keys_gets_zeros_and_no_gradient():
    _, mask = MASKS["segments"]
    q, k, v = normal(B, T, N, H), normal(B, S, N, H), normal(B, S, N, W)
    alone = np.isin(SEGMENTS, [0, 3])
    output, gradient = jax.jit(
        jax.value_and_grad(
            lambda q: blocked_attention(q, k, v, mask=mask, block=8).sum()
        )
    )(q)
    np.testing.assert_array_equal(
        blocked_attention(q, k, v, mask=mask, block=8)[alone], 0
    )
    assert np.isfinite(output)
    assert (np.asarray(gradient)[alone] == 0).all()
    assert (np.asarray(gradient)[~alone] != 0).any(axis=(1, 2)).all()


def test_bfloat16_products():
    q, k, v = normal(B, T, N, H), normal(B, T, N, H, seed=1), normal(B, T, N, W)
    exact = blocked_attention(q, k, v, mask=masks.CAUSAL, block=16)
    rounded = blocked_attention(q, k, v, mask=masks.CAUSAL, block=16, dtype="bfloat16")
    assert rounded.dtype == jnp.float32
    assert 1e-4 < apart([exact], [rounded]) < 2e-2


@pytest.mark.parametrize(
    ("length", "block", "size"),
    [(1, 128, 8), (128, 128, 128), (129, 128, 72), (300, 128, 104)],
)
def test_blocks_are_equal_and_as_few_as_possible(length, block, size):
    assert blocked._divided(length, block) == size


def test_blocks_above_the_diagonal_are_left_out():
    plan = blocked._Plan(
        (2, 4, 24, 24),
        (1, 2, 8, 8),
        causal=True,
        dropout_rate=0.0,
        dtype="float32",
    )
    assert plan.blocks().tolist() == [
        [b, n, t, s]
        for b in (0, 1)
        for n in (0, 2)
        for t in (0, 8, 16)
        for s in (0, 8, 16)
        if s <= t
    ]


def test_memory_grows_with_the_length_not_its_square():
    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        step = jax.grad(
            lambda q, k, v: blocked_attention(q, k, v, mask=masks.CAUSAL).sum(),
            argnums=(0, 1, 2),
        )
        return (
            jax.jit(step).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
        )

    short, long = temporaries(1024), temporaries(4096)
    assert long < 4.5 * short
    assert long < 4096 * 4096  # bytes: a quarter of one matrix of weights


@pytest.mark.parametrize(
    ("rows", "heads", "scores", "block"),
    [
        (8, 8, 2**18, (1, 2)),  # long sequences: some heads of a row
        (8, 6, 2**18, (1, 2)),
        (8, 8, 2**14, (4, 8)),  # short ones: some rows
        (7, 8, 2**14, (1, 8)),
        (4, 4, 2**20, (1, 1)),  # the scores of one head exceed the cache
    ],
)
def test_blocks_of_a_cpu_fit_its_cache(rows, heads, scores, block, monkeypatch):
    monkeypatch.setattr(platforms, "cores", lambda: 2)
    assert blocked._rows_and_heads(rows, heads, scores) == block


def test_blocks_elsewhere_have_all_rows_and_heads(monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: "gpu")
    assert blocked._rows_and_heads(8, 8, 2**18) == (8, 8)


def test_rows_that_devices_share_are_in_one_block():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert blocked._rows_and_heads(8, 8, 2**18) == (8, 8)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_block_may_have_some_of_the_rows_and_heads(rows, monkeypatch):
    """Masks and dropout of a block are those of its rows and heads."""
    monkeypatch.setattr(blocked, "SCORES_PER_CORE", 4 * 16 * 16)
    monkeypatch.setattr(platforms, "cores", lambda: 1)
    q, k, v = (
        normal(rows, T, 6, H),
        normal(rows, T, 6, H, seed=1),
        normal(rows, T, 6, W),
    )
    valid = np.arange(T) < np.arange(T - rows, T)[:, None]
    mask = masks.CAUSAL & masks.padding(jnp.asarray(valid))
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
    found = blocked_attention(q, k, v, mask=mask, block=16, **options)
    expected = reference(q, k, v, mask=mask.whole(T, T), **options)
    assert apart([expected], [found]) < 2e-6
