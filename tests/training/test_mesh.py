"""Meshes of fake devices: what one device computes, and who is refused."""

import json

import jax
import pytest
from conftest import on_devices, shrink, write_corpus

from transformer_jax.config import defaults
from transformer_jax.training.sharding import check_rows

PROGRAM = """
import json, sys
import jax
from transformer_jax.config import override, parse
from ml_collections import ConfigDict
from transformer_jax.training.loop import Engine

jax.config.update("jax_disable_most_optimizations", True)
found = []
for *mesh, microbatches in RUNS:
    raw = ConfigDict(CONFIG)
    raw.mesh.data, raw.mesh.fsdp, raw.mesh.tensor = mesh
    raw.training.microbatches = microbatches
    config = parse(raw)
    task = config.make_task(WORKDIR)
    engine = Engine(task, config.engine)
    batches = task.batches("train", 0)
    state = engine.init(jax.random.key(0))
    found.append([])
    for i in range(3):
        arrays = jax.device_put(batches.load(batches.plan.batch(i)), engine.batch_sharding)
        state, metrics = engine.step(state, arrays)
        found[-1].append(float(metrics["loss"]))
print(json.dumps(found))
"""


def test_eight_devices_train_as_one(tmp_path):
    """Dropout on, sharded over rows, parameters and heads, in microbatches: the losses of one device."""
    write_corpus(tmp_path / "corpus")
    config = shrink(defaults("translation"), tmp_path / "corpus")
    config.model.num_heads, config.model.head_dim, config.model.value_dim = 8, 4, 4
    config.model.vocab_multiple = 8
    config.data.rows_multiple = 16

    def losses(devices: int, runs: list[tuple[int, ...]]) -> list[list[float]]:
        program = PROGRAM.replace("CONFIG", repr(config.to_dict())).replace("WORKDIR", repr(str(tmp_path / "run")))
        return json.loads(on_devices(devices, program.replace("RUNS", repr(runs))))

    whole, halves = losses(1, [(1, 1, 1, 1), (1, 1, 1, 2)])
    runs = [(8, 1, 1, 2), (2, 2, 2, 1)]  # data, fsdp, tensor, microbatches
    for run, found in zip(runs, losses(8, runs), strict=True):
        assert found == pytest.approx(whole if run[-1] == 1 else halves, rel=1e-5), run


def test_rows_that_cannot_be_shared_out_are_refused():
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    check_rows([8, 16], mesh, microbatches=4)
    with pytest.raises(ValueError, match=r"a batch of 18 rows cannot .* = 1 devices in training.microbatches = 4: set"):
        check_rows([8, 18], mesh, microbatches=4)
