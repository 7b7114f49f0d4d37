"""Layers of a stack, one by one."""

import numpy as np

from transformer_jax.models.kernels.loop import unstack


def test_unstack():
    tree = {"a": np.arange(12).reshape(2, 3, 2)}
    first, second = unstack(tree, 2)
    np.testing.assert_array_equal(first["a"], tree["a"][0])
    np.testing.assert_array_equal(second["a"], tree["a"][1])
    assert len(unstack(tree, 3, axis=1)) == 3
    np.testing.assert_array_equal(unstack(tree, 3, axis=1)[2]["a"], tree["a"][:, 2])
