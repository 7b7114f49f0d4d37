"""Frozen parameters keep their values to the bit, cost no backward pass, and the
rest is trained as without them.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from helpers.runs import small
from transformer_jax.config import make_task, parse
from transformer_jax.models import counting
from transformer_jax.training.engine import Engine, make_train_step
from transformer_jax.training.freezing import hold, in_words, without_updates
from transformer_jax.training.initialization import init_state

TREE = {
    "a": {"b": jnp.arange(3.0), "c": jnp.arange(6.0).reshape(3, 2)},
    "ab": jnp.arange(5.0),
    "d": jnp.ones(()),
}
BELOW = ("bert/embedding/", "bert/segments", "bert/positions/", "bert/norm/")


def flat(tree):
    return {
        key: np.asarray(leaf)
        for key, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        ({}, {"a/b": 1, "a/c": 1, "ab": 1, "d": 1}),
        ({"a": None}, {"a/b": 0, "a/c": 0, "ab": 1, "d": 1}),
        ({"a/b": None, "d": None}, {"a/b": 0, "a/c": 1, "ab": 1, "d": 0}),
        (
            {"a": 2, "ab": 4},
            {
                "a/b": [0, 0, 1],
                "a/c": [[0, 0], [0, 0], [1, 1]],
                "ab": [0, 0, 0, 0, 1],
                "d": 1,
            },
        ),
    ],
)
def test_only_what_is_not_frozen_has_gradients_and_updates(frozen, trained):
    """A name is frozen as a whole: "a" does not freeze "ab"."""
    held = hold(TREE, frozen)
    for key, value in flat(TREE).items():
        np.testing.assert_array_equal(flat(held)[key], value)
    gradient = jax.grad(
        lambda tree: sum(leaf.sum() for leaf in jax.tree.leaves(hold(tree, frozen)))
    )(TREE)
    updates = without_updates(jax.tree.map(jnp.ones_like, TREE), frozen)
    for tree in (gradient, updates):
        for key, value in flat(tree).items():
            np.testing.assert_array_equal(
                value, np.broadcast_to(trained[key], value.shape)
            )


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ({}, "15 parameters"),
        ({"e": None}, "15 parameters"),
        ({"a": None}, "15 parameters, of which 9 are frozen"),
        ({"a": 2, "d": None}, "15 parameters, of which 7 are frozen"),
        ({"ab": 6}, "15 parameters, of which 5 are frozen"),
    ],
)
def test_frozen_parameters_are_counted(frozen, words):
    assert in_words(TREE, frozen) == words


def classification(**changes):
    config = small("classification", "unused")
    (
        config.optimizer.schedule,
        config.optimizer.warmup_steps,
        config.optimizer.weight_decay,
    ) = "constant", 0, 0.1
    config.optimizer.learning_rate, config.model.num_layers = 0.01, 3
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return make_task(parse(config), None)


def trained(task, steps=3):
    """Return the state before and after training on synthetic batches."""
    engine = Engine(task)
    state = engine.init(jax.random.key(0))
    before = flat(state.params)
    for number in range(steps):
        state, metrics = engine.step(state, task.dummy_batch(8, 7, seed=number))
        assert metrics["skipped"] == 0
    return before, state


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"model__norm": "pre", "model__positions": "rotary"}, marks=pytest.mark.slow
        ),
        {"training__microbatches": 2, "training__ema_decay": 0.5},
    ],
    ids=["post", "pre", "microbatches, average"],
)
def test_frozen_layers_and_embeddings_keep_their_values(changes):
    """Training has dropout and weight decay. Two of three layers are frozen."""
    before, state = trained(classification(fine_tuning__frozen_layers=2, **changes))
    after = flat(state.params)
    for key, value in after.items():
        if key.startswith(BELOW):
            np.testing.assert_array_equal(value, before[key])
        elif key.startswith("bert/encoder/layers/"):
            np.testing.assert_array_equal(value[:2], before[key][:2])
            assert (value[2] != before[key][2]).any(), key
        else:
            assert (value != before[key]).any(), key
    # averaging equal values may round them
    for key, value in flat(state.ema or {}).items():
        if key.startswith(BELOW):
            np.testing.assert_allclose(value, before[key], rtol=1e-6)
        else:
            assert (value != after[key]).any(), key


def test_an_encoder_that_gives_features_keeps_its_values():
    before, state = trained(classification(fine_tuning__feature_layers=2))
    for key, value in flat(state.params).items():
        if key.startswith("bert/"):
            np.testing.assert_array_equal(value, before[key])
        else:
            assert (value != before[key]).all(), key


def products(task):
    """Return the FLOPs of matrix products in a forward pass, and in a training step."""
    params = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    optimizer, batch, key = optax.sgd(0.1), task.dummy_batch(8, 7), jax.random.key(0)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    step = make_train_step(
        task, optimizer, seed=0, microbatches=1, frozen=task.config.frozen
    )
    forward = counting.flops(task.loss, params, batch, key, 0)
    return forward, counting.flops(step, state, batch)


def test_features_have_no_backward_pass():
    """A step has two products more than a forward pass: the gradients of the head.

    They are 2 layers · 16 features × 2 classes, and a bias for each class.
    """
    forward, step = products(classification(fine_tuning__feature_layers=2))
    assert step == forward + 2 * 8 * (2 * 16 + 1) * 2
    forward, step = products(classification())
    assert step > 2.9 * forward


def norm(gradient):
    return np.sqrt(sum((np.float64(g) ** 2).sum() for g in gradient.values()))


def test_the_gradient_norm_is_that_of_what_is_trained():
    changes = {
        "model__dropout_rate": 0.0,
        "model__attention_dropout_rate": 0.0,
        "fine_tuning__frozen_layers": 2,
    }
    task = classification(**changes)
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    batch = task.dummy_batch(8, 7, seed=0)

    def loss(params):
        total, weight, _ = task.loss(params, batch, jax.random.key(0), 0)[
            "cross_entropy"
        ]
        return total / weight

    gradient = flat(jax.jit(jax.grad(loss))(params))
    moving = {key: g for key, g in gradient.items() if not key.startswith(BELOW)}
    moving = {key: g[2:] if "encoder/layers" in key else g for key, g in moving.items()}
    optimizer = optax.sgd(0.1)
    step = make_train_step(
        task, optimizer, seed=0, microbatches=1, frozen=task.config.frozen
    )
    _, metrics = jax.jit(step)(init_state(params, optimizer), batch)
    np.testing.assert_allclose(metrics["gradient_norm"], norm(moving), rtol=1e-5)
    assert metrics["gradient_norm"] < 0.99 * norm(gradient)
