"""The attention of JAX's library against the equation."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models.kernels.library import library_attention
from transformer_jax.models.masks import CAUSAL, Mask, padding

B, T, S, N, H, W, D = 2, 3, 5, 7, 11, 13, 17


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def some_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


def some_qkv():
    return normal(B, T, N, H), normal(B, S, N, H), normal(B, S, N, W)


@pytest.mark.parametrize("mask_shape", [None, (B, N, T, S), (B, 1, 1, S), (1, 1, T, S)])
def test_the_librarys_attention_is_the_equation(mask_shape):
    q, k, _ = some_qkv()
    v = normal(*k.shape, seed=7)  # as wide as the keys
    mask = None if mask_shape is None else some_mask(*mask_shape)
    if mask is not None:
        mask[-1, 0, 0] = False
    output = library_attention(q, k, v, mask=mask, dtype="float32")
    assert oracle.relative(output, oracle.attention(q, k, v, mask)[0]) <= 1e-5
    if mask is not None:
        is_empty = ~np.broadcast_to(mask, (B, N, T, S)).any(axis=-1)
        assert is_empty.any()
        assert (np.moveaxis(output, 2, 1)[is_empty] == 0).all()
    rounded = library_attention(q, k, v, mask=mask, dtype="bfloat16")
    assert rounded.dtype == jnp.float32


def test_the_librarys_attention_takes_rules():
    q, k, _ = some_qkv()
    v, valid = normal(*k.shape, seed=7), some_mask(B, S)
    valid[-1] = np.arange(S) > 0  # the first query may attend to nothing
    mask = CAUSAL & padding(valid) & Mask(allowed=some_mask(1, N, T, S))
    whole = np.asarray(mask.whole(T, S))
    output = library_attention(q, k, v, mask=mask)
    assert oracle.relative(output, oracle.attention(q, k, v, whole)[0]) <= 1e-5
    assert (output[-1, 0] == 0).all()
