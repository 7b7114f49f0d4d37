"""Attention against NumPy float64, and the cache against attention to the whole
sequence.
"""

import functools
import math
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models import layers
from transformer_jax.models.attention import (
    MultiHeadAttention,
    attention_weights,
    dot_product_attention,
    scaled_dot_product_scores,
)
from transformer_jax.models.caches import KeyValue
from transformer_jax.models.kernels import accelerators, choose, platforms
from transformer_jax.models.kernels.library import library_attention
from transformer_jax.models.masks import CAUSAL, Mask, padding
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
        assert (np.asarray(output)[-1, 0, 0] == 0).all() or mask.shape[2] == 1
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


@pytest.mark.parametrize(
    ("implementation", "change", "message"),
    [
        *(
            (implementation, change, message)
            for implementation in ("splash", "cudnn", "jax")
            for change, message in (
                (
                    {"dropout_rate": 0.1},
                    (
                        "this value of attention_dropout_rate; "
                        "set it to 0, or use 'einsum'"
                    ),
                ),
                (
                    {"positions": "relative"},
                    "this value of positions; set it to another value",
                ),
            )
        ),
        (
            "short",
            {"positions": "relative"},
            "this value of positions; set it to another value",
        ),
        ("jax", {"value_dim": 8}, "this value of value_dim; set it to head_dim = 16"),
        ("cudnn", {"value_dim": 8}, "this value of value_dim; set it to head_dim = 16"),
        ("short", {"value_dim": 8}, "this value of value_dim; set it to head_dim = 16"),
        *(
            (
                "short",
                {"head_dim": n, "value_dim": n},
                "this value of head_dim; set it to a divisor of 128, or a multiple",
            )
            for n in (20, 192)
        ),
        ("cudnn", {"dtype": "float32"}, "this value of dtype; set it to 'bfloat16'"),
        (
            "cudnn",
            {"head_dim": 20, "value_dim": 20},
            "this value of head_dim; set it to a multiple of 8, at most 128",
        ),
        (
            "cudnn",
            {"head_dim": 136, "value_dim": 136},
            "this value of head_dim; set it to a multiple of 8, at most 128",
        ),
    ],
)
def test_what_an_implementation_does_not_support_is_refused(
    implementation, change, message
):
    options = {"head_dim": 16, "value_dim": 16, "dtype": "bfloat16"} | change
    module = MultiHeadAttention(2, 8, implementation=implementation, **options)
    x = jnp.ones((1, 3, 8))
    with pytest.raises(
        ValueError,
        match=f"implementation = '{implementation}': does not support {message}",
    ):
        module.init(jax.random.key(0), x, x)


def test_splash_in_bfloat16_does_not_compile_where_products_of_float32_are_precise():
    for precision, refused in (
        ("highest", True),
        ("tensorfloat32", True),
        ("bfloat16", False),
        (None, False),
    ):
        with jax.default_matmul_precision(precision):
            assert [
                name
                for name, _ in choose.unsupported(
                    "splash", 0.0, "none", "bfloat16", 64, 64
                )
            ] == ["dtype"] * refused
            assert not list(
                choose.unsupported("splash", 0.0, "none", "float32", 64, 64)
            )


@pytest.mark.parametrize(
    ("implementation", "backend"),
    [("splash", "cpu"), ("splash", "gpu"), ("short", "gpu"), ("cudnn", "tpu")],
)
def test_kernels_are_refused_on_other_platforms(implementation, backend, monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: backend)
    x = jnp.ones((1, 3, 8))
    module = MultiHeadAttention(
        2, 8, 8, 8, dtype="bfloat16", implementation=implementation
    )
    variables = jax.jit(module.init)(jax.random.key(0), x, x)
    message = (
        f"implementation = '{implementation}': "
        f"does not run on this platform, '{backend}'; use 'auto'"
    )
    with pytest.raises(ValueError, match=message):
        module.apply(variables, x, x)


