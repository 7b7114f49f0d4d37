"""Attention against NumPy float64, and the cache against attention to the whole
sequence.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models import layers
from transformer_jax.models.attention import (
    MultiHeadAttention,
    additive_scores,
    attention_weights,
    dot_product_attention,
    dot_scores,
    general_scores,
    scaled_dot_product_scores,
)
from transformer_jax.models.caches import KeyValue
from transformer_jax.models.masks import CAUSAL
from transformer_jax.models.positions import make_places

B, T, S, N, H, W, D = 2, 3, 5, 7, 11, 13, 17


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def some_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


def some_qkv():
    return normal(B, T, N, H), normal(B, S, N, H), normal(B, S, N, W)


def make(head_dim=H, value_dim=W, **kwargs):
    """Return a module and parameters for it."""
    module = MultiHeadAttention(
        kwargs.pop("num_heads", N), D, head_dim, value_dim, **kwargs
    )
    x = normal(B, T, D)
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))["params"]
    return module, {"params": oracle.randomized(shapes)}


def places_of(module, queries, room):
    """Return the places of queries at these positions, and of a cache's keys."""
    return make_places(
        module.positions,
        queries,
        np.arange(room),
        room,
        head_dim=module.head_dim,
        rotary_base=module.rotary_base,
        max_distance=module.max_relative_distance,
    )


@pytest.mark.parametrize("mask_shape", [None, (B, N, T, S), (B, 1, 1, S), (1, 1, T, S)])
@pytest.mark.parametrize("bias_shape", [None, (B, N, T, S), (1, N, T, S)])
def test_attention_is_the_equation(mask_shape, bias_shape):
    q, k, v = some_qkv()
    mask = None if mask_shape is None else some_mask(*mask_shape)
    bias = None if bias_shape is None else normal(*bias_shape)
    output, weights = dot_product_attention(
        q, k, v, mask=mask, bias=bias, return_weights=True
    )
    expected, expected_weights = oracle.attention(q, k, v, mask, bias)
    assert oracle.relative(output, expected) <= 1e-5
    assert oracle.relative(weights, expected_weights) <= 1e-5
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(
        dot_product_attention(q, k, v, mask=mask, bias=bias), output
    )


def test_weights_sum_to_one_and_are_zero_where_masked():
    q, k, v = some_qkv()
    mask = some_mask(B, N, T, S) | (np.arange(S) == 2)
    _, weights = dot_product_attention(q, k, v, mask=mask, return_weights=True)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(weights > 0, mask)


def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients():
    q, k, v = some_qkv()
    mask = some_mask(B, N, T, S) | (np.arange(S) == 2)
    mask[1, :, 2] = False

    def attend(q, k, v, bias):
        return dot_product_attention(q, k, v, mask=mask, bias=bias, return_weights=True)

    output, weights = attend(q, k, v, normal(B, N, T, S))
    assert (output[1, 2] == 0).all()
    assert (weights[1, :, 2] == 0).all()
    assert (output[1, 1] != 0).all()
    projected = normal(B, T, N, W, seed=1)
    gradients = jax.jit(
        jax.grad(lambda *x: (attend(*x)[0] * projected).sum(), argnums=(0, 1, 2, 3))
    )(q, k, v, normal(B, N, T, S))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][1, 2] == 0).all()
    assert (gradients[3][1, :, 2] == 0).all()
    assert all((gradient != 0).any() for gradient in gradients)


def test_all_rows_empty():
    q, k, v = some_qkv()
    mask = np.zeros((B, 1, 1, S), bool)
    assert (dot_product_attention(q, k, v, mask=mask) == 0).all()
    gradients = jax.jit(
        jax.grad(
            lambda *x: dot_product_attention(*x, mask=mask).sum(), argnums=(0, 1, 2)
        )
    )(q, k, v)
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((112, 96), (1, 1.1254e-7)),
        ((14, 12), (0.8808, 0.1192)),
        ((0.36, 2.4, 0.36, 0.36), (0.0935, 0.7194, 0.0935, 0.0935)),
        ((0.36, 2.4, -0.36, 0.36), (0.0983, 0.7557, 0.0478, 0.0983)),
    ],
)
def test_weights_computable_by_hand(scores, expected):
    weights = attention_weights(jnp.asarray(scores, jnp.float32).reshape(1, 1, 1, -1))
    np.testing.assert_allclose(weights[0, 0, 0], expected, rtol=1e-3)


