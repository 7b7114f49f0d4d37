"""Descriptions of a step: bytes are those of the real arrays, and the table says what
is an estimate.
"""

import json
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.processes import on_devices
from helpers.runs import small
from transformer_jax.compilation.collectives import Collective
from transformer_jax.compilation.description import Description, table_rows


def test_bytes_are_those_of_the_arrays(tmp_path):
    config = small("sequence_to_sequence", tmp_path)
    config.model.vocab_multiple = 8
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
    program = f"""
import dataclasses, json
import jax
from ml_collections import ConfigDict
from transformer_jax.config import make_task, parse
from transformer_jax.compilation.description import describe
from transformer_jax.training.engine import Engine
task = make_task(parse(ConfigDict({config.to_dict()!r})), None)
engine = Engine(task)
described = describe(engine, task.dummy_batch(16, 8))
state = engine.init(jax.random.key(0))
held = [
    sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    for tree in (state.params, state.opt_state)
]
count = sum(x.size for x in jax.tree.leaves(state.params))
print(json.dumps([dataclasses.asdict(described), held, count]))
"""
    described, (parameters, optimizer), count = json.loads(on_devices(8, program))
    assert described["parameter_bytes"] == described["gradient_bytes"] == parameters
    assert described["optimizer_bytes"] == optimizer
    assert described["parameters"] == count
    assert described["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert described["tokens"] == 16 * 8
    assert sum(described["sharded"].values()) == 4 * count
    assert described["temporary_bytes"] > parameters
    kinds = {(c["kind"], c["group"]) for c in described["collectives"]}
    assert ("all-gather", 2) in kinds  # parameters along fsdp
    assert ("all-reduce", 2) in kinds  # partial sums along tensor


def test_the_table_says_what_is_an_estimate():
    described = Description(
        mesh={"data": 2, "fsdp": 1, "tensor": 2},
        parameters=1000,
        trained=1000,
        batch={"source": (8, 16)},
        tokens=128,
        flops=4e12,
        parameter_bytes=2000,
        optimizer_bytes=4008,
        gradient_bytes=2000,
        temporary_bytes=5000,
        sharded={"tensor": 3000, "none: whole on every device": 1000},
        collectives=[Collective("all-reduce", 2, 3, 2 * 10**9, 2 * 10**9)],
        guessed_loops=1,
    )
    rows = dict(table_rows(described, link=1e9, peak=1e12))
    assert rows["mesh"] == "4 devices: data 2 × tensor 2"
    assert rows["parameters sharded over tensor"] == "75.0%"
    assert rows["  activations and other (estimate)"] == "3,000"
    assert rows["  total (estimate)"] == "11,008"
    time = rows["at 1 GB/s and 1 TFLOP/s (estimate)"]
    assert (
        time
        == "1e+03 ms of matrix products, 2e+03 ms of communication (67% of the step"
        " without overlap)"
    )
    exact = {"mesh", "parameters", "batch", "tokens per step", "FLOPs per step"}
    exact |= {
        "bytes per device: parameters",
        "  optimizer state",
        "loops over chunks of the loss",
    }
    assert rows["parameters whole on every device"] == "25.0%"
    assert {
        name
        for name in rows
        if "(estimate)" not in name and not name.startswith("parameters ")
    } == exact


def test_one_device_is_described_without_what_several_have():
    described = Description(
        mesh={"data": 1, "fsdp": 1, "tensor": 1},
        parameters=1000,
        trained=120,
        batch={"source": (8, 16)},
        tokens=128,
        flops=4e12,
        parameter_bytes=4000,
        optimizer_bytes=8008,
        gradient_bytes=4000,
        temporary_bytes=5000,
        sharded={"none: whole on every device": 4000},
        collectives=[],
        guessed_loops=0,
    )
    rows = dict(table_rows(described, link=1e9, peak=None))
    assert rows["mesh"] == "1 device"
    assert rows["  trained"] == "120 (12.00%)"
    assert not [name for name in rows if "every device" in name or "TFLOP/s" in name]
    assert (
        dict(table_rows(described, link=1e9, peak=1e12))["at 1 TFLOP/s (estimate)"]
        == "4e+03 ms of matrix products"
    )


@pytest.mark.slow
def test_the_script_prints_json_without_data():
    """The rows of the recipe's batches cannot be divided among 4 × 4 devices.

    The script says which key to set, and describes the step all the same.
    """
    command = [
        sys.executable,
        "scripts/describe.py",
        "--config=configs/ted_hrlr.py",
        "--mesh=data=4,fsdp=4",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout)
    assert described["mesh"] == {"data": 4, "fsdp": 4, "tensor": 1}
    assert set(described["sharded"]) == {"fsdp", "none: whole on every device"}
    assert described["computing_s"] > 0 < described["sending_s"]
    assert "to train on this mesh, set --config.data.rows_multiple=16" in done.stderr


def test_the_loss_of_a_sound_has_the_positions_of_its_text():
    expression = "[describe.chunks(task, batch(64), 1)]"
    assert run_described("spoken_digits", expression) == [1]


def test_the_longest_stream_decides_the_length_and_the_size_of_a_batch():
    length = "describe.length_of(config)"
    rows = f"describe.training_rows(config, 32, {length})"
    assert run_described("digits", f"[{length}, {rows}]") == [24, 64]
    message = "rows_multiple=32; that needs --config.data.batch_tokens=2048"
    assert run_described("spoken_digits", f"[{length}, {rows}]", message) == [64, 32]


def run_described(recipe, expression, message=""):
    """Return the value of an expression in describe.py, a JSON value.

    The `message` is on stderr.

    `config` and `task` are those of the recipe, and batch(length) returns a dummy
    batch.
    """
    program = f"""
import json, sys
sys.path.insert(0, "scripts")
import describe
from absl import flags
from transformer_jax.config import load_recipe, make_task, parse
flags.FLAGS.mark_as_parsed()
raw = load_recipe("configs/{recipe}.py")
raw.data.directory = "(none)"
config = parse(raw)
task = make_task(config, None)
batch = lambda length: task.dummy_batch(16, length)
print(json.dumps({expression}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert message in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (["--mesh=data=x"], "write it as data=64,fsdp=8,tensor=1"),
        (["--mesh", "data=4"], "write it with =, and only once"),
    ],
)
def test_a_mesh_that_is_not_understood_is_refused(mesh, message):
    command = [
        sys.executable,
        "scripts/describe.py",
        "--config=configs/ted_hrlr.py",
        *mesh,
    ]
    wrong = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert message in wrong.stderr
