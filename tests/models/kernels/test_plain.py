"""Plain equations, for counting."""

import functools

import jax
import jax.numpy as jnp

from transformer_jax.models import layers
from transformer_jax.models.attention import dot_product_attention
from transformer_jax.models.kernels import plain, platforms
from transformer_jax.models.kernels.blocked import blocked_attention
from transformer_jax.models.kernels.choose import kernel_for
from transformer_jax.models.kernels.loop import over_layers
from transformer_jax.models.masks import CAUSAL


def test_the_equations_are_used_in_their_context_only():
    assert not plain.is_on()
    with plain.equations():
        assert plain.is_on()
    assert not plain.is_on()


def test_no_kernel_replaces_the_equation_of_attention():
    x = jnp.zeros((1, 3, 2, 4))
    options = {"mask": CAUSAL, "dropout_rate": 0.0, "dtype": "float32"}
    options["equation"] = dot_product_attention
    assert kernel_for("blocked", x, x, x, **options) is blocked_attention
    with plain.equations():
        assert kernel_for("blocked", x, x, x, **options) is None


def test_layers_are_a_loop_in_which_nothing_is_computed_again(monkeypatch):
    # on CPUs, there is also a loop if something is computed again
    monkeypatch.setattr(platforms, "current", lambda: "gpu")

    def layer(carry, inputs):
        scale, _ = inputs
        return jnp.sin(scale * carry), carry

    def primitives(function, *arguments):
        return {x.primitive for x in jax.make_jaxpr(function)(*arguments).eqns}

    def of_layers():
        options = {"num_layers": 2, "unroll": 2, "remat": "full"}
        run = functools.partial(over_layers, layer, **options)
        return primitives(run, jnp.ones(2), jnp.zeros(2), jnp.ones(3))

    again = primitives(jax.checkpoint(jnp.sin), 1.0)
    loop = primitives(lambda x: jax.lax.scan(layer, x, (x, x)), jnp.ones(2))
    assert loop & of_layers() == set()
    assert again <= of_layers()
    with plain.equations():
        assert loop <= of_layers()
        assert again & of_layers() == set()


def test_activations_are_computed_again_elsewhere_only():
    def traced():
        return str(jax.make_jaxpr(lambda x: layers.ACTIVATIONS["gelu"](x))(1.0))

    assert "remat" in traced()
    with plain.equations():
        assert "remat" not in traced()
