"""Layers and models work inside `flax.nnx` through its own bridge, without a global
setting.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.nnx import bridge

from helpers.processes import on_devices
from helpers.small_models import MODELS, PAIRS
from transformer_jax.models.kernels.placement import Named
from transformer_jax.models.stack import BlockConfig, Stack

STACK = Stack(
    BlockConfig(
        d_model=8, d_ff=5, num_heads=2, head_dim=4, value_dim=4, dropout_rate=0.5
    ),
    2,
)
X = jax.random.normal(jax.random.key(1), (2, 3, 8))


def linen_variables(module):
    """Return the parameters of a module of the bridge in the form in which linen
    takes them.
    """
    own = {
        name: x
        for name, x in vars(module).items()
        if not name.startswith(("to_nnx__", "_pytree__"))
    }
    return bridge.variables.nnx_attrs_to_linen_vars(own)


def test_the_bridge_computes_what_linen_computes():
    module = bridge.ToNNX(STACK, rngs=nnx.Rngs(0)).lazy_init(X)
    variables = linen_variables(module)
    assert jax.tree.structure(variables) == jax.tree.structure(
        STACK.init(jax.random.key(0), X)
    )
    np.testing.assert_array_equal(module(X), STACK.apply(variables, X))


def test_a_parameter_keeps_the_names_of_its_axes():
    module = bridge.ToNNX(STACK, rngs=nnx.Rngs(0)).lazy_init(X)
    box = linen_variables(module)["params"]["layers"]["feed_forward"]["inner"]["kernel"]
    assert isinstance(box, Named)
    assert box.names == ("layers", "embed", "mlp")


def test_gradients_are_those_of_linen():
    module = bridge.ToNNX(STACK, rngs=nnx.Rngs(0)).lazy_init(X)
    variables = linen_variables(module)
    found = nnx.to_pure_dict(
        nnx.grad(lambda model: jnp.square(model(X)).mean())(module)
    )
    expected = jax.grad(lambda v: jnp.square(STACK.apply(v, X)).mean())(variables)[
        "params"
    ]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_training_with_nnx_lowers_the_loss():
    module = bridge.ToNNX(STACK, rngs=nnx.Rngs(params=0, dropout=1)).lazy_init(X)
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradient = nnx.value_and_grad(lambda model: jnp.square(model(X)).mean())(
            model
        )
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(module, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_parameters_are_saved_and_restored():
    module = bridge.ToNNX(STACK, rngs=nnx.Rngs(0)).lazy_init(X)
    saved = serialization.to_bytes(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    other = bridge.ToNNX(STACK, rngs=nnx.Rngs(1)).lazy_init(X)
    assert (other(X) != module(X)).any()
    state = nnx.state(other, nnx.Param)
    restored = serialization.from_bytes(nnx.to_pure_dict(state), saved)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(other, state)
    np.testing.assert_array_equal(other(X), module(X))


def test_dropout_acts_where_there_is_a_stream_for_it():
    module = bridge.ToNNX(STACK, rngs=nnx.Rngs(params=0, dropout=1)).lazy_init(X)
    assert (module(X) != module(X)).any()
    np.testing.assert_array_equal(
        module(X, rngs=nnx.Rngs(0)), module(X, rngs=nnx.Rngs(1))
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_model_passes_the_bridge(name):
    model, ids = MODELS[name], np.ones((2, 3), np.int32)
    arguments = (ids, ids, ids > 0) if name in PAIRS else (ids, ids > 0)
    module = bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(*arguments)
    expected = model.apply(linen_variables(module), *arguments)
    for a, b in zip(
        jax.tree.leaves(module(*arguments)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(a, b)


SHARDED = """
import flax.linen as nn, jax, numpy as np
from flax import nnx
from transformer_jax.models.stack import BlockConfig, Stack
x = np.ones((2, 3, 8), np.float32)
stack = Stack(BlockConfig(d_model=8, d_ff=6, num_heads=2, head_dim=4, value_dim=4), 2)
alone = nnx.bridge.ToNNX(stack, rngs=nnx.Rngs(0)).lazy_init(x)(x)
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
with jax.set_mesh(mesh), nn.logical_axis_rules((("mlp", "tensor"),)):
    module = nnx.bridge.ToNNX(stack, rngs=nnx.Rngs(0)).lazy_init(x)
    print(module.layers["feed_forward"]["inner"]["kernel"].sharding.spec[-1])
    print(abs(nnx.jit(lambda model, x: model(x))(module, x) - alone).max() < 1e-5)
"""


def test_parameters_are_sharded_by_the_rules_in_scope():
    assert on_devices(2, SHARDED).splitlines() == ["tensor", "True"]
