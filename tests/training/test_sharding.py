"""Every axis has a rule; what cannot be shared out is refused by name; each process takes the rows of its devices."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from transformer_jax.config import parse
from transformer_jax.models import layers
from transformer_jax.models.positions import POSITIONS
from transformer_jax.models.transformer import TIES, Transformer, TransformerConfig
from transformer_jax.training.sharding import AXES, KEYS, RULES, make_mesh, place, rows_here, shardings

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
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("ties", TIES)
def test_every_axis_of_a_parameter_has_a_rule(positions, ties):
    config = dataclasses.replace(CONFIG, positions=positions, tie_embeddings=ties, output_bias=ties == "none")
    for spec in jax.tree.leaves(nn.get_partition_spec(boxed(config)), is_leaf=lambda x: isinstance(x, PartitionSpec)):
        assert len(spec) > 0
        assert set(spec) <= NAMES, spec


def test_every_axis_of_an_activation_has_a_rule(tiny, monkeypatch):
    found = set()

    def look(x, axes):
        assert len(axes) == x.ndim
        found.update(axes)
        return x

    monkeypatch.setattr(layers.nn, "with_logical_constraint", look)
    task = parse(tiny).make_task("(none)")
    params, batch = jax.eval_shape(task.init, jax.random.key(0)), task.made_up(8, 12, seed=1)
    jax.eval_shape(task.loss, nn.unbox(params), batch, jax.random.key(0), 0)
    jax.eval_shape(lambda p: task.predict(p, {"source": batch["source"]}, True), nn.unbox(params))
    assert found == {"batch", "length", "features", "heads", "head_dim", "mlp", "logits", "vector"} <= NAMES


def test_no_mesh_axis_is_used_twice_and_no_table_on_two_axes():
    for spec in jax.tree.leaves(shardings(boxed(CONFIG), mesh(2, 2, 2))):
        along = [axis for axes in spec.spec if axes for axis in ([axes] if isinstance(axes, str) else axes)]
        assert len(along) == len(set(along))
    table = shardings(boxed(CONFIG), mesh(2, 2, 2))["target_embedding"]["table"]
    assert table.spec == PartitionSpec(("tensor", "fsdp"), None)


def test_what_cannot_be_shared_out_is_refused_with_the_key():
    shardings(boxed(CONFIG), mesh(8, 1, 1))
    with pytest.raises(
        ValueError, match=r"attention/.*: 6 along its axis 'heads' .* mesh.tensor = 4 .* model.num_heads"
    ):
        shardings(boxed(CONFIG), mesh(1, 1, 4))
    with pytest.raises(ValueError, match="along its axis") as error:
        shardings(boxed(CONFIG), mesh(1, 5, 1))
    for size, name in ((16, "embed"), (24, "mlp"), (24, "vocab")):
        assert f"{size} along its axis '{name}' cannot be shared out among " in str(error.value)
        assert f"change {KEYS[name]} or the mesh" in str(error.value)
    assert "mesh.tensor = 1 × mesh.fsdp = 5" in str(error.value)


def test_placed_rows_are_those_that_were_given(tiny):
    rows = NamedSharding(make_mesh(parse(tiny).mesh), PartitionSpec(("data", "fsdp")))
    assert rows_here(rows, 6) == slice(0, 6)
    x = np.arange(12).reshape(6, 2)
    np.testing.assert_array_equal(place({"x": x}, rows, 6)["x"], x)
