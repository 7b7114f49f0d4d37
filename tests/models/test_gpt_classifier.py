"""GPT's classifier against NumPy float64: its vector, both orders of pairs, and the
tokens that it sees.
"""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.sizes import SINGLE_STACK
from transformer_jax.models.gpt import SPECIALS, GPTClassifier, GPTConfig, swapped

B, T, V, CLASSES = 4, 11, 31, 5
SMALL = GPTConfig(**SINGLE_STACK)
LENGTHS = np.array([11, 5, 1, 7])
VALID = np.arange(T) < LENGTHS[:, None]
TOKENS = np.random.default_rng(1).integers(0, V + len(SPECIALS), (B, T))


def parameters(model):
    ids = np.zeros((model.views, 1), np.int32)
    return oracle.randomized(
        nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids == 0))["params"]
    )


def last_layer(params, config, tokens, valid):
    """Return the last layer's output: logits of an output layer that is the
    identity.
    """
    config = dataclasses.replace(config, tie_embeddings=False, vocab_size=17)
    return oracle.gpt(params | {"output": {"table": np.eye(17)}}, config, tokens, valid)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 34),
        ({"norm": "pre", "vocab_multiple": 8}, 40),
        ({"tie_embeddings": False}, 34),
    ],
)
def test_logits_are_a_linear_map_of_the_last_tokens_vector(changes, rows):
    """The language model in it has three more tokens."""
    model = GPTClassifier(dataclasses.replace(SMALL, **changes), CLASSES)
    params = parameters(model)
    assert params["gpt"]["embedding"]["table"].shape == (rows, 17)
    x = last_layer(params["gpt"], model.config, TOKENS, VALID)
    expected = oracle.linear(
        oracle.float64(params["head"]), x[np.arange(B), LENGTHS - 1]
    )
    found = np.asarray(jax.jit(model.apply)({"params": params}, TOKENS, VALID))
    assert found.dtype == np.float32
    assert oracle.relative(found, expected) <= 1e-5
    logits, hidden, _ = jax.jit(
        lambda p: model.apply({"params": p}, TOKENS, VALID, method=GPTClassifier.hidden)
    )(params)
    assert oracle.relative(logits, expected) <= 1e-5
    assert oracle.relative(np.asarray(hidden)[VALID], x[VALID]) <= 1e-5


def test_the_vectors_of_adjacent_rows_are_added():
    model = GPTClassifier(SMALL, CLASSES, views=2)
    params = parameters(model)
    vectors = last_layer(params["gpt"], SMALL, TOKENS, VALID)[np.arange(B), LENGTHS - 1]
    expected = oracle.linear(
        oracle.float64(params["head"]), vectors[::2] + vectors[1::2]
    )
    found = np.asarray(jax.jit(model.apply)({"params": params}, TOKENS, VALID))
    assert found.shape == (B // 2, CLASSES)
    assert oracle.relative(found, expected) <= 1e-5


def test_it_sees_all_tokens_and_no_padding():
    """Test the gradient with respect to the embedding of each token.

    No id occurs twice.
    """
    model = GPTClassifier(SMALL, CLASSES)
    params, tokens = parameters(model), np.arange(T)[None]

    def run(table):
        changed = params | {"gpt": params["gpt"] | {"embedding": {"table": table}}}
        return model.apply({"params": changed}, tokens, tokens < 7)[0] @ np.arange(5.0)

    gradient = np.asarray(jax.jit(jax.grad(run))(params["gpt"]["embedding"]["table"]))
    np.testing.assert_array_equal((gradient != 0).any(axis=-1)[:T], np.arange(T) < 7)


def test_the_vector_has_dropout():
    """The head is the identity.

    Dropout in the layers leaves no zeros in the output of a norm.
    """
    config = dataclasses.replace(
        SMALL, dropout_rate=0.5, attention_dropout_rate=0.0, num_layers=1
    )
    model, plain = (
        GPTClassifier(config, 17),
        GPTClassifier(dataclasses.replace(config, dropout_rate=0.0), 17),
    )
    params = parameters(model) | {"head": {"kernel": np.eye(17), "bias": np.zeros(17)}}
    rngs = {"dropout": jax.random.key(0)}
    dropped, kept = (
        np.asarray(jax.jit(each.apply)({"params": params}, TOKENS, VALID, rngs=rngs))
        for each in (model, plain)
    )
    assert 0.3 < (dropped == 0).mean() < 0.7
    assert (kept != 0).all()


def test_a_swap_by_hand():
    """The ids of START, DELIM and EXTRACT are 91, 92 and 93. The texts may be empty."""
    pairs = [
        ([1, 2, 3], [4, 5]),
        ([1], [4, 5, 6, 7, 8]),
        ([], [4]),
        ([1, 2], []),
        ([], []),
    ]

    def rows(order):
        laid = [[91, *pair[order[0]], 92, *pair[order[1]], 93] for pair in pairs]
        return np.array([row + [0] * (11 - len(row)) for row in laid])

    second = np.array([len(first) + 2 for first, _ in pairs])
    length = np.array([len(first) + len(other) + 3 for first, other in pairs])
    np.testing.assert_array_equal(
        jax.jit(swapped)(rows((0, 1)), second, length), rows((1, 0))
    )
    filler = np.zeros(1, np.int32)
    np.testing.assert_array_equal(
        swapped(np.zeros((1, 11), np.int32), filler, filler), np.zeros((1, 11))
    )
