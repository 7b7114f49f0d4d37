"""Layers of a stack, one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.kernels.loop import unstack


def test_unstack():
    tree = {"a": np.arange(12).reshape(2, 3, 2)}
    first, second = unstack(tree, 2)
    np.testing.assert_array_equal(first["a"], tree["a"][0])
    np.testing.assert_array_equal(second["a"], tree["a"][1])
    assert len(unstack(tree, 3, axis=1)) == 3
    np.testing.assert_array_equal(unstack(tree, 3, axis=1)[2]["a"], tree["a"][:, 2])


def test_the_gradients_of_layers_are_concatenated():
    def total(x):
        return sum((layer + 1) * part for layer, part in enumerate(unstack(x, 3))).sum()

    gradient = jax.grad(total)
    x = jnp.ones((3, 2))
    np.testing.assert_array_equal(gradient(x), [[1, 1], [2, 2], [3, 3]])
    used = {equation.primitive.name for equation in jax.make_jaxpr(gradient)(x).eqns}
    assert "concatenate" in used
    assert not used & {"pad", "scatter", "scatter-add"}
