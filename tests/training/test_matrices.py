"""Matrices and vectors among parameters, told by the names of their axes."""

import jax
import numpy as np
import pytest

from transformer_jax.models.kernels.placement import Named
from transformer_jax.training.matrices import Block, blocks


def block_of(shape, names):
    (block,) = blocks({"x": Named(jax.ShapeDtypeStruct(shape, np.float32), names)})
    return block


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((5, 7), ("embed", "mlp"), Block((0,), (1,))),
        ((3, 5, 7), ("layers", "embed", "mlp"), Block((1,), (2,))),
        ((5, 2, 3), ("embed", "heads", "head_dim"), Block((0,), (1, 2))),
        ((2, 3, 5), ("kv_heads", "head_dim", "embed"), Block((0, 1), (2,))),
        ((4, 2, 3, 5), ("layers", "heads", "head_dim", "embed"), Block((1, 2), (3,))),
        ((5, 2, 3), ("embed", "state", "head_dim"), Block((0,), (1, 2))),
        (
            (3, 3, 5, 7),
            ("kernel_rows", "kernel_columns", "features", "channels"),
            Block((0, 1, 2), (3,)),
        ),
        ((11, 5), ("vocab", "vector"), Block((0,), (1,), True)),
        ((5, 3), ("embed", "classes"), Block((0,), (1,), True)),
        ((9, 3), ("distance", "head_dim"), Block((0,), (1,), True)),
        ((5,), ("embed",), Block((0,))),
        ((3, 5), ("layers", "embed"), Block((1,))),
        ((3, 2, 5), ("layers", "heads", "head_dim"), Block((1, 2))),
        ((), (), Block(())),
    ],
)
def test_a_matrix_is_told_by_its_axes(shape, names, expected):
    assert block_of(shape, names) == expected
    assert block_of(shape, names).is_matrix == bool(expected.columns)


def test_a_parameter_without_names_is_a_vector():
    (block,) = blocks({"x": jax.ShapeDtypeStruct((3, 5), np.float32)})
    assert block == Block((0, 1))


def test_a_flat_parameter_has_one_axis_for_rows_and_one_for_columns():
    x = np.arange(4.0 * 2 * 3 * 5).reshape(4, 2, 3, 5)
    flat = Block((1, 2), (3,)).flat(x)
    np.testing.assert_array_equal(flat, x.reshape(4, 6, 5))


def test_each_block_has_its_root_mean_square():
    x = np.float32(np.random.default_rng(0).normal(size=(3, 5, 2, 7)))
    found = Block((1,), (2, 3)).root_mean_square(x)
    expected = [np.sqrt((layer**2).mean()) for layer in x]
    np.testing.assert_allclose(found[:, 0, 0, 0], expected, rtol=1e-6)