def test_short_attention_refuses_long_sequences(monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    module = MultiHeadAttention(2, 8, 8, 8, implementation="short")
    message = (
        "supports at most 256 positions, "
        "but there are 3 queries and 257 keys; use 'auto'"
    )
    x, memory = jnp.ones((1, 3, 8)), jnp.ones((1, 257, 8))
    variables = jax.jit(module.init)(jax.random.key(0), x, memory)
    with pytest.raises(ValueError, match=message):
        module.apply(variables, x, memory)


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
    gradients = jax.grad(
        lambda *x: dot_product_attention(*x, mask=mask).sum(), argnums=(0, 1, 2)
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


def used(module, x, mask, **kwargs):
    """Return True if the attention of x to itself is computed in blocks: nothing
    then has the shape of the weights.
    """
    variables = {
        "params": nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))[
            "params"
        ]
    }
    program = jax.make_jaxpr(lambda v: module.apply(v, x, x, mask=mask, **kwargs))(
        variables
    )
    return f"f32[{x.shape[0]},{module.num_heads},{x.shape[1]},{x.shape[1]}]" not in str(
        program
    )


def forget_choices():
    choose.choose.cache_clear()
    choose._log_choice.cache_clear()


def test_long_sequences_are_attended_to_in_blocks(monkeypatch, caplog):
    monkeypatch.setitem(choose.BLOCKED_FROM, "cpu", 136)
    forget_choices()
    short, long = normal(1, 135, D), normal(1, 136, D)
    auto = functools.partial(MultiHeadAttention, N, D, H, W)
    with caplog.at_level("INFO"):
        assert not used(auto(implementation="auto"), short, CAUSAL)
        assert used(auto(implementation="auto"), long, CAUSAL)
        assert used(auto(implementation="auto"), long, CAUSAL)
        assert used(auto(implementation="auto"), normal(1, 144, D), CAUSAL)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == choose.log.name
    ]
    # once, and none for einsum
    assert lines == ["attention: blocked, as there are at least 136 positions (cpu)"]
    forget_choices()


BFLOAT16 = {"dtype": "bfloat16"}
NO_DROPOUT = "splash does not support this value of attention_dropout_rate"


@pytest.mark.parametrize(
    ("backend", "length", "key_length", "options", "name", "why"),
    [
        ("tpu", 16, 1024, {}, "short", "16 to 1024 (tpu)"),
        ("tpu", 15, 1024, {}, "einsum", "fewer than 16 (tpu)"),
        ("tpu", 256, 1025, {}, "splash", "at least 256 (tpu)"),
        ("tpu", 255, 1025, {}, "einsum", "fewer than 256 (tpu)"),
        ("tpu", 64, 2048, {}, "blocked", "at least 2048 (tpu)"),
        (
            "tpu",
            512,
            513,
            {"head_dim": 256, "value_dim": 256},
            "splash",
            "at least 256 (tpu)",
        ),
        (
            *("tpu", 255, 513, {"head_dim": 256, "value_dim": 256}, "einsum"),
            (
                "fewer than 256 (tpu; "
                "short does not support more than 512 positions with this head_dim)"
            ),
        ),
        ("tpu", 256, 300, {"value_dim": 8}, "splash", "at least 256 (tpu)"),
        (
            *("tpu", 64, 64, {"value_dim": 8}, "einsum"),
            "fewer than 256 (tpu; short does not support this value of value_dim)",
        ),
        ("tpu", 512, 512, {"dropout_rate": 0.1}, "short", "16 to 1024 (tpu)"),
        (
            "tpu",
            1025,
            1025,
            {"dropout_rate": 0.1},
            "einsum",
            f"fewer than 2048 (tpu; {NO_DROPOUT})",
        ),
        (
            "tpu",
            2048,
            2048,
            {"dropout_rate": 0.1},
            "blocked",
            f"at least 2048 (tpu; {NO_DROPOUT})",
        ),
        ("gpu", 128, 256, BFLOAT16, "cudnn", "at least 128 (gpu)"),
        ("gpu", 127, 256, BFLOAT16, "einsum", "fewer than 128 (gpu)"),
        ("cuda", 256, 256, BFLOAT16, "cudnn", "at least 128 (cuda)"),
        (
            "gpu",
            256,
            256,
            {},
            "einsum",
            "fewer than 2048 (gpu; cudnn does not support this value of dtype)",
        ),
        (
            *("gpu", 4096, 4096, BFLOAT16 | {"value_dim": 32}, "blocked"),
            "at least 2048 (gpu; cudnn does not support this value of value_dim)",
        ),
        (
            "old gpu",
            256,
            256,
            BFLOAT16,
            "einsum",
            "fewer than 2048 (gpu; cudnn does not support this device)",
        ),
        ("cpu", 256, 256, BFLOAT16, "blocked", "at least 192 (cpu)"),
    ],
)
def test_auto_is_a_kernel_of_the_platform(
    backend, length, key_length, options, name, why, monkeypatch, caplog
):
    forget_choices()
    monkeypatch.setattr(platforms, "current", lambda: backend.removeprefix("old "))
    monkeypatch.setattr(
        choose, "cudnn_runs_here", lambda: not backend.startswith("old")
    )
    called, dropping = [], []

    def kernel(called_name):
        def attend(query, key, value, **options):
            called.append(called_name)
            dropping.append((options.get("dropout_rate", 0), "dropout_key" in options))
            return jnp.zeros((*query.shape[:3], value.shape[-1]))

        return attend

    for called_name in ("short", "splash", "cudnn", "blocked"):
        monkeypatch.setitem(choose.FUNCTIONS, called_name, kernel(called_name))
    module = MultiHeadAttention(
        2, 8, implementation="auto", **{"head_dim": 64, "value_dim": 64, **options}
    )
    x, memory = normal(1, length, 8), normal(1, key_length, 8)
    boxed = jax.eval_shape(
        module.clone(implementation="einsum").init, jax.random.key(0), x, memory
    )
    variables = {"params": nn.unbox(boxed["params"])}

    def run(rngs=None):
        jax.eval_shape(lambda v: module.apply(v, x, memory, rngs=rngs), variables)

    with caplog.at_level("INFO"):
        for _ in range(2):
            run({"dropout": jax.random.key(1)})
    assert called == ([name] * 2 if name != "einsum" else [])
    assert [r.getMessage() for r in caplog.records if r.name == choose.log.name] == [
        f"attention: {name}, as there are {why.replace(' (', ' positions (', 1)}"
    ]
    rate = options.get("dropout_rate", 0)
    assert set(dropping) == ({(rate, rate > 0)} if called else set())
    if rate:
        run()
        assert dropping[-1] == (0, False)
        # without a key, there is no dropout
        assert called[-1] == ("short" if length <= 1024 else "splash")
    forget_choices()


