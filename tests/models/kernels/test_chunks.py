"""Sums over positions in chunks against the plain form."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from helpers.labelled import D, positions
from helpers.processes import on_devices
from transformer_jax.losses import cross_entropy
from transformer_jax.models.kernels.chunks import sum_in_chunks
from transformer_jax.training.sharding import RULES

B, T, V = 3, 5, 7


def projected(table, x, labels, weights):
    return cross_entropy(
        x @ table.T, labels, weights, vocab_size=V, label_smoothing=0.1
    )[0]


def on_mesh(function, data, fsdp=1):
    """Compile `function` for a mesh of that many devices."""
    mesh = AbstractMesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def traced(*arguments):
        with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(RULES):
            return function(*arguments)

    return jax.jit(traced)


plain_form = jax.jit(jax.value_and_grad(projected, (0, 1)))


@pytest.mark.parametrize("filled", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize(
    ("rows", "width", "chunk", "shards"),
    [(4, 5, 3, 1), (4, 5, 20, 1), (4, 5, 99, 1), (4, 5, 6, 2), (6, 7, 1, 3)],
)
def test_chunks_give_the_value_and_the_gradient_of_the_plain_form(
    rows, width, chunk, shards, filled
):
    table, x, labels, weights = positions(rows, width, filled)
    plain = plain_form(table, x, labels, weights)

    def chunked(table, x):
        return sum_in_chunks(projected, table, x, labels, weights, chunk)

    found = on_mesh(jax.value_and_grad(chunked, (0, 1)), shards)(table, x)
    # without a gradient
    np.testing.assert_allclose(on_mesh(chunked, shards)(table, x), plain[0], rtol=1e-5)
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
    for one, other in zip(found[1], plain[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert (np.asarray(found[1][1])[weights == 0] == 0).all()


@pytest.mark.parametrize(
    ("size", "chunk", "width"),
    [(10, 6, 5), (20, 6, 5), (13, 6, 5), (7, 99, 7), (6, 6, 6)],
)
def test_chunks_have_equal_widths(size, chunk, width):
    """With as few chunks as possible, the last one then has the least padding: ⌈size
    / ⌈size / chunk⌉⌉ positions.
    """
    table, x, labels, weights = positions(1, size, 1.0)
    widths = set()

    def seen(table, x, labels, weights):
        widths.update(array.shape[1] for array in (x, labels, weights))
        return projected(table, x, labels, weights)

    jax.eval_shape(
        jax.grad(lambda x: sum_in_chunks(seen, table, x, labels, weights, chunk)), x
    )
    assert widths == {width}


def test_the_gradient_of_chunks_is_scaled_by_what_follows():
    table, x, labels, weights = positions(4, 5, 0.7)
    by_three = jax.grad(
        lambda x: 3 * sum_in_chunks(projected, table, x, labels, weights, 4)
    )(x)
    np.testing.assert_allclose(
        by_three,
        3 * jax.grad(projected, 1)(table, x, labels, weights),
        rtol=1e-5,
        atol=1e-6,
    )


def test_gradients_of_chunks_have_the_types_of_what_they_are_for():
    table, x, labels, weights = positions(4, 5, 0.7)
    inputs = table.astype(jnp.float32), x.astype(jnp.bfloat16)
    gradients = jax.grad(
        lambda *inputs: sum_in_chunks(projected, *inputs, labels, weights, 4), (0, 1)
    )(*inputs)
    assert [gradient.dtype for gradient in gradients] == [jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize(
    ("data", "fsdp", "shards"),
    [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4), (3, 1, 1), (8, 1, 4)],
)
def test_each_device_takes_chunks_of_its_rows(data, fsdp, shards):
    """The number of shards is the greatest common divisor of 4 rows and the number
    of devices.
    """
    table, x, labels, weights = positions(4, 5, 1.0)
    shapes = set()

    def seen(table, x, labels, weights):
        shapes.add(x.shape)
        return projected(table, x, labels, weights)

    parts = []
    vmap = jax.vmap

    def counting(function, axes):
        def mapped(table, x, *rest):
            parts.append(len(x))
            return vmap(function, axes)(table, x, *rest)

        return mapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "vmap", counting)
        on_mesh(
            lambda x: sum_in_chunks(seen, table, x, labels, weights, 2), data, fsdp
        )(x)
    assert set(parts) == {shards}
    assert shapes == {(1, 2, D)}


def test_padding_costs_no_chunk():
    """The number of chunks depends on the positions with weight, not on the width of
    the batch.
    """
    table, x, labels, weights = positions(8, 8, 1.0)
    weights[:, 3:] = 0
    calls = []

    def counted(table, x, labels, weights):
        jax.debug.callback(lambda: calls.append(1))
        return projected(table, x, labels, weights)

    jax.block_until_ready(
        jax.jit(lambda: sum_in_chunks(counted, table, x, labels, weights, 8))()
    )
    jax.effects_barrier()
    assert len(calls) == 3  # 24 of 64 positions have weight


def test_chunks_on_eight_devices():
    """The value and the gradient are those of one device.

    Rows are sharded, and no position leaves its device to be sorted.
    """
    program = """
import jax, jax.numpy as jnp, numpy as np
from flax.linen import logical_axis_rules
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformer_jax.losses import cross_entropy
from transformer_jax.models.kernels.chunks import sum_in_chunks
draw = np.random.default_rng(0)
B, T, D, V = 16, 6, 4, 24
x = np.float32(draw.normal(size=(B, T, D)))
table = np.float32(draw.normal(size=(V, D)))
labels = draw.integers(0, V, (B, T))
weights = np.float32(draw.random((B, T)) < 0.6)

def loss(table, x, labels, weights):
    return cross_entropy(
        x @ table.T, labels, weights, vocab_size=V, label_smoothing=0.1
    )[0]

plain = jax.value_and_grad(loss, (0, 1))(table, x, labels, weights)
for axes in ((8, 1), (4, 2)):
    mesh = jax.make_mesh(axes, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    vocab = NamedSharding(mesh, PartitionSpec("tensor"))

    def chunked(table, x, labels, weights):
        total = lambda t, x: sum_in_chunks(loss, t, x, labels, weights, 5)
        rules = (("batch", "fsdp"),)
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            logical_axis_rules(rules),
        ):
            return jax.value_and_grad(total, (0, 1))(table, x)

    run = jax.jit(chunked, in_shardings=(vocab, rows, rows, rows))
    found = run(table, x, labels, weights)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max(), axes
    if axes == (8, 1):
        text = run.lower(table, x, labels, weights).compile().as_text()
        reduced = [line for line in text.splitlines() if "all-reduce(" in line]
        # once, when all chunks are done
        assert reduced and not any("while" in line for line in reduced)
        others = ("all-gather(", "all-to-all(", "collective-permute(")
        assert not any(word in text for word in others)
print("equal")
"""
    assert on_devices(8, program) == "equal\n"