def test_a_mask_leaves_out_keys_and_does_not_lower_their_scores():
    scores = jnp.asarray([1e30, 14.0, -1e30, 12.0]).reshape(1, 1, 1, 4)
    weights = attention_weights(
        scores, jnp.asarray([False, True, False, True]).reshape(1, 1, 1, 4)
    )
    np.testing.assert_allclose(weights[0, 0, 0], (0, 0.8808, 0, 0.1192), rtol=1e-3)


def test_the_order_of_keys_does_not_matter():
    q, k, v = some_qkv()
    mask, order = some_mask(B, N, T, S), np.random.default_rng(0).permutation(S)
    assert (order != np.arange(S)).any()
    output = dot_product_attention(q, k, v, mask=mask)
    permuted = dot_product_attention(q, k[:, order], v[:, order], mask=mask[..., order])
    assert oracle.relative(permuted, output) <= 1e-6


@pytest.mark.parametrize("width", [1, 4, 25])
def test_the_scale_is_the_root_of_the_head_width(width):
    ones = jnp.ones((1, 1, N, width))
    np.testing.assert_allclose(
        scaled_dot_product_scores(ones, ones), width / width**0.5, rtol=1e-6
    )


def test_the_scale_of_multi_head_attention_is_of_the_head_and_not_of_the_model():
    module, variables = make(head_dim=4, use_bias=False)
    params = variables["params"]
    for name in ("query", "key"):
        params[name]["kernel"] = np.zeros((D, N, 4), np.float32)
        params[name]["kernel"][0] = 1.0
    x = normal(1, 2, D)
    x[0, :, 0] = 1.0, 2.0
    apply = functools.partial(module.apply, mutable=["intermediates"])
    _, state = jax.jit(apply)({"params": params}, x, x)
    (weights,) = state["intermediates"]["weights"]
    expected = oracle.softmax(np.array([[1 * 4, 2 * 4], [2 * 4, 4 * 4]]) / 2.0)
    np.testing.assert_allclose(
        weights[0], np.broadcast_to(expected, (N, 2, 2)), rtol=1e-5
    )


@pytest.mark.parametrize("use_bias", [True, False])
def test_multi_head_attention_is_the_equation(use_bias):
    module, variables = make(use_bias=use_bias)
    x, memory, mask, bias = (
        normal(B, T, D),
        normal(B, S, D),
        some_mask(B, N, T, S),
        normal(1, N, T, S),
    )
    apply = functools.partial(module.apply, mutable=["intermediates"])
    output, state = jax.jit(apply)(variables, x, memory, mask=mask, bias=bias)
    assert (
        oracle.relative(
            output, oracle.multi_head(variables["params"], x, memory, mask, bias)
        )
        <= 1e-5
    )
    assert state["intermediates"]["weights"][0].shape == (B, N, T, S)
    biases = [
        "bias" in variables["params"][name]
        for name in ("query", "key", "value", "output")
    ]
    assert biases == [use_bias] * 4


def test_a_projected_memory_is_as_good_as_the_memory():
    module, variables = make()
    x, memory = normal(B, T, D), normal(B, S, D)
    projected = module.apply(variables, memory, method=MultiHeadAttention.project)
    assert projected.key.shape == (B, N, S, H)
    assert projected.value.shape == (B, N, S, W)
    np.testing.assert_array_equal(
        module.apply(variables, x, projected), module.apply(variables, x, memory)
    )