@pytest.mark.parametrize(
    ("capability", "runs"),
    [("8.0", True), ("12.1", True), ("7.5", False), ("gfx942", False), (None, False)],
)
def test_cudnn_needs_a_recent_nvidia_gpu(capability, runs, monkeypatch):
    device = (
        types.SimpleNamespace()
        if capability is None
        else types.SimpleNamespace(compute_capability=capability)
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert accelerators.cudnn_runs_here() == runs


@pytest.mark.parametrize("implementation", ["auto", "blocked"])
def test_what_blocks_do_not_support_is_computed_without_them(
    implementation, monkeypatch
):
    monkeypatch.setitem(choose.BLOCKED_FROM, "cpu", 136)
    choose.choose.cache_clear()
    x, mask = normal(1, 136, D), jnp.asarray(some_mask(1, 1, 136, 136))
    module = MultiHeadAttention(N, D, H, W, implementation=implementation)
    assert used(module, x, CAUSAL)
    assert not used(module, x, mask)  # a mask of any form
    assert not used(module, x, CAUSAL, mutable="intermediates")  # the weights are sown
    assert not used(module, x, CAUSAL, bias=normal(1, 1, 136, 136))
    assert not used(
        MultiHeadAttention(
            N, D, H, W, implementation=implementation, positions="relative"
        ),
        x,
        CAUSAL,
    )
    choose.choose.cache_clear()


def test_dropout_of_long_sequences_is_that_of_the_reference():
    x, keys = normal(B, 24, D), {"dropout": jax.random.key(1)}
    module, variables = make(dropout_rate=0.4)
    blocked = module.clone(implementation="blocked")
    expected = module.apply(variables, x, x, mask=CAUSAL, rngs=keys)
    assert (
        oracle.relative(
            blocked.apply(variables, x, x, mask=CAUSAL, rngs=keys), expected
        )
        <= 1e-5
    )
    assert oracle.relative(module.apply(variables, x, x, mask=CAUSAL), expected) > 1e-2


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
