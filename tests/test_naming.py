"""Names of activations: which there are, and that capturing and replacing them is
exact.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small_models import MODELS, SINGLE
from transformer_jax import models, naming

IDS = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])


def gpt(**options: Any) -> models.GPT:
    config = models.GPTConfig(**SINGLE)
    return models.GPT(dataclasses.replace(config, num_layers=3, **options))


CASES = {
    "GPT": gpt(norm="pre"),
    # written out instead of a loop, and computed again in the backward pass
    "GPT, unrolled": gpt(unroll=3, remat="full"),
    "RNN": MODELS["RecurrentLM"],
}


def call(model, params, *arguments):
    return model.apply({"params": params}, *arguments)


def drawn(model):
    """Return random parameters, drawn by NumPy, which need no program."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)
    draw = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(shapes["params"])
    values = [jnp.float32(draw.normal(0, 0.5, leaf.shape)) for leaf in leaves]
    return jax.tree.unflatten(structure, values)


class Runs:
    """A model with its parameters, and all of its activations."""

    def __init__(self, model):
        self.model = model
        self.arguments = (drawn(model), IDS)
        self.program = naming.Program(functools.partial(call, model), *self.arguments)
        self.output, self.found = self.program.run(self.arguments, None)

    def patched(self, replacements, names=()):
        return self.program.run(self.arguments, names, replacements)


@functools.cache
def runs_of(name):
    return Runs(CASES[name])


@pytest.fixture(params=CASES)
def case(request):
    return runs_of(request.param)


def test_capturing_changes_nothing_and_neither_do_the_own_values(case):
    """Bitwise, with all activations at once."""
    output, _ = case.patched({})
    np.testing.assert_array_equal(case.output, output)
    own = {name: found.value for name, found in case.found.items()}
    output, _ = case.patched(own)
    np.testing.assert_array_equal(output, case.output)


@pytest.fixture
def of_gpt():
    return runs_of("GPT")


def test_names_are_paths_in_the_order_of_computation(of_gpt):
    of_layer_1 = [
        name.removeprefix("decoder/layers/1/")
        for name in of_gpt.found
        if name.startswith("decoder/layers/1/") and not name.endswith("/input")
    ]
    assert of_layer_1 == [
        "self_attention_residual/layer_norm",
        "self_attention_residual/before",
        "self_attention/key",
        "self_attention/value",
        "self_attention/heads/0",
        "self_attention/heads/1",
        "self_attention/query",
        "self_attention/output",
        "self_attention",
        "self_attention_residual/after",
        "feed_forward_residual/layer_norm",
        "feed_forward_residual/before",
        "feed_forward/inner",
        "feed_forward/outer",
        "feed_forward",
        "feed_forward_residual/after",
    ]
    assert next(iter(of_gpt.found)) == "embedding"
    assert next(reversed(of_gpt.found)) == "hidden"


@pytest.mark.parametrize("name", ["GPT", "GPT, unrolled"])
def test_layers_are_told_apart(name):
    """Doubling the feed-forward network of layer 1 is what doubled weights give, and
    leaves layer 0 as it is.
    """
    runs = runs_of(name)
    stream = [f"decoder/layers/{i}" for i in range(3)]
    double = {"decoder/layers/1/feed_forward": lambda x: 2 * x}
    output, found = runs.patched(double, stream)

    def doubled(path, x):
        is_outer = "'outer'" in jax.tree_util.keystr(path)
        return x * np.expand_dims([1, 1 + is_outer, 1], (*range(1, x.ndim),))

    params, *rest = runs.arguments
    layers = jax.tree.map_with_path(doubled, params["decoder"]["layers"])
    decoder = params["decoder"] | {"layers": layers}
    expected = call(runs.model, params | {"decoder": decoder}, *rest)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[stream[0]].value, runs.found[stream[0]].value)
    assert abs(found[stream[1]].value - runs.found[stream[1]].value).max() > 0.01


def test_activations_of_a_loop_over_positions():
    """A state that is set at position 1 changes the output from there on."""
    runs = runs_of("RNN")
    assert runs.found["cells_0/1"].stepwise
    assert runs.found["cells_0/1"].value.shape == (2, 4, 8)

    def at_1(state, position):
        return jnp.where(position == 1, 0.0, state)

    states = {"cells_0/0/0": at_1, "cells_0/0/1": at_1}
    output, found = runs.patched(states, ["cells_0/0/1"])
    assert (found["cells_0/0/1"].value[:, 1] == 0).all()
    np.testing.assert_array_equal(output[:, :2], runs.output[:, :2])
    # from position 2 on, it is a text that begins there
    rest = call(runs.model, runs.arguments[0], IDS[:, 2:])
    np.testing.assert_allclose(output[:, 2:], rest, rtol=1e-5, atol=1e-6)


def test_a_function_must_keep_the_shape(of_gpt):
    words = (
        r"decoder/layers/0: the function returns shape \(2, 8\) for an activation of"
    )
    with pytest.raises(ValueError, match=words):
        of_gpt.patched({"decoder/layers/0": lambda x: x[:, 0]})