def copied(shared, groups):
    """Return parameters in which every query head has keys and values of its own,
    equal to those that it shares.
    """

    def copies(name, leaf):
        return np.repeat(leaf, groups, axis=1 if name == "kernel" else 0)

    own = {
        projection: {
            name: copies(name, leaf) for name, leaf in shared[projection].items()
        }
        for projection in ("key", "value")
    }
    return shared | own


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("projected", [False, True])
def test_grouped_queries_are_heads_with_copied_keys_and_values(kv_heads, projected):
    """Compare values, weights and gradients with heads that have copies, and values
    with the oracle.
    """
    whole, _ = make(num_heads=6)
    module, variables = make(num_heads=6, num_kv_heads=kv_heads)
    x, memory, mask, groups = (
        normal(B, T, D),
        normal(B, S, D),
        some_mask(B, 1, T, S),
        6 // kv_heads,
    )
    params = variables["params"]
    assert params["key"]["kernel"].shape == (D, kv_heads, H)
    assert params["value"]["bias"].shape == (kv_heads, W)

    def attend(module, params):
        read = (
            module.apply({"params": params}, memory, method=MultiHeadAttention.project)
            if projected
            else memory
        )
        output, state = module.apply(
            {"params": params}, x, read, mask=mask, mutable=["intermediates"]
        )
        return (output * normal(B, T, D, seed=1)).sum(), (
            output,
            state["intermediates"]["weights"][0],
        )

    run = jax.jit(jax.grad(attend, argnums=1, has_aux=True), static_argnums=0)
    gradient, (output, weights) = run(module, params)
    expected, (expected_output, expected_weights) = run(whole, copied(params, groups))
    assert oracle.relative(output, oracle.multi_head(params, x, memory, mask)) <= 1e-5
    assert oracle.relative(output, expected_output) <= 1e-6
    assert weights.shape == (B, 6, T, S)
    assert oracle.relative(weights, expected_weights) <= 1e-6
    for name in ("query", "output"):
        assert (
            oracle.relative(gradient[name]["kernel"], expected[name]["kernel"]) <= 1e-5
        )
    # a shared kernel collects the gradients of its copies
    for name in ("key", "value"):
        summed = expected[name]["kernel"].reshape(D, kv_heads, groups, -1).sum(axis=2)
        assert oracle.relative(gradient[name]["kernel"], summed) <= 1e-5


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(
        ValueError,
        match="num_kv_heads = 3: must divide num_heads = 7; 0 stands for num_heads",
    ):
        make(num_kv_heads=3)


def test_as_many_key_value_heads_as_heads_change_nothing():
    (plain, variables), (module, same) = make(), make(num_kv_heads=N)
    jax.tree.map(np.testing.assert_array_equal, variables, same)
    x, memory = normal(B, T, D), normal(B, S, D)
    np.testing.assert_array_equal(
        module.apply(same, x, memory), plain.apply(variables, x, memory)
    )


@pytest.mark.parametrize("positions", ["none", "relative", "rotary"])
def test_a_step_reads_shared_keys_and_values_without_copying_them(positions):
    module, variables = make(
        num_heads=6, num_kv_heads=2, head_dim=4, value_dim=4, positions=positions
    )
    cache, x = (
        KeyValue(normal(B, 2, 101, 4), normal(B, 2, 101, 4, seed=1)),
        normal(B, 1, D),
    )
    mask = CAUSAL.part(53, 1, 0, 101)
    at = {"places": places_of(module, 53 + np.arange(1), 101)}
    step = jax.make_jaxpr(
        lambda variables: module.apply(variables, x, cache, mask=mask, **at)
    )(variables)
    largest = max(
        math.prod(v.aval.shape) for equation in step.eqns for v in equation.outvars
    )
    assert largest == B * 2 * 101 * 4
    repeated = KeyValue(*(np.repeat(part, 3, axis=1) for part in cache))
    whole, _ = make(num_heads=6, head_dim=4, value_dim=4, positions=positions)
    expected = jax.jit(functools.partial(whole.apply, mask=mask, **at))(
        {"params": copied(variables["params"], 3)}, x, repeated
    )
    found = jax.jit(functools.partial(module.apply, mask=mask, **at))(
        variables, x, cache
    )
    assert oracle.relative(found, expected) <= 1e-5


def test_every_query_head_has_dropout_of_its_own():
    """With equal queries for all heads that share keys and values, only dropout
    tells the heads apart.
    """
    module, variables = make(num_heads=6, num_kv_heads=1, dropout_rate=0.5)
    params = variables["params"]
    params["query"] = {
        "kernel": 0 * params["query"]["kernel"],
        "bias": 0 * params["query"]["bias"],
    }
    params["output"]["kernel"] = np.eye(6, D, dtype=np.float32)[:, None] * np.ones(
        (1, W, 1), np.float32
    )
    x, memory, rngs = normal(B, T, D), normal(B, S, D), {"dropout": jax.random.key(1)}
    outputs = (
        np.asarray(jax.jit(module.apply)(variables, x, memory, rngs=rngs))
        - params["output"]["bias"]
    )[..., :6]
    assert (
        np.abs(np.diff(np.sort(outputs, axis=-1), axis=-1)).max(axis=-1) > 1e-3
    ).all()


