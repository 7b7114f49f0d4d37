"""Recurrent cells against their equations in NumPy float64."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models.cells import CELLS, make_cell

D, INPUT = 5, 3
X = np.float32(np.random.default_rng(0).normal(size=(2, INPUT)))
STATE = np.float32(np.random.default_rng(1).normal(size=(2, D)))
CARRY = {"gru": STATE, "lstm": (2 * STATE, STATE)}
EQUATION = {"gru": oracle.gru, "lstm": oracle.lstm}


def parameters(kind):
    cell = make_cell(kind, D)
    return cell, cell.init(jax.random.key(0), CARRY[kind], X)["params"]


@pytest.mark.parametrize("kind", CELLS)
def test_a_step_is_the_equation(kind):
    cell, boxed = parameters(kind)
    params = oracle.randomized(nn.unbox(boxed))
    carry, output = cell.apply({"params": params}, CARRY[kind], X)
    exact = oracle.float64(params)
    expected = EQUATION[kind](exact, oracle.float64(CARRY[kind]), np.float64(X))
    for found, state in zip(*map(jax.tree.leaves, (carry, expected)), strict=True):
        assert oracle.relative(found, state) <= 1e-5
    assert oracle.relative(output, jax.tree.leaves(expected)[-1]) <= 1e-5


@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_matrices_start_orthogonal(kind):
    _, boxed = parameters(kind)
    for name, part in nn.unbox(boxed).items():
        if name.startswith("h"):
            product = np.asarray(part["kernel"] @ part["kernel"].T)
            np.testing.assert_allclose(product, np.eye(D), atol=1e-5)
