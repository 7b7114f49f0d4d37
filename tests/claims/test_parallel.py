"""Chains of operations, and exponents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.claims.parallel import chain, exponent


def add_twice(x):
    return (x + 1.0) * 2.0


def loop(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(jnp.cos(c)), None), x, length=5)[0]


@pytest.mark.parametrize(
    ("function", "length"),
    [
        (lambda x: x, 0),
        (add_twice, 2),
        (lambda x: jnp.sin(x) + add_twice(x), 3),  # two branches, then their sum
        (jax.jit(add_twice), 2),
        (loop, 5 * 2),
        (lambda x: jnp.sin(loop(x)), 5 * 2 + 1),
        (lambda x: loop(x) + loop(x), 5 * 2 + 1),  # two loops beside each other
    ],
)
def test_the_longest_chain_of_operations(function, length):
    assert chain(jax.make_jaxpr(function)(jnp.ones(())).jaxpr) == length


def test_exponents_are_those_of_powers():
    lengths = np.array([16, 32, 64])
    assert exponent(lengths, 3.0 * lengths**2) == pytest.approx(2)
    assert exponent(lengths, [7, 7, 7]) == pytest.approx(0)
