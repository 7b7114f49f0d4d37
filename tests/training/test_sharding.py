"""Sharding: a rule for every axis, named errors for sizes that do not divide, and
batches placed on devices.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from helpers.processes import on_devices
from helpers.runs import small
from transformer_jax.config import make_task, parse
from transformer_jax.data.batching import Batches, Plan
from transformer_jax.errors import UserError
from transformer_jax.models import layers
from transformer_jax.models.positions import POSITIONS
from transformer_jax.models.transformer import TIES, Transformer, TransformerConfig
from transformer_jax.tasks import TASKS
from transformer_jax.training import sharding
from transformer_jax.training.engine import Engine
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import (
    AXES,
    KEYS,
    RULES,
    MeshConfig,
    feed,
    make_mesh,
    shardings,
)

NAMES = {name for name, _ in RULES}

CONFIG = TransformerConfig(
    source_vocab_size=24,
    target_vocab_size=24,
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_model=16,
    d_ff=24,
    num_heads=6,
    head_dim=4,
    value_dim=4,
    max_length=12,
)


def mesh(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)


def boxed(config: TransformerConfig):
    ids = np.zeros((1, 1), np.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)[
        "params"
    ]


@pytest.mark.parametrize("task", TASKS)
def test_every_axis_of_a_tasks_parameter_has_a_rule(task, corpus):
    boxed = jax.eval_shape(
        make_task(parse(small(task, corpus)), None).init, jax.random.key(0)
    )
    for spec in jax.tree.leaves(
        nn.get_partition_spec(boxed), is_leaf=lambda x: isinstance(x, PartitionSpec)
    ):
        assert len(spec) > 0
        assert set(spec) <= NAMES, spec


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("ties", TIES)
def test_every_axis_of_a_parameter_has_a_rule(positions, ties):
    config = dataclasses.replace(
        CONFIG, positions=positions, tie_embeddings=ties, output_bias=ties != "all"
    )
    for spec in jax.tree.leaves(
        nn.get_partition_spec(boxed(config)),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    ):
        assert len(spec) > 0
        assert set(spec) <= NAMES, spec


def test_every_axis_of_an_activation_has_a_rule(tiny, tmp_path, monkeypatch):
    found = set()

    def look(x, axes):
        assert len(axes) == x.ndim
        found.update(axes)
        return x

    monkeypatch.setattr(layers.nn, "with_logical_constraint", look)
    task = make_task(parse(tiny), tmp_path)
    task.fingerprint(training=True)  # trains the tokenizers, whose ids `evaluate` needs
    params, batch = (
        jax.eval_shape(task.init, jax.random.key(0)),
        task.dummy_batch(8, 12, seed=1),
    )
    jax.eval_shape(task.loss, nn.unbox(params), batch, jax.random.key(0), 0)
    jax.eval_shape(
        lambda params: task.evaluate(params, batch, greedy=True), nn.unbox(params)
    )
    assert (
        found
        == {
            "batch",
            "length",
            "features",
            "heads",
            "head_dim",
            "mlp",
            "logits",
            "vector",
        }
        <= NAMES
    )


def test_no_mesh_axis_is_used_twice_and_no_table_on_two_axes():
    for spec in jax.tree.leaves(shardings(boxed(CONFIG), mesh(2, 2, 2))):
        along = [
            axis
            for axes in spec.spec
            if axes
            for axis in ([axes] if isinstance(axes, str) else axes)
        ]
        assert len(along) == len(set(along))
    table = shardings(boxed(CONFIG), mesh(2, 2, 2))["target_embedding"]["table"]
    assert table.spec == PartitionSpec(("tensor", "fsdp"), None)


def test_sizes_that_do_not_divide_are_refused_with_the_key():
    shardings(boxed(CONFIG), mesh(8, 1, 1))
    with pytest.raises(
        ValueError,
        match=(
            r"attention/.*: size 6 of axis 'heads' .* mesh.tensor = 4 .*"
            r" model.num_heads"
        ),
    ):
        shardings(boxed(CONFIG), mesh(1, 1, 4))
    with pytest.raises(ValueError, match=r"size \d+ of axis") as error:
        shardings(boxed(CONFIG), mesh(1, 5, 1))
    for size, name in ((16, "embed"), (24, "mlp"), (24, "vocab")):
        assert f"size {size} of axis '{name}' cannot be divided among " in str(
            error.value
        )
        assert f"change {KEYS[name]} or the mesh" in str(error.value)
    assert "mesh.tensor = 1 × mesh.fsdp = 5" in str(error.value)


def test_shared_heads_are_whole_where_their_number_does_not_divide():
    config = dataclasses.replace(CONFIG, num_kv_heads=2)
    for devices, along in ((2, "tensor"), (6, None)):
        attention = shardings(boxed(config), mesh(1, 1, devices))["decoder"]["layers"][
            "cross_attention"
        ]
        assert attention["query"]["kernel"].spec == PartitionSpec(
            None, "fsdp", "tensor", None
        )
        assert attention["key"]["kernel"].spec == PartitionSpec(
            None, "fsdp", along, None
        )
        assert attention["value"]["bias"].spec == PartitionSpec(None, along, None)


class CountedPlan(Plan):
    """Plan of batches with 6 and 8 rows. Batch i holds the examples from 10 i on."""

    shapes: ClassVar = [(6, 2), (8, 2)]

    def __len__(self):
        return 2

    def _contents(self, epoch, position):
        rows, *shape = self.shapes[position]
        return 10 * position + np.arange(rows), tuple(shape)


def counted(loaded):
    """Return batches whose rows are the index of their example, or -1 in fillers.

    `loaded` records the loaded rows.
    """

    def load(batch):
        loaded.append((batch.number, batch.indices.tolist()))
        return {
            "x": np.repeat(batch.indices[:, None], 2, axis=1),
            "index": batch.indices,
        }

    return Batches(CountedPlan(), load)


def test_without_compilation_nothing_is_trained_or_predicted(tiny, tmp_path):
    task = make_task(parse(tiny), tmp_path)
    with jax.disable_jit():
        for make in (Engine, lambda task: Evaluator(task, make_mesh(task.config.mesh))):
            with pytest.raises(
                UserError, match="Unset the environment variable JAX_DISABLE_JIT"
            ):
                make(task)


def test_batches_reach_the_devices():
    loaded = []
    fed = list(feed(counted(loaded), range(1, 4), make_mesh(MeshConfig())))
    assert [batch.number for batch, _, _ in fed] == [1, 2, 3]
    assert loaded == [(1, [*range(10, 18)]), (2, [*range(6)]), (3, [*range(10, 18)])]
    for batch, arrays, placed in fed:
        np.testing.assert_array_equal(placed["index"], batch.indices)
        np.testing.assert_array_equal(placed["x"], arrays["x"])


def test_a_process_loads_the_rows_of_its_devices_only(monkeypatch):
    """Pretend that the process has the second half of a batch's rows.

    Evaluation loads all rows.
    """
    loaded, placed = [], []
    monkeypatch.setattr(
        sharding, "rows_here", lambda sharding, rows: slice(rows // 2, rows)
    )
    monkeypatch.setattr(
        sharding,
        "place",
        lambda arrays, mesh, rows, first: placed.append((rows, first)),
    )
    batches, mesh = counted(loaded), make_mesh(MeshConfig())
    (fed,) = feed(batches, [0], mesh)
    assert loaded.pop() == (0, [3, 4, 5])
    assert placed.pop() == (6, 3)
    assert fed.batch.indices.tolist() == [*range(6)]
    assert fed.arrays["index"].tolist() == [3, 4, 5]
    (fed,) = feed(batches, [0], mesh, whole=True)
    assert loaded.pop() == (0, [*range(6)])
    assert placed.pop() == (6, 0)


def test_rows_are_padded_to_the_mesh_and_lie_on_data_and_fsdp():
    program = """