def test_queries_come_from_x_and_keys_and_values_from_memory():
    """A kernel's gradient is zero exactly where its input is zero."""
    module, variables = make()
    x, memory = normal(B, T, D), normal(B, S, D)

    @jax.jit
    @jax.grad
    def differentiated(variables, x, memory):
        return (module.apply(variables, x, memory) * normal(B, T, D, seed=1)).sum()

    def touched(x, memory):
        gradient = differentiated(variables, x, memory)
        return {
            name: bool((gradient["params"][name]["kernel"] != 0).any())
            for name in ("query", "key", "value")
        }

    assert touched(x, memory) == {"query": True, "key": True, "value": True}
    assert touched(np.zeros_like(x), memory) == {
        "query": False,
        "key": True,
        "value": True,
    }
    left = np.where(np.arange(D) < 5, x, 0)  # the first 5 features only
    right = np.where(np.arange(D) < 5, 0, memory)
    gradient = differentiated(variables, left, right)["params"]
    assert (gradient["query"]["kernel"][5:] == 0).all()
    assert (gradient["query"]["kernel"][:5] != 0).any()
    for name in ("key", "value"):
        assert (gradient[name]["kernel"][:5] == 0).all()
        assert (gradient[name]["kernel"][5:] != 0).any()


def test_dropout_acts_on_the_weights_when_given_a_key():
    q, k, v = some_qkv()
    key, rate, mask = jax.random.key(1), 0.375, some_mask(B, N, T, S)
    attend = functools.partial(
        dot_product_attention, q, k, v, mask=mask, return_weights=True
    )
    plain, weights = attend()
    np.testing.assert_array_equal(attend(dropout_rate=rate)[0], plain)
    np.testing.assert_array_equal(attend(dropout_rate=0.0, dropout_key=key)[0], plain)
    dropped, reported = attend(dropout_rate=rate, dropout_key=key)
    np.testing.assert_array_equal(reported, weights)
    expected = np.einsum("BNTS,BSNH->BTNH", layers.dropout(weights, rate, key), v)
    assert oracle.relative(dropped, expected) <= 1e-5
    assert oracle.relative(dropped, plain) > 0.1


def test_dropout_of_multi_head_attention_needs_a_key_and_a_rate():
    x, memory, rngs = normal(B, T, D), normal(B, S, D), {"dropout": jax.random.key(1)}
    module, variables = make()
    plain = module.apply(variables, x, memory)
    np.testing.assert_array_equal(module.apply(variables, x, memory, rngs=rngs), plain)
    module, _ = make(dropout_rate=0.5)
    np.testing.assert_array_equal(module.apply(variables, x, memory), plain)
    dropped = module.apply(variables, x, memory, rngs=rngs)
    assert oracle.relative(dropped, plain) > 0.1
    np.testing.assert_array_equal(
        module.apply(variables, x, memory, rngs=rngs), dropped
    )
    assert (
        module.apply(variables, x, memory, rngs={"dropout": jax.random.key(2)})
        != dropped
    ).any()


@pytest.mark.parametrize(
    ("prompt", "kv_heads"), [*((prompt, N) for prompt in range(1, S + 1)), (3, 1)]
)
def test_a_prompt_and_then_single_steps_give_what_the_whole_gives(prompt, kv_heads):
    module, variables = make(num_kv_heads=kv_heads)
    x, room = normal(B, S, D), S + 2
    whole = module.apply(variables, x, x, mask=CAUSAL)

    @jax.jit
    def step(cache, x, position):
        cache = cache.write(
            module.apply(variables, x, method=MultiHeadAttention.project), position
        )
        mask = CAUSAL.part(position, x.shape[1], 0, room)
        return module.apply(variables, x, cache, mask=mask), cache

    cache = module.apply(variables, B, room, method=MultiHeadAttention.empty_cache)
    assert isinstance(cache, KeyValue)
    assert (cache.key.shape, cache.value.shape) == (
        (B, kv_heads, room, H),
        (B, kv_heads, room, W),
    )
    output, cache = step(cache, x[:, :prompt], 0)
    outputs = [output]
    for t in range(prompt, S):
        output, cache = step(cache, x[:, t : t + 1], t)
        outputs.append(output)
    assert oracle.relative(np.concatenate(outputs, axis=1), whole) <= 1e-5
    assert (cache.key[:, :, S:] == 0).all()


