"""The train state before the first update, and its size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from transformer_jax.training.initialization import (
    bytes_per_device,
    init_state,
    not_finite,
)

PARAMS = {"a": jnp.ones(3), "b": {"c": jnp.ones((2, 2))}}


def test_a_state_holds_an_average_only_if_it_is_asked_for():
    assert init_state(PARAMS, optax.sgd(0.1)).ema is None
    assert init_state(PARAMS, optax.sgd(0.1), ema_decay=0.9).ema is PARAMS


def test_the_first_parameter_that_is_not_finite_is_named():
    assert not_finite(PARAMS) == ""
    for value in (np.nan, np.inf):
        ruined = PARAMS | {"b": {"c": PARAMS["b"]["c"].at[1, 0].set(value)}}
        assert not_finite(ruined) == "b/c"


def test_a_device_holds_its_share_of_what_is_sharded_and_all_of_the_rest():
    mesh = AbstractMesh((4,), ("fsdp",))
    shardings = [NamedSharding(mesh, PartitionSpec(axis)) for axis in ("fsdp", None)]
    arrays = [
        jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)
        for sharding in shardings
    ]
    assert bytes_per_device(arrays) == 4 * (2 * 3 + 8 * 3)
