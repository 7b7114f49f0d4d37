"""Meshes of fake devices give the results of one device, and reject batches that
they cannot divide.
"""

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from helpers import ROOT
from helpers.corpus import write_corpus
from helpers.processes import on_devices
from helpers.runs import get_config, rows, shrink, small
from transformer_jax.models.t5 import COMMON, VERSIONS, dropout
from transformer_jax.training.sharding import AXES, check_rows

RUN = f"""
import runpy, sys, warnings
warnings.simplefilter("ignore")
sys.argv = ["train", *ARGUMENTS]
runpy.run_path({str(ROOT / "scripts" / "train.py")!r}, run_name="__main__")
"""
PROGRAM = """
import json, sys
import jax
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
from transformer_jax.training.engine import Engine
from transformer_jax.training.sharding import feed

found, shares = [], []
for *mesh, microbatches in RUNS:
    raw = ConfigDict(CONFIG)
    raw.mesh.data, raw.mesh.fsdp, raw.mesh.tensor = mesh
    raw.training.microbatches = microbatches
    task = make_task(parse(raw), WORKDIR)
    task.fingerprint(training=True)
    engine = Engine(task)
    batches = task.batches("train", 0)
    state = engine.init(jax.random.key(0))
    found.append([])
    for fed in feed(batches, range(STEPS), engine.mesh):
        state, metrics = engine.step(state, fed.placed)
        found[-1].append(float(metrics["loss"]))
    shares.append({})
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        held = {shard.data.nbytes for shard in x.addressable_shards}
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shares[-1][name] = max(held) / x.nbytes
print(json.dumps([found, shares]))
"""


def train(
    folder: Path,
    devices: int,
    steps: int,
    runs: list[tuple[int, ...]],
    model: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[list, list]:
    """Train once for each (data, fsdp, tensor, microbatches), with dropout.

    `model` has keys of the model.

    Return the losses of the runs, and the share of each array that the fullest device
    holds.
    """
    write_corpus(folder / "corpus")
    config = small("sequence_to_sequence", folder / "corpus")
    config.model.num_heads, config.model.head_dim, config.model.value_dim = 8, 4, 4
    config.model.vocab_multiple = 8
    config.model.update(model)
    config.data.rows_multiple = 16
    program = PROGRAM.replace("CONFIG", repr(config.to_dict())).replace(
        "WORKDIR", repr(str(folder / "run"))
    )
    return tuple(
        json.loads(
            on_devices(
                devices,
                program.replace("RUNS", repr(runs)).replace("STEPS", str(steps)),
            )
        )
    )


def test_eight_devices_train_as_one(tmp_path):
    """The losses are equal with sharded rows, parameters and heads, and with
    microbatches.
    """
    (whole, halves), _ = train(tmp_path, 1, 3, [(1, 1, 1, 1), (1, 1, 1, 2)])
    (found_halves, found), _ = train(tmp_path, 8, 3, [(8, 1, 1, 2), (2, 2, 2, 1)])
    assert found_halves == pytest.approx(halves, rel=1e-5)
    assert found == pytest.approx(whole, rel=1e-5)


def test_eight_devices_train_t5_as_one(tmp_path):
    """Heads, and so the columns of relative biases, are divided among devices."""
    model = COMMON | VERSIONS["v1_1"] | dropout(0.1)
    model |= {"source_vocab_size": 304, "target_vocab_size": 304}
    (whole,), _ = train(tmp_path, 1, 2, [(1, 1, 1, 1)], model)
    (found,), (shares,) = train(tmp_path, 8, 2, [(2, 2, 2, 1)], model)
    assert found == pytest.approx(whole, rel=1e-5)
    bias = [share for name, share in shares.items() if "relative_bias/table" in name]
    assert set(bias) == {0.5}


def test_the_loss_runs_under_pmap_too(tmp_path):
    """Gradients summed over devices by hand, as in research code, are those of the
    whole batch.
    """
    config = small("sequence_to_sequence", tmp_path)
    # dropout would draw other bits for a part of the batch
    config.model.dropout_rate = 0.0
    program = f"""
import jax
import jax.numpy as jnp
import flax.linen as nn
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
task = make_task(parse(ConfigDict({config.to_dict()!r})), None)
params = nn.unbox(task.init(jax.random.key(0)))
batch = task.dummy_batch(16, 8, seed=1)
key = jax.random.key(1)

def gradient(params, batch):
    def total(params):
        mean = task.loss(params, batch, key, 0)["loss"]
        return mean.sum, mean.weight
    return jax.grad(total, has_aux=True)(params)

def mean(params, batch):
    found, weight = jax.lax.psum(gradient(params, batch), axis_name="devices")
    return jax.tree.map(lambda g: g / weight, found)

shares = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch)
run = jax.pmap(mean, axis_name="devices", in_axes=(None, 0))
found = jax.tree.map(lambda g: g[0], run(params, shares))
whole, weight = jax.jit(gradient)(params, batch)
whole = jax.tree.map(lambda g: g / weight, whole)
apart = [
    float(jnp.abs(a - b).max())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True)
]
print(max(apart) / max(float(jnp.abs(b).max()) for b in jax.tree.leaves(whole)))
"""
    assert float(on_devices(8, program)) < 1e-5


@pytest.mark.slow
def test_every_mesh_trains_as_one_device_over_20_steps(tmp_path):
    (whole,), _ = train(tmp_path, 1, 20, [(1, 1, 1, 1)])
    runs = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 1, 8, 1)]
    losses, shares = train(tmp_path, 8, 20, runs)
    for run, found in zip(runs, losses, strict=True):
        apart = max(abs(a - b) / b for a, b in zip(found, whole, strict=True))
        print(f"{run}: {apart:.1e} from one device")
        assert apart < 1e-5, run
    assert set(shares[0].values()) == {1}
    # With FSDP, a device holds an eighth of every array, except for the heads' biases
    # and the counts of steps.
    whole_arrays = {name for name, share in shares[1].items() if share != 1 / 8}
    assert {shares[1][name] for name in whole_arrays} == {1}
    assert all(
        name.endswith(("query/bias", "key/bias", "value/bias", "count"))
        for name in whole_arrays
    )


