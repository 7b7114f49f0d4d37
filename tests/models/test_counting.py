"""FLOPs of programs, against products written down by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from transformer_jax.losses import cross_entropy
from transformer_jax.models.counting import flops
from transformer_jax.models.kernels import plain
from transformer_jax.models.kernels.chunks import sum_in_chunks
from transformer_jax.models.kernels.products import linear, product


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X, W, SQUARE = of(3, 5), of(5, 7), of(5, 5)

ONE = 2 * 3 * 5 * 7  # X times W

SQUARED = 2 * 3 * 5 * 5  # X times SQUARE


def power(x, w):
    return jax.lax.scan(lambda x, _: (x @ w, None), x, length=11)[0]


def until_it_is_large(x, w):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)


def either(x, w):
    return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x @ w @ w)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (jnp.matmul, (X, W), ONE),
        (jnp.add, (X, X), 0),
        (
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            (of(2, 3, 5), of(2, 5, 7)),
            2 * ONE,
        ),
        (lambda a, b: jnp.einsum("i,j->ij", a, b), (of(3), of(5)), 0),
        (lambda x, w: product("ij,jk->ik", x, w), (X, W), ONE),
        (lambda x, w: product("ij,jk->ik", x, w, "bfloat16"), (X, W), ONE),
        (lambda x, w: linear("TD,DF->TF", x, w, jnp.ones(7)), (X, W), ONE),
        (power, (X, SQUARE), 11 * SQUARED),
        (until_it_is_large, (X, SQUARE), SQUARED),
        (either, (X, SQUARE), 2 * SQUARED),
        (jax.jit(power), (X, SQUARE), 11 * SQUARED),
        (jax.checkpoint(power), (X, SQUARE), 11 * SQUARED),
        (jax.vmap(power, (0, None)), (of(2, 3, 5), SQUARE), 22 * SQUARED),
        (jax.grad(lambda x, w: (x @ w).sum(), (0, 1)), (X, W), 3 * ONE),
    ],
)
def test_products_are_counted(function, arguments, expected):
    assert flops(function, *arguments) == expected


@pytest.mark.parametrize(("groups", "inputs"), [(1, 6), (3, 2)])
def test_convolutions_are_counted(groups, inputs):
    """Every output is a sum over a window of 5 × 2 positions and its inputs."""
    conv = nn.Conv(9, (5, 2), feature_group_count=groups, padding="VALID")
    x = of(2, 13, 11, 6)
    params = jax.eval_shape(conv.init, jax.random.key(0), x)
    assert flops(conv.apply, params, x) == 2 * (2 * 9 * 10 * 9) * (5 * 2 * inputs)


def test_a_loss_in_chunks_counts_every_position():
    def loss(w, x, labels, weights):
        return cross_entropy(x @ w, labels, weights, vocab_size=7)[0]

    labels = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    arguments = W, of(2, 3, 5), labels, of(2, 3)
    assert flops(lambda *a: sum_in_chunks(loss, *a, chunk=4), *arguments) == 2 * ONE


def test_the_equations_are_counted_even_if_a_kernel_was_traced_before():
    def both(x, w):
        return x @ w if plain.is_on() else x

    jax.make_jaxpr(both)(X, W)
    assert flops(both, X, W) == ONE
