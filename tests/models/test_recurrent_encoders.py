"""The pyramidal encoder of Listen, Attend and Spell (Chan et al. 2016)."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.closed_forms import num_parameters
from transformer_jax.models.recurrent import RecurrentSeq2Seq
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.recurrent_encoders import pairs

# Sentences of 7, 4 and 1 words are read as 2, 1 and 1 positions.
LENGTHS = np.array([7, 4, 1])
VALID = np.arange(7) < LENGTHS[:, None]
SOURCE = np.random.default_rng(0).integers(1, 11, VALID.shape) * VALID
TARGET = np.array([[1, 4, 5], [1, 5, 6], [1, 2, 0]])
CONFIG = RecurrentConfig(
    source_vocab_size=11,
    target_vocab_size=11,
    cell="lstm",
    pyramid_layers=2,
    embedding_dim=3,
    encoder_dim=8,
    d_model=6,
    attention_dim=5,
    bidirectional=True,
    attention="additive",
)


def test_a_pair_is_two_adjacent_positions():
    x = np.arange(12.0).reshape(1, 4, 3)
    joined, valid = pairs(x, np.array([[True, True, True, False]]))
    expected = [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 0, 0, 0]]]
    np.testing.assert_array_equal(joined, expected)
    np.testing.assert_array_equal(valid, [[True, True]])
    joined, valid = pairs(x[:, :3], np.array([[True, False, False]]))
    np.testing.assert_array_equal(joined, [[[0, 1, 2, 0, 0, 0], [0] * 6]])
    np.testing.assert_array_equal(valid, [[True, False]])


CONFIGS = {
    "one layer": CONFIG,
    "two layers": dataclasses.replace(CONFIG, num_layers=2),
    "one direction": dataclasses.replace(CONFIG, bidirectional=False, encoder_dim=6),
    "two layers in one direction": dataclasses.replace(
        CONFIG, bidirectional=False, encoder_dim=6, num_layers=2
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def outputs(request):
    """The config, parameters, and logits and weights of three sentences in one
    batch.
    """
    config = CONFIGS[request.param]
    model = RecurrentSeq2Seq(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)["params"]
    params = oracle.randomized(nn.unbox(shapes))

    @jax.jit
    def forward(params):
        logits, sown = model.apply(
            {"params": params}, SOURCE, TARGET, VALID, mutable="intermediates"
        )
        return logits, sown["intermediates"]["weights"][0]

    return config, params, *forward(params)


@pytest.mark.parametrize("row", range(3))
def test_a_sentence_in_a_batch_is_that_sentence_by_the_equations(outputs, row):
    config, params, logits, weights = outputs
    length = LENGTHS[row]
    expected, looked = oracle.Recurrent(config, params)(
        SOURCE[row, :length], TARGET[row]
    )
    assert oracle.relative(logits[row], expected) < 1e-5
    positions = -(-length // 4)
    assert weights.shape == (3, 1, 3, 2)
    assert oracle.relative(weights[row, :, :, :positions], looked) < 1e-5
    assert (weights[row, :, :, positions:] == 0).all()


def test_parameters_are_counted(outputs):
    config, params, *_ = outputs
    leaves = jax.tree.leaves(params)
    assert num_parameters(config) == sum(leaf.size for leaf in leaves)
    assert config.memory_stride == 4