@pytest.mark.slow
def test_a_run_goes_from_mesh_to_mesh(recipe, tmp_path):
    """A run moves from 2 × 2 × 2 devices to one and back.

    Its losses are those of a run that stays on one device.
    """

    def train(name: str, devices: int, steps: int, *mesh: int) -> list[float]:
        arguments = [
            f"--config={recipe}",
            f"--workdir={tmp_path / name}",
            f"--config.training.steps={steps}",
        ]
        arguments += [
            f"--config.mesh.{axis}={size}"
            for axis, size in zip(AXES, mesh, strict=True)
        ]
        arguments += [
            "--config.training.log_every=1",
            "--config.checkpoint.every=4",
            "--config.checkpoint.keep_best=0",
        ]
        arguments += [f"--config.training.evaluate_every={steps}"]
        on_devices(devices, RUN.replace("ARGUMENTS", repr(arguments)))
        return [row["loss"] for row in rows(tmp_path / name) if row["split"] == "train"]

    stayed = train("stayed", 1, 12, 1, 1, 1)
    train("moved", 8, 4, 2, 2, 2)
    train("moved", 1, 8, 1, 1, 1)
    moved = train("moved", 8, 12, 2, 2, 2)
    assert len(moved) == 12
    assert moved == pytest.approx(stayed, rel=1e-5)


def test_rows_that_do_not_divide_are_refused():
    mesh = jax.make_mesh(
        (1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    check_rows([8, 16], mesh, microbatches=4)
    message = (
        r"a batch of 18 rows cannot .* = 1 devices with training.microbatches = 4: set"
    )
    with pytest.raises(ValueError, match=message):
        check_rows([8, 18], mesh, microbatches=4)


@pytest.mark.parametrize(
    ("recipe", "arg"),
    [
        pytest.param("rnn", "additive", marks=pytest.mark.slow),
        pytest.param("rnn", "scaled_dot", marks=pytest.mark.slow),
        ("rnn", "multi_head"),
        ("convs2s", ""),
    ],
)
def test_gradients_of_other_encoder_decoders_are_those_of_one_device(recipe, arg):
    """The mesh has two devices along each of data, fsdp and tensor."""
    config = shrink(get_config(recipe, arg), Path("none"))
    config.data.rows_multiple = 8
    config.model.update({"dropout_rate": 0.0, "vocab_multiple": 8})
    if recipe == "rnn":
        config.model.teacher_forcing = 1.0
    program = f"""
import jax, numpy as np
import flax.linen as nn
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
from transformer_jax.training.sharding import (
    batch_sharding,
    make_mesh,
    on_mesh,
    shardings,
)
config = ConfigDict({config.to_dict()!r})
config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
config = parse(config)
task = make_task(config, None)
mesh = make_mesh(config.mesh)
boxed = task.init(jax.random.key(0))
params = nn.unbox(boxed)
batch = task.dummy_batch(16, 12, seed=1)
gradient = jax.grad(
    lambda params, batch: task.loss(params, batch, jax.random.key(2), 0)["loss"].sum
)
shared_params = jax.device_put(params, shardings(boxed, mesh))
shared_batch = jax.device_put(batch, batch_sharding(mesh))
whole = jax.jit(gradient)(params, batch)
found = on_mesh(gradient, mesh)(shared_params, shared_batch)
apart = jax.tree.map(
    lambda a, b: np.abs(a - np.asarray(b)).max() / np.abs(a).max(), whole, found
)
print(max(jax.tree.leaves(apart)))
"""
    assert float(on_devices(8, program)) < 1e-5
