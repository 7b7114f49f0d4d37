"""Inputs and masks for attention kernels, and the reference."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models import masks
from transformer_jax.models.attention import dot_product_attention

B, T, S, N, H, W = 2, 150, 200, 2, 8, 16

ORDER = np.arange(S)

# 0 is padding
KEYS = np.stack([1 + (ORDER >= 60) + 5 * (ORDER >= 130), np.where(ORDER < 170, 4, 0)])

# the first row has no key for segment 3
SEGMENTS = np.stack([1 + ORDER[:T] // 60, np.where(ORDER[:T] < 120, 4, 0)])

KEYS, SEGMENTS = KEYS.astype(np.int32), SEGMENTS.astype(np.int32)

# the first row has padding before its tokens
VALID = np.stack([ORDER >= 140, ORDER < 170])

MASKS = {
    "none": (S, None),
    "causal": (T, masks.CAUSAL),
    "padding": (S, masks.padding(jnp.asarray(VALID))),
    "causal padding": (T, masks.CAUSAL & masks.padding(jnp.asarray(VALID[:, :T]))),
    "segments": (S, masks.segments(jnp.asarray(SEGMENTS), jnp.asarray(KEYS))),
    "packed": (
        T,
        masks.CAUSAL & masks.segments(jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS)),
    ),
}


def normal(*shape, seed=0):
    return jnp.asarray(
        np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32
    )


def apart(a, b):
    return max(
        float(jnp.abs(x - y).max() / jnp.abs(x).max())
        for x, y in zip(a, b, strict=True)
    )


def reference(query, key, value, *, mask=None, **options):
    """Compute the reference, with key-value heads copied for the heads that share
    them.
    """
    key, value = (
        jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value)
    )
    dense = None if mask is None else mask.part(0, query.shape[1], 0, key.shape[1])
    return dot_product_attention(query, key, value, mask=dense, **options)


def some_inputs(keys, heads=N, kv_heads=N, width=H):
    return (
        normal(B, T, heads, width),
        normal(B, keys, kv_heads, width, seed=1),
        normal(B, keys, kv_heads, W),
    )


def with_gradients(attend, inputs, cotangent):
    """Return the output, and the gradients of queries, keys and values."""
    output, gradient = jax.vjp(attend, *inputs)
    return [output, *gradient(cotangent)]
