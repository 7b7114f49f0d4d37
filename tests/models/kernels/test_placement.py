"""Boxes with the names of a parameter's axes."""

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.models.kernels.placement import Named, named


def test_a_parameter_has_a_box_with_the_names_of_its_axes():
    box = named(nn.initializers.ones, ("embed", "mlp"))(jax.random.key(0), (2, 3))
    assert isinstance(box, Named)
    assert box.names == ("embed", "mlp")
    np.testing.assert_array_equal(nn.unbox(box), np.ones((2, 3)))


def test_nnx_gets_the_names_and_shards_nothing_by_itself():
    box = named(nn.initializers.ones, ("embed", "mlp"))(jax.random.key(0), (2, 3))
    metadata = box.to_nnx_metadata()
    assert metadata["out_sharding"] == ("embed", "mlp")
    assert not metadata["eager_sharding"]
