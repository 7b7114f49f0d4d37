"""A stack on its own, as part of an encoder or decoder: with or without a memory, and
with a cache.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models.kernels import platforms
from transformer_jax.models.masks import CAUSAL, padding
from transformer_jax.models.stack import Block, BlockConfig, Stack, unstack_layers

B, T, S, D, L = 2, 5, 7, 17, 3

CONFIG = BlockConfig(
    d_model=D,
    d_ff=19,
    num_heads=3,
    head_dim=4,
    value_dim=5,
    norm="pre",
    positions="rotary",
)

VALID = np.arange(S) < np.array([7, 4])[:, None]


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def make(cross):
    model = Stack(CONFIG, L, cross)
    memory = normal(B, S, D) if cross else None
    shapes = nn.unbox(
        jax.eval_shape(model.init, jax.random.key(0), normal(B, T, D), None, memory)
    )["params"]
    return model, jax.tree.map(jnp.asarray, oracle.randomized(shapes))


def test_a_stack_is_its_blocks_and_a_final_norm():
    model, params = make(cross=False)
    x, mask = normal(B, T, D), np.random.default_rng(0).random((B, 1, T, T)) < 0.7
    found = jax.jit(model.apply)({"params": params}, x, mask)
    assert (
        oracle.relative(found, oracle.stack(oracle.float64(params), CONFIG, x, mask))
        <= 1e-5
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_residual_stream_in_bfloat16(norm):
    """The output and the gradients (except those of keys' biases, which are zero) are
    near those in float32.

    The distance of the output shows that the stream was rounded.
    """
    exact, rounded = (
        Stack(dataclasses.replace(CONFIG, norm=norm, residual_dtype=dtype), L)
        for dtype in ("float32", "bfloat16")
    )
    x = normal(B, T, D)
    params = oracle.randomized(
        nn.unbox(jax.eval_shape(exact.init, jax.random.key(0), x))["params"]
    )

    def run(model):
        y, pull = jax.vjp(
            lambda p: model.apply({"params": p}, x).astype(jnp.float32), params
        )
        return y, *jax.tree.leaves(pull(normal(B, T, D, seed=1)))

    run = jax.jit(run, static_argnums=0)
    found, expected = run(rounded), [np.float64(x) for x in run(exact)]
    distances = [
        oracle.relative(*pair)
        for pair in zip(found, expected, strict=True)
        if np.abs(pair[1]).max() > 1e-3
    ]
    assert distances[0] > 1e-4
    assert max(distances) < 0.2


@pytest.mark.parametrize(
    "remat",
    ["none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "scores"))],
)
def test_layers_without_a_loop_are_those_of_a_loop(remat, monkeypatch):
    """The outputs of all layers and the gradients are equal, also with dropout,
    which differs from layer to layer.
    """
    if remat != "none":  # on CPUs, there is always a loop then
        monkeypatch.setattr(platforms, "current", lambda: "gpu")
    config = dataclasses.replace(
        CONFIG, dropout_rate=0.3, attention_dropout_rate=0.3, remat=remat
    )
    x, g = normal(B, T, D), normal(B, L, T, D, seed=1)
    _, params = make(cross=False)

    @functools.partial(jax.jit, static_argnums=0)
    def run(unroll):
        model, rngs = (
            Stack(dataclasses.replace(config, unroll=unroll), L),
            {"dropout": jax.random.key(5)},
        )
        y, pull = jax.vjp(
            lambda p: model.apply({"params": p}, x, rngs=rngs, method=Stack.outputs),
            params,
        )
        return y, *jax.tree.leaves(pull(g))

    loops = [
        str(jax.make_jaxpr(run, static_argnums=0)(unroll)).count("scan[")
        for unroll in (1, L)
    ]
    assert loops[0] > loops[1] == 0
    for found, expected in zip(run(L), run(1), strict=True):
        largest = max(np.abs(found).max(), np.abs(expected).max())
        assert (
            oracle.relative(found, np.float64(expected)) <= 1e-5 or largest < 1e-5
        )  # some gradients are zero


def test_rematerialization_saves_memory_on_cpus_whatever_unroll_is():
    x = normal(8, 64, D)
    _, params = make(cross=False)

    def needed(remat, unroll):
        config = dataclasses.replace(CONFIG, remat=remat, unroll=unroll)
        model = Stack(config, L)

        @jax.jit
        def gradient(params):
            return jax.grad(lambda p: model.apply({"params": p}, x).sum())(params)

        memory = gradient.lower(params).compile().memory_analysis()
        return memory.temp_size_in_bytes

    scores, full = needed("scores", L), needed("full", L)
    assert scores < needed("none", L) / 1.3
    assert full < scores / 1.2
    assert full == needed("full", 1) == needed("full", 2)


@pytest.mark.parametrize("cross", [False, True])
def test_the_last_map_of_a_sublayer_starts_smaller_in_a_deep_stack(cross):
    """GPT-2 divides by the root of the number of residual connections.

    All other initial values are the same.
    """
    plain, scaled = (
        nn.unbox(
            jax.jit(Stack(config, L, cross).init)(
                jax.random.key(0), normal(B, T, D), None, normal(B, S, D)
            )
        )["params"]
        for config in (CONFIG, dataclasses.replace(CONFIG, scale_residual_init=True))
    )
    before = {
        ("self_attention", "output"),
        ("cross_attention", "output"),
        ("feed_forward", "outer"),
    }
    for (path, value), unscaled in zip(
        jax.tree.leaves_with_path(scaled), jax.tree.leaves(plain), strict=True
    ):
        names = tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
        factor = (
            (L * (3 if cross else 2)) ** -0.5
            if names[1:3] in before and names[3] == "kernel"
            else 1.0
        )
        np.testing.assert_allclose(value, factor * unscaled, rtol=1e-6)


def test_a_memory_is_read_by_every_layer():
    model, params = make(cross=True)
    x, memory, mask = (
        normal(B, T, D),
        normal(B, S, D),
        np.tri(T, dtype=bool)[None, None],
    )
    seen = padding(VALID)
    found = jax.jit(model.apply)({"params": params}, x, mask, memory, seen)
    expected = x
    for number in range(L):
        p = oracle.layer(oracle.float64(params)["layers"], number)
        expected = oracle.decoder_block(
            p, expected, memory, mask, VALID[:, None, None], CONFIG
        )
    assert oracle.relative(found, oracle.finished(params, CONFIG, expected)) <= 1e-5


@pytest.mark.parametrize("cross", [False, True])
def test_pieces_with_a_cache_give_the_causal_whole(cross):
    model, params = make(cross)
    x, memory = normal(B, T, D), normal(B, S, D) if cross else None
    seen = padding(VALID) if cross else None
    whole = jax.jit(model.apply)({"params": params}, x, CAUSAL, memory, seen)
    project = jax.jit(functools.partial(model.apply, method=Stack.project))
    projected = project({"params": params}, memory) if cross else None
    for p in (params, unstack_layers(params)):
        extend = jax.jit(
            functools.partial(model.apply, {"params": p}, method=Stack.extend)
        )
        cache = model.apply({"params": p}, B, T + 1, method=Stack.init_cache)
        found = []
        for start, end in ((0, 2), (2, 3), (3, T)):
            one, cache = extend(x[:, start:end], cache, start, projected, seen)
            found.append(one)
        assert oracle.relative(np.concatenate(found, axis=1), whole) <= 1e-5


class Twice(nn.Module):
    """Calls a stack twice, as models of two texts with shared parameters do."""

    config: BlockConfig

    def setup(self):
        self.stack = Stack(self.config, 2)

    def __call__(self, x):
        return self.stack(x), self.stack(x)


@pytest.mark.parametrize("unroll", [1, 2])
def test_each_call_draws_its_own_dropout(unroll):
    model, x = (
        Twice(dataclasses.replace(CONFIG, dropout_rate=0.5, unroll=unroll)),
        normal(B, T, D),
    )
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), x))
    variables = {"params": oracle.randomized(shapes["params"])}
    apply = jax.jit(model.apply)
    first, second = apply(variables, x, rngs={"dropout": jax.random.key(1)})
    assert (first != second).any()
    first, second = apply(variables, x)
    np.testing.assert_array_equal(first, second)


def test_a_block_with_cross_attention_needs_a_memory():
    with pytest.raises(
        ValueError,
        match="a block with cross-attention needs a memory; pass one, or cross=False",
    ):
        jax.eval_shape(
            Block(CONFIG, cross=True).init, jax.random.key(0), normal(B, T, D)
        )


WINDOWED = dataclasses.replace(CONFIG, attention_window=2)


def test_a_window_is_a_mask():
    """Position i sees i - 1 and i, in training and with a cache."""
    _, params = make(cross=False)
    x = normal(B, T, D)
    near = np.tri(T, dtype=bool) & ~np.tri(T, k=-2, dtype=bool)
    expected = Stack(CONFIG, L).apply({"params": params}, x, near[None, None])
    model = Stack(WINDOWED, L)
    found = model.apply({"params": params}, x, CAUSAL)
    assert oracle.relative(found, expected) <= 1e-6
    cache = model.apply({"params": params}, B, T, method=Stack.init_cache)
    for part in (slice(0, 3), slice(3, 4), slice(4, T)):
        y, cache = model.apply(
            {"params": params}, x[:, part], cache, part.start, method=Stack.extend
        )
        assert oracle.relative(y, expected[:, part]) <= 1e-5


def test_norms_of_queries_and_keys():
    """They make the scores independent of the size of W_Q and W_K. Their gains have
    the width of a head.
    """
    config = dataclasses.replace(CONFIG, qk_norm=True, attention_output_bias=False)
    model = Stack(config, 1)
    x = normal(B, T, D)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), x, CAUSAL))["params"]
    attention = params["layers"]["self_attention"]
    assert attention["query_norm"]["scale"].shape == (1, 4)
    assert "bias" not in attention["output"]
    assert "bias" in attention["value"]
    apply = jax.jit(model.apply)
    expected = apply({"params": params}, x, CAUSAL)
    for name in ("query", "key"):
        attention[name] = jax.tree.map(lambda x: 100 * x, attention[name])
    assert oracle.relative(apply({"params": params}, x, CAUSAL), expected) <= 1e-4
