"""The kernel for short sequences against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernels import (
    MASKS,
    B,
    N,
    T,
    W,
    apart,
    normal,
    reference,
    some_inputs,
    with_gradients,
)
from transformer_jax.models import masks
from transformer_jax.models.kernels import short
from transformer_jax.models.kernels.accelerators import short_attention


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "width"),
    [
        *((kind, 3, 3, 64) for kind in MASKS),
        ("packed", 4, 2, 128),
        ("causal padding", 5, 5, 8),
    ],
)
def test_short_attention_is_the_reference(kind, heads, kv_heads, width):
    """There is one sentence per block.

    Heads of 64 and 8 features share 128 columns, which they fill partly.
    """
    keys, mask = MASKS[kind]
    agrees(mask, heads, kv_heads, width, B, T, keys)


SENTENCES = [
    (5, 20, 33),
    (3, 64, 50),
    (7, 16, 16),
    (1, 5, 130),
    (1, 300, 170),
    (1, 170, 300),
]


# Each size with both rules, and one size with each rule alone and with none.
@pytest.mark.parametrize(
    ("rows", "length", "keys", "segmented", "causal"),
    [
        pytest.param(
            *(*size, segmented, causal),
            marks=[pytest.mark.slow]
            * (size != SENTENCES[0] and not (segmented and causal)),
        )
        for size in SENTENCES
        for segmented in (False, True)
        for causal in (False, True)
    ],
)
def test_short_attention_keeps_sentences_of_a_block_apart(
    rows, length, keys, segmented, causal
):
    """Up to eight sentences form a block.

    The last block is not full. Long sentences have several chunks of queries.
    """
    random = np.random.default_rng([rows, length])
    mask = masks.Mask(causal=causal)
    if segmented:
        queries, ids = (
            jnp.asarray(random.integers(0, 3, (rows, n))) for n in (length, keys)
        )
        mask &= masks.segments(queries, ids)
    agrees(mask, 2, 2, 32, rows, length, keys)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("none", "packed")))
        for kind in MASKS
    ],
)
def test_short_attention_drops_the_weights_that_the_reference_drops(kind):
    keys, mask = MASKS[kind]
    agrees(mask, 3, 3, 64, B, T, keys, dropout_rate=0.3, dropout_key=jax.random.key(4))


def test_short_attention_drops_other_weights_in_each_sentence_of_a_block():
    agrees(
        masks.CAUSAL,
        5,
        5,
        8,
        7,
        20,
        33,
        dropout_rate=0.5,
        dropout_key=jax.random.key(7),
    )


@pytest.mark.parametrize("mask", [None, masks.CAUSAL])
def test_heads_of_several_blocks_and_groups_drop_weights_of_their_own(
    mask, monkeypatch
):
    """Each block and each group has as few heads as possible: those of 128 columns."""
    monkeypatch.setattr(short, "BLOCK", 1)
    monkeypatch.setattr(short, "SCORES", 1)
    short._kernels.cache_clear()
    agrees(mask, 5, 5, 64, 2, T, T, dropout_rate=0.3, dropout_key=jax.random.key(1))
    short._kernels.cache_clear()


def agrees(
    mask,
    heads,
    kv_heads,
    width,
    rows,
    length,
    keys,
    *,
    dtype="float32",
    within=2e-6,
    **dropping,
):
    """Compare short attention with the reference, and queries without keys with
    zeros.
    """
    inputs = (
        normal(rows, length, heads, width),
        *(normal(rows, keys, kv_heads, width, seed=seed) for seed in (1, 2)),
    )
    cotangent = normal(rows, length, heads, width, seed=3)
    attend = functools.partial(
        short_attention, mask=mask, interpret=True, dtype=dtype, **dropping
    )
    expected, found = (
        jax.jit(functools.partial(with_gradients, attend))(inputs, cotangent)
        for attend in (functools.partial(reference, mask=mask, **dropping), attend)
    )
    assert apart(expected, found) < within
    allowed = None if mask is None else mask.part(0, length, 0, keys)
    if allowed is not None:
        alone = ~np.broadcast_to(allowed, (rows, 1, length, keys))[:, 0].any(axis=-1)
        np.testing.assert_array_equal(np.asarray(found[0])[alone], 0)
        np.testing.assert_array_equal(np.asarray(found[1])[alone], 0)


def test_short_attention_computes_in_bfloat16():
    query, key, value = some_inputs(T, width=W)
    output = short_attention(
        query, key, value, mask=masks.CAUSAL, dtype="bfloat16", interpret=True
    )
    assert output.dtype == jnp.float32
    np.testing.assert_array_equal(
        output, output.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert (
        1e-4 < apart([reference(query, key, value, mask=masks.CAUSAL)], [output]) < 2e-2
    )
    dropping = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
    agrees(masks.CAUSAL, N, N, 64, B, T, T, dtype="bfloat16", within=2e-2, **dropping)


def test_wide_and_narrow_heads_and_float32_shorten_the_longest_sequences():
    """A block's arrays have at most 2¹⁹ bytes, and the scores of heads that share
    128 columns at most 2¹⁹ elements.
    """
    sizes = [
        (64, "bfloat16"),
        (64, "float32"),
        (256, "bfloat16"),
        (256, "float32"),
        (16, "bfloat16"),
        (8, "bfloat16"),
    ]
    assert [short.longest(*size) for size in sizes] == [1024, 1024, 1024, 512, 512, 256]
