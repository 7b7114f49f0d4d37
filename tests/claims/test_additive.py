"""Attention of a recurrent decoder to the encoder's outputs, by products."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer_jax.claims.additive import raw_values, raw_values_unscaled
from transformer_jax.models.alignment import Memory, MultiHead

B, T, S, D = 2, 3, 5, 4
STATES = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
OUTPUTS = np.random.default_rng(1).normal(size=(B, S, D)).astype(np.float32)


def attend(module, states, outputs):
    keys, values = module.project(outputs)
    memory = Memory(keys, values, outputs[:, -1], np.ones((B, S), bool))
    return module(states, memory)


@pytest.mark.parametrize(
    ("change", "divisor"), [(raw_values, D**0.5), (raw_values_unscaled, 1.0)]
)
def test_the_context_is_a_mean_of_the_encoders_outputs(change, divisor):
    module = MultiHead(state_dim=D, memory_dim=D, num_heads=1)
    with nn.intercept_methods(change):
        key = jax.random.key(0)
        params = nn.unbox(module.init(key, STATES, OUTPUTS, method=attend))
        found, _ = module.apply(params, STATES, OUTPUTS, method=attend)
    assert set(params["params"]) == {"query", "key"}
    q = STATES @ params["params"]["query"]["kernel"][:, 0]
    k = OUTPUTS @ params["params"]["key"]["kernel"][:, 0]
    exponentials = np.exp(q @ k.swapaxes(1, 2) / divisor)
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, weights @ OUTPUTS, rtol=1e-4, atol=1e-5)
