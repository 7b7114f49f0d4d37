"""Attention without some of its maps, against NumPy."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer_jax.claims.shared_maps import raw_keys, rectified, same_map
from transformer_jax.models.attention import MultiHeadAttention

B, T, S, D, N, H = 2, 5, 7, 6, 2, 3
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
MEMORY = np.random.default_rng(1).normal(size=(B, S, D)).astype(np.float32)


def heads(x, params, name):
    """Return x W + b of each head, (B, T, N, H)."""
    return np.einsum("BTD,DNH->BTNH", x, params[name]["kernel"]) + params[name]["bias"]


def attention(q, k, v, params):
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    context = np.einsum("BNTS,BSNH->BTNH", weights, v)
    kernel, bias = params["output"]["kernel"], params["output"]["bias"]
    return np.einsum("BTNH,NHD->BTD", context, kernel) + bias


def queries_keys_values(change, params):
    q = heads(X, params, "query")
    v = heads(MEMORY, params, "value")
    if change is same_map:
        return q, heads(MEMORY, params, "query"), v
    if change is raw_keys:
        return q, np.stack(np.split(MEMORY, N, axis=-1), axis=2), v
    k = heads(MEMORY, params, "key")
    return np.maximum(q, 0), np.maximum(k, 0), np.maximum(v, 0)


@pytest.mark.parametrize("change", [same_map, raw_keys, rectified])
def test_a_change_is_its_equation(change):
    module = MultiHeadAttention(num_heads=N, d_model=D, head_dim=H, value_dim=H)
    with nn.intercept_methods(change):
        params = nn.unbox(module.init(jax.random.key(0), X, MEMORY))["params"]
        params = jax.tree.map(lambda p: np.asarray(p) + 0.1, params)
        found = module.apply({"params": params}, X, MEMORY)
    assert ("key" in params) == (change is rectified)
    expected = attention(*queries_keys_values(change, params), params)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