def test_bfloat16_products_and_float32_weights():
    module, variables = make(dtype="bfloat16")
    x, memory = normal(B, T, D), normal(B, S, D)
    apply = functools.partial(module.apply, mutable=["intermediates"])
    output, state = jax.jit(apply)(variables, x, memory)
    assert output.dtype == jnp.bfloat16
    assert state["intermediates"]["weights"][0].dtype == jnp.float32
    assert (
        oracle.relative(output, oracle.multi_head(variables["params"], x, memory))
        <= 0.05
    )


def test_dropout_of_long_sequences_is_that_of_the_reference():
    x, keys = normal(B, 24, D), {"dropout": jax.random.key(1)}
    module, variables = make(dropout_rate=0.4)
    blocked = module.clone(implementation="blocked")

    @functools.partial(jax.jit, static_argnums=0)
    def attend(module, rngs):
        return module.apply(variables, x, x, mask=CAUSAL, rngs=rngs)

    expected = attend(module, keys)
    assert oracle.relative(attend(blocked, keys), expected) <= 1e-5
    assert oracle.relative(attend(module, {}), expected) > 1e-2


@pytest.mark.parametrize("kv_heads", [N, 1])
def test_a_projected_memory_has_no_dropout(kv_heads):
    """Caches are for decoding."""
    module, variables = make(num_kv_heads=kv_heads, dropout_rate=0.5)
    x, memory = normal(B, T, D), normal(B, S, D)
    projected = module.apply(variables, memory, method=MultiHeadAttention.project)
    rngs = {"dropout": jax.random.key(1)}
    np.testing.assert_array_equal(
        module.apply(variables, x, projected, rngs=rngs),
        module.apply(variables, x, projected),
    )


def test_scores_against_their_equations():
    b, t, s, d, c, a = 2, 3, 5, 7, 11, 13
    query, key, v = normal(b, t, d), normal(b, s, c), normal(a)
    w, between, same = normal(d + c, a), normal(d, c), normal(b, s, d)
    general, dot = general_scores(query, key, between), dot_scores(query, same)
    additive = additive_scores(query @ w[:d], key @ w[d:], v)
    for i, j in np.ndindex(b, t):
        state = np.float64(query[i, j])
        assert (
            oracle.relative(
                additive[i, j], oracle.additive(state, key[i], w[:d], w[d:], v)
            )
            < 1e-5
        )
        assert (
            oracle.relative(general[i, j], [state @ between @ h for h in key[i]]) < 1e-5
        )
        assert oracle.relative(dot[i, j], [state @ h for h in same[i]]) < 1e-5


def test_concat_is_additive_with_stacked_matrices():
    """W [s; h] = W_a s + U_a h, where W is W_a stacked on U_a."""
    state, h, v = normal(7), normal(5, 11), normal(13)
    w_a, u_a = normal(7, 13), normal(11, 13)
    stacked = np.concatenate([w_a, u_a])
    assert (
        oracle.relative(
            oracle.concat(state, h, stacked, v), oracle.additive(state, h, w_a, u_a, v)
        )
        < 1e-6
    )
    found = additive_scores((state @ w_a)[None, None], (h @ u_a)[None], v)[0, 0]
    assert oracle.relative(found, oracle.concat(state, h, stacked, v)) < 1e-5


def test_numbers():
    """Compare with numbers that are printed in teaching texts."""
    query = jnp.array([[[0.6, 1.2, -1.2, 1.8]]])
    keys = jnp.array([[[-0.2, 0.4, 1.2, 0.8], [0.2, 0.4, -0.6, 0.6]]])
    np.testing.assert_allclose(dot_scores(query, keys)[0, 0], [0.36, 2.4], rtol=1e-6)
    scores = scaled_dot_product_scores(query[:, :, None], keys[:, :, None])[0, 0, 0]
    np.testing.assert_allclose(scores, [0.18, 1.2], rtol=1e-6)
    weights = attention_weights(jnp.array([[[[0.36, 2.4, -0.36, 0.36]]]]))[0, 0, 0]
    np.testing.assert_allclose(weights, [0.0983, 0.7557, 0.0478, 0.0983], atol=5e-5)
