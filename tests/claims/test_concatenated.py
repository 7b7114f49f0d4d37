"""Positions that are added or concatenated, against NumPy."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer_jax.claims.concatenated import Mapped, algebra
from transformer_jax.models.positions import sinusoidal_positions

IDS = np.array([[3, 1, 4, 1, 5], [0, 2, 6, 5, 3]])


@pytest.mark.parametrize("concatenates", [False, True])
def test_the_vectors_are_the_map_of_embedding_and_position(concatenates):
    module = Mapped(7, 4, 11, concatenates)
    params = nn.unbox(module.init(jax.random.key(0), IDS))
    found, valid = module.apply(params, IDS)
    assert valid is None
    table = params["params"]["embedding"]["table"] * 4**0.5
    kernel = params["params"]["map"]["kernel"]
    for row, place in np.ndindex(IDS.shape):
        x = table[IDS[row, place]]
        p = sinusoidal_positions(11, 4)[place]
        both = np.concatenate([x, p]) if concatenates else x + p
        np.testing.assert_allclose(
            found[row, place], both @ kernel, rtol=1e-5, atol=1e-6
        )


def test_both_sides_of_the_equations_are_equal():
    errors = algebra(seed=1, quick=True)
    assert len(errors) == 2
    assert max(errors.values()) < 1e-5
