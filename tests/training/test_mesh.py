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
from transformer_jax.training.engine import Engine

jax.config.update("jax_disable_most_optimizations", True)
found, shares = [], []
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
    for i in range(20):
        batch = batches.plan.batch(i)
        state, metrics = engine.step(state, engine.place(batches.load(batch), len(batch.indices)))
        found[-1].append(float(metrics["loss"]))
    shares.append({})
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        held = {shard.data.nbytes for shard in x.addressable_shards}
        shares[-1][jax.tree_util.keystr(path, simple=True, separator="/")] = max(held) / x.nbytes
print(json.dumps([found, shares]))
"""


def test_eight_devices_train_as_one(tmp_path):
    """Dropout on, sharded over rows, parameters and heads, in microbatches: the losses of one device."""
    write_corpus(tmp_path / "corpus")
    config = shrink(defaults("translation"), tmp_path / "corpus")
    config.model.num_heads, config.model.head_dim, config.model.value_dim = 8, 4, 4
    config.model.vocab_multiple = 8
    config.data.rows_multiple = 16

    def train(devices: int, runs: list[tuple[int, ...]]) -> tuple[list[list[float]], list[dict[str, float]]]:
        program = PROGRAM.replace("CONFIG", repr(config.to_dict())).replace("WORKDIR", repr(str(tmp_path / "run")))
        return json.loads(on_devices(devices, program.replace("RUNS", repr(runs))))

    (whole, halves), _ = train(1, [(1, 1, 1, 1), (1, 1, 1, 2)])
    runs = [(8, 1, 1, 2), (1, 8, 1, 1), (2, 2, 2, 1), (1, 1, 8, 1)]  # data, fsdp, tensor, microbatches
    losses, shares = train(8, runs)
    for run, found in zip(runs, losses, strict=True):
        assert found == pytest.approx(whole if run[-1] == 1 else halves, rel=1e-5), run
    assert set(shares[0].values()) == {1}
    # FSDP: of all an eighth but of the biases of heads, which are no wider than the heads, and of the step's number.
    whole_arrays = {name for name, share in shares[1].items() if share != 1 / 8}
    assert {shares[1][name] for name in whole_arrays} == {1}
    assert all(name.endswith(("query/bias", "key/bias", "value/bias", "count")) for name in whole_arrays)


def test_rows_that_cannot_be_shared_out_are_refused():
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    check_rows([8, 16], mesh, microbatches=4)
    with pytest.raises(ValueError, match=r"a batch of 18 rows cannot .* = 1 devices in training.microbatches = 4: set"):
        check_rows([8, 18], mesh, microbatches=4)
