"""The transformations of JAX give the same values and gradients around every layer and
model: `jit`, `grad`, `vmap`, `lax.scan`, `jax.checkpoint` and `jax.linearize`.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from helpers.small_models import MODELS, PAIRS
from transformer_jax.models.attention import MultiHeadAttention
from transformer_jax.models.layers import (
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    RMSNorm,
)
from transformer_jax.models.masks import CAUSAL
from transformer_jax.models.stack import Block, BlockConfig, Stack

D = 8
CONFIG = BlockConfig(
    d_model=D,
    d_ff=5,
    num_heads=2,
    head_dim=4,
    value_dim=4,
    attention_implementation="einsum",
)


class CausalAttention(nn.Module):
    """Self-attention, a layer of one argument."""

    @nn.compact
    def __call__(self, x):
        return MultiHeadAttention(2, D, 4, 4, implementation="einsum")(
            x, x, mask=CAUSAL
        )


LAYERS = {
    "Linear": Linear("BTD,DF->BTF", (D, 5), ("embed", "mlp")),
    "LayerNorm": LayerNorm(1e-6),
    "RMSNorm": RMSNorm(1e-6),
    "FeedForward": FeedForward(D, 5, activation="gelu"),
    "Embedding": Embedding(11, D),
    "MultiHeadAttention": CausalAttention(),
    "Block": Block(CONFIG),
    "Stack": Stack(dataclasses.replace(CONFIG, norm="pre"), 2),
}
VECTORS = np.random.default_rng(0).normal(size=(2, 2, 3, D)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 8, (2, 2, 3)).astype(np.int32)


def einsum(model):
    """Return a model with the implementation of attention that forward mode needs."""
    fields = {field.name for field in dataclasses.fields(model.config)}
    if "attention_implementation" not in fields:
        return model
    config = dataclasses.replace(model.config, attention_implementation="einsum")
    return model.clone(config=config)


def check(module, *inputs):
    """Compare all ways to the values and gradients of two inputs, `inputs[:, i]`."""
    first = tuple(x[0] for x in inputs)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *first)
    params = oracle.randomized(nn.unbox(shapes)["params"])
    direction = oracle.randomized(nn.unbox(shapes)["params"], seed=1)

    def loss(params, *x):
        leaves = jax.tree.leaves(module.apply({"params": params}, *x))
        return sum(jnp.sin(leaf).sum() for leaf in leaves)

    both = jax.value_and_grad(loss)

    @jax.jit
    def ways(params, direction, inputs):
        _, scanned = jax.lax.scan(lambda _, x: ((), both(params, *x)), (), inputs)
        mapped = jax.vmap(lambda *x: both(params, *x))(*inputs)
        first = [x[0] for x in inputs]
        remade = jax.value_and_grad(jax.checkpoint(loss))(params, *first)
        value, push = jax.linearize(lambda params: loss(params, *first), params)
        return scanned, mapped, remade, (value, push(direction))

    scanned, mapped, remade, (value, pushed) = ways(params, direction, inputs)
    compare(mapped, scanned)
    value_of_first, gradient = jax.tree.map(lambda x: x[0], scanned)
    compare(remade, (value_of_first, gradient))
    along = jax.tree.map(lambda g, d: np.sum(np.float64(g) * d), gradient, direction)
    size = sum(abs(x) for x in jax.tree.leaves(along))
    np.testing.assert_allclose(value, value_of_first, rtol=1e-4)
    np.testing.assert_allclose(pushed, sum(jax.tree.leaves(along)), atol=1e-4 * size)


def compare(actual, expected):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    check(LAYERS[name], IDS if name == "Embedding" else VECTORS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    inputs = (IDS, IDS[:, :, ::-1]) if name in PAIRS else (IDS, IDS >= 0)
    check(einsum(MODELS[name]), *inputs)