import numpy as np
from transformer_jax.data.batching import Batch, Batches
from transformer_jax.training.sharding import (
    MeshConfig,
    batch_sharding,
    feed,
    make_mesh,
    rows_here,
)

class Plan:
    def batch(self, i):
        return Batch(i, np.arange(6), (2,))

batches = Batches(
    Plan(), lambda batch: {"x": np.repeat(batch.indices[:, None], 2, axis=1)}
)
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
assert rows_here(batch_sharding(mesh), 8) == slice(0, 8)
((batch, arrays, placed),) = feed(batches, [5], mesh)
assert batch.number == 5
assert batch.indices.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
np.testing.assert_array_equal(placed["x"], arrays["x"])
np.testing.assert_array_equal(placed["x"][:, 0], batch.indices)
held = {
    shard.device.id: shard.data[:, 0].tolist()
    for shard in placed["x"].addressable_shards
}
assert held[0] == held[1] == [0, 1], held
assert held[2] == held[3] == [2, 3], held
assert held[6] == held[7] == [-1, -1], held
print("equal")
"""
    assert on_devices(8, program) == "equal\n"


def test_mesh_must_fit_the_devices():
    with pytest.raises(ValueError, match="needs a multiple of 7 devices and there are"):
        make_mesh(MeshConfig(data=7, fsdp=-1))
    with pytest.raises(ValueError, match="needs exactly 7 devices and there are"):
        make_mesh(MeshConfig(data=7))
