"""Products with weights in 8 bits against the integers of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models.kernels import int8
from transformer_jax.models.kernels.int8 import LEAST_ROWS, Int8
from transformer_jax.models.kernels.products import linear


def normal(*shape):
    return np.float32(np.random.default_rng([*shape]).normal(size=shape))


def by_hand(x, weight):
    """Return the product of two matrices that are rounded to 8 bits."""
    of_row = np.abs(x).max(axis=1, keepdims=True) / 127
    of_column = np.abs(weight).max(axis=0, keepdims=True) / 127
    left, right = np.rint(x / of_row), np.rint(weight / of_column)
    return (left @ right) * of_row * of_column


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(
    ("spec", "shape", "summed"),
    [
        ("BTD,DF->BTF", (5, 6), (0,)),
        ("BTD,DNH->BTNH", (5, 2, 3), (0,)),
        ("BTD,VD->BTV", (11, 5), (1,)),
        ("BTNH,NHD->BTD", (2, 3, 5), (0, 1)),
    ],
)
def test_a_product_is_that_of_integers(spec, shape, summed, rows):
    weight = normal(*shape)
    inner = [shape[axis] for axis in summed]
    x = normal(rows, 1, *inner)
    found = int8.product(spec, x, int8.rounded(weight, summed))
    matrix = np.moveaxis(weight, summed, range(len(summed)))
    expected = by_hand(x.reshape(rows, -1), matrix.reshape(np.prod(inner), -1)).reshape(
        found.shape
    )
    assert found.shape == jnp.einsum(spec, x, weight).shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_few_rows_are_padded_and_cut_again():
    weight = int8.rounded(normal(5, 6), (0,))
    x = normal(LEAST_ROWS + 1, 1, 5)
    whole = int8.product("BTD,DF->BTF", x, weight)
    one = int8.product("BTD,DF->BTF", x[:1], weight)
    np.testing.assert_array_equal(one, whole[:1])


def test_the_largest_weight_of_an_output_is_127_and_nothing_is_zero():
    weight = normal(2, 5, 6)  # layers, inputs, outputs
    weight[:, :, 3] = 0
    found = int8.rounded(weight, (-2,))
    assert found.values.dtype == jnp.int8
    assert found.shape == (2, 5, 6)
    assert found.scale.shape == (2, 6)
    largest = np.abs(np.asarray(found.values, np.int32)).max(axis=1)
    np.testing.assert_array_equal(largest, [[127, 127, 127, 0, 127, 127]] * 2)
    error = np.abs(found.values * found.scale[:, None] - weight)
    assert (error <= np.asarray(found.scale)[:, None] / 2 * (1 + 1e-6)).all()


def test_layers_can_be_taken_apart():
    found = int8.rounded(normal(2, 5, 6), (-2,))
    first = jax.tree.map(lambda x: x[0], found)
    assert isinstance(first, Int8)
    expected = int8.rounded(normal(2, 5, 6)[0], (0,))
    np.testing.assert_array_equal(first.values, expected.values)
    np.testing.assert_array_equal(first.scale, expected.scale)


def test_a_linear_map_adds_its_bias():
    weight = int8.rounded(normal(5, 6), (0,))
    x, bias = normal(3, 2, 5), normal(6)
    found = linear("...D,DF->...F", x, weight, jnp.asarray(bias), dtype="bfloat16")
    product = np.asarray(int8.product("BTD,DF->BTF", x, weight))
    np.testing.assert_allclose(found, product + bias, rtol=1e-6)


def test_rows_of_a_table():
    table = normal(11, 5)
    weight = int8.rounded(table, (1,))
    ids = jnp.array([[3, 0], [10, 3]])
    found = int8.rows(weight, ids)
    assert found.shape == (2, 2, 5)
    np.testing.assert_allclose(found, table[np.asarray(ids)], atol=0.02)
