"""Models in which some calls are replaced."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.claims.changes import changed, linear_map, unscaled
from transformer_jax.models.attention import MultiHeadAttention
from transformer_jax.models.layers import Linear

X = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
NAMES = ("embed", "heads", "head_dim")


class Small(nn.Module):
    config: Any = None
    front_end: Any = None

    @nn.compact
    def __call__(self, x):
        query = Linear("BTD,DNH->BTNH", (6, 2, 3), NAMES, name="query")(x)
        return query, Linear("BTD,DNH->BTNH", (6, 2, 3), NAMES, name="key")(x)


def test_only_the_calls_of_a_changed_model_are_changed():
    plain = Small()
    other = changed(plain, unscaled)
    params = nn.unbox(plain.init(jax.random.key(0), X))
    same = nn.unbox(other.init(jax.random.key(0), X))
    jax.tree.map(np.testing.assert_array_equal, params, same)
    query, key = plain.apply(params, X)
    for model in (other, other.clone()):
        found = model.apply(params, X)
        np.testing.assert_allclose(found[0], query * 3**0.5, rtol=1e-6)
        np.testing.assert_array_equal(found[1], key)
    np.testing.assert_array_equal(plain.apply(params, X)[0], query)


def test_calls_that_are_left_out_have_no_parameters():
    def no_key(call, args, kwargs, context):
        return args[0] if linear_map(context) == "key" else call(*args, **kwargs)

    params = changed(Small(), no_key).init(jax.random.key(0), X)["params"]
    assert set(params) == {"query"}


def test_unscaled_attention_is_the_softmax_of_the_products():
    module = MultiHeadAttention(num_heads=2, d_model=6, head_dim=3, value_dim=3)
    params = nn.unbox(module.init(jax.random.key(1), X, X))
    with nn.intercept_methods(unscaled):
        _, sown = module.apply(params, X, X, mutable="intermediates")
    (weights,) = sown["intermediates"]["weights"]
    of = params["params"]
    q = np.einsum("BTD,DNH->BTNH", X, of["query"]["kernel"])
    k = np.einsum("BSD,DNH->BSNH", X, of["key"]["kernel"])
    exponentials = np.exp(np.einsum("BTNH,BSNH->BNTS", q, k))
    expected = exponentials / exponentials.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
