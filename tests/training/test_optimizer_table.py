"""Every optimizer of the table: it learns, resumes, and does not see the mesh."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from helpers.corpus import write_corpus
from helpers.processes import on_devices
from helpers.runs import small
from transformer_jax.config import make_task, parse
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.engine import Engine
from transformer_jax.training.matrices import Block
from transformer_jax.training.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    make_optimizer,
)
from transformer_jax.training.sharding import feed

# At these rates, the loss falls within 8 steps.
RATES = {"sgd": 0.1, "adadelta": 1.0, "lion": 1e-3, "adafactor": 1e-2}


# Adafactor and Muon keep states of other shapes than the parameters. The others differ
# from AdamW, with which all other runs are trained, in a line.
FACTORED = ("adafactor", "muon")
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in FACTORED))
    for name in OPTIMIZERS
]


def config_of(name: str, directory: Path) -> ConfigDict:
    config = small("language_modeling", directory)
    config.optimizer.name = name
    config.optimizer.schedule = "constant"
    config.optimizer.learning_rate = RATES.get(name, 3e-3)
    config.optimizer.warmup_steps = 0
    config.optimizer.weight_decay = 0.0 if name == "adam" else 0.1
    return config


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_continues_bitwise(name, corpus, tmp_path):
    task = make_task(parse(config_of(name, corpus)), tmp_path)
    engine, batches = Engine(task), task.batches("train", 0)
    checkpoints = Checkpoints(
        tmp_path / "checkpoints", task.config.checkpoint, task.metrics
    )

    def train(state, steps):
        losses = []
        for fed in feed(batches, steps, engine.mesh):
            state, metrics = engine.step(state, fed.placed)
            losses.append(float(metrics["loss"]))
        return state, losses

    half, first = train(engine.init(jax.random.key(0)), range(4))
    checkpoints.save(4, half, {})
    whole, last = train(half, range(4, 8))
    assert np.mean(last[2:]) < np.mean(first[:2]) - 0.01
    continued, _ = train(engine.restore_or_init(checkpoints, 4), range(4, 8))
    checkpoints.close()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(continued), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_counted(name, tmp_path):
    engine = Engine(make_task(parse(config_of(name, tmp_path)), None))
    state = engine.init(jax.random.key(0))
    assert engine.updates(state) == 0
    state, _ = engine.step(state, engine.task.dummy_batch(8, 8, seed=1))
    assert engine.updates(state) == 1


PROGRAM = """
import json, jax
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
from transformer_jax.training.engine import Engine

def train(config, devices):
    engine = Engine(make_task(parse(config), None), devices)
    state, losses = engine.init(jax.random.key(0)), []
    for number in range(3):
        batch = engine.task.dummy_batch(16, 8, seed=number)
        state, metrics = engine.step(state, batch)
        losses.append(float(metrics["loss"]))
    shares = {
        jax.tree_util.keystr(path, simple=True, separator="/"):
            x.addressable_shards[0].data.size / x.size
        for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
    }
    return losses, shares

found = {}
for values in CONFIGS:
    one = ConfigDict(values)
    eight = ConfigDict(values)
    eight.mesh.data, eight.mesh.fsdp, eight.mesh.tensor = 2, 2, 2
    found[one.optimizer.name] = train(one, jax.devices()[:1]), train(eight, None)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_eight_devices_train_as_one(tmp_path):
    """The moments of a matrix are divided like the matrix."""
    write_corpus(tmp_path / "corpus")
    configs = []
    for name in OPTIMIZERS:
        config = config_of(name, tmp_path / "corpus")
        config.model.dropout_rate = 0.0
        config.model.num_heads = 2
        config.model.vocab_multiple = 8
        config.data.rows_multiple = 16
        configs.append(config.to_dict())
    found = json.loads(on_devices(8, PROGRAM.replace("CONFIGS", repr(configs))))
    assert found.keys() == OPTIMIZERS.keys()
    for name, ((alone, _), (together, shares)) in found.items():
        assert together == pytest.approx(alone, rel=1e-5), name
        kernels = [
            share
            for key, share in shares.items()
            if "inner/kernel" in key and not is_mean(key)
        ]
        assert kernels, name
        assert max(kernels) <= 1 / 4, name


def is_mean(key: str) -> bool:
    """Return True for the means of rows and columns that adafactor keeps."""
    return "/v_row/" in key or "/v_col/" in key


def trained(name, param, block, gradients):
    config = OptimizerConfig(name=name, b2=0.9, epsilon=1e-6)
    optimizer = make_optimizer(config, lambda count: 0.1, [block])
    params = {"x": jnp.asarray(param)}
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update({"x": jnp.asarray(gradient)}, state, params)
        params = {"x": params["x"] + updates["x"]}
    return np.asarray(params["x"])


def some(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(3, 131), (3, 137, 131)])
def test_the_layers_of_a_stack_are_trained_as_if_alone(name, shape):
    stack, gradients = some(*shape), some(4, *shape, seed=1)
    gradients *= np.reshape([1.0, 9.0, 0.1], (3, *[1] * len(shape[1:])))
    alone, stacked = (
        (Block((0,)), Block((1,)))
        if len(shape) == 2
        else (Block((0,), (1,)), Block((1,), (2,)))
    )
    found = trained(name, stack, stacked, gradients)
    for layer in range(3):
        expected = trained(name, stack[layer], alone, gradients[:, layer])
        np.testing.assert_allclose(found[layer], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_heads_are_trained_as_one_matrix(name):
    kernel, gradients = some(137, 3, 47), some(4, 137, 3, 47, seed=1)
    found = trained(name, kernel, Block((0,), (1, 2)), gradients)
    expected = trained(
        name,
        kernel.reshape(137, 141),
        Block((0,), (1,)),
        gradients.reshape(4, 137, 141),
    )
    np.testing.assert_allclose(found.reshape(137, 141), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("is_table", [False, True])
def test_muon_makes_updates_orthogonal_except_those_of_tables(is_table):
    x, gradient = some(131, 137), some(1, 131, 137, seed=1)
    change = trained("muon", x, Block((0,), (1,), is_table), gradient) - x
    singular = np.linalg.svd(change, compute_uv=False) / (0.1 * 0.2 * 137**0.5)
    assert (singular.min() > 0.6 and singular.max() < 1.3) != is_table
    if not is_table:
        assert np.sqrt((change**2).mean()) == pytest.approx(0.1 * 0.2, rel=0.2)


def test_adafactor_keeps_the_means_of_rows_and_columns():
    config = OptimizerConfig(name="adafactor")
    block = Block((1,), (2, 3))
    state = make_optimizer(config, lambda count: 0.1, [block]).init(
        {"x": jnp.ones((2, 131, 3, 47))}
    )
    sizes = sorted(x.size for x in jax.tree.leaves(state))
    assert sizes[-2:] == [2 * 131, 2 * 3 * 47]


def test_adafactor_moves_a_matrix_in_proportion_to_its_size():
    x, gradients = some(131, 137), some(3, 131, 137, seed=1)
    block = Block((0,), (1,))
    small_change = trained("adafactor", x, block, gradients) - x
    large_change = trained("adafactor", 8 * x, block, gradients) - 8 * x
    np.testing.assert_allclose(large_change, 8 * small_change, rtol=1e-3, atol=1e-5)
