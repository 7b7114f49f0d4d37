"""How alike layers are, and what one is worth."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer_jax.claims.collapse import (
    layer_outputs,
    mean_cosine,
    shorter,
    without_layer,
)
from transformer_jax.models import Transformer, TransformerConfig

SMALL = {
    "source_vocab_size": 11,
    "target_vocab_size": 11,
    "num_encoder_layers": 3,
    "num_decoder_layers": 2,
    "d_model": 8,
    "d_ff": 8,
    "num_heads": 2,
    "head_dim": 4,
    "value_dim": 4,
    "norm": "pre",
}
IDS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
VALID = np.array([[True] * 4, [True, True, False, False]])


@pytest.fixture(scope="module")
def model():
    return Transformer(TransformerConfig(**SMALL))


@pytest.fixture(scope="module")
def params(model):
    return nn.unbox(jax.jit(model.init)(jax.random.key(0), IDS, IDS)["params"])


def test_cosine_of_adjacent_layers():
    outputs = np.random.default_rng(0).normal(size=(2, 4, 4, 8))
    expected = [
        outputs[b, i, t]
        @ outputs[b, i + 1, t]
        / np.linalg.norm(outputs[b, i, t])
        / np.linalg.norm(outputs[b, i + 1, t])
        for b, t in np.argwhere(VALID)
        for i in range(2)
    ]
    found = mean_cosine(outputs, VALID)
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-5)


def test_outputs_of_the_encoder(model, params):
    outputs = model.apply({"params": params}, IDS, VALID, method=layer_outputs)
    memory = model.apply({"params": params}, IDS, VALID, method=Transformer.encode)
    assert outputs.shape == (2, 3, 4, 8)
    np.testing.assert_allclose(outputs[:, -1], memory.vectors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_dropped_layer_of_pre_ln_adds_nothing(model, params, stack):
    """A layer whose last maps are zero is the identity."""

    def zero(path, leaf):
        names = [getattr(entry, "key", "") for entry in path]
        is_last_map = "output" in names or "feed_forward" in names
        if stack in names and "layers" in names and is_last_map:
            return leaf.at[1].set(0)
        return leaf

    idle = jax.tree_util.tree_map_with_path(zero, params)
    whole = jax.jit(model.apply)({"params": idle}, IDS, IDS)
    left = without_layer(params, stack, 1)
    found = jax.jit(shorter(model, stack).apply)({"params": left}, IDS, IDS)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
