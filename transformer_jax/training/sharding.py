"""The device mesh, where every logical axis lies on it, and how a batch gets there.

Everything is jitted over the whole mesh (GSPMD): the program is that of one device, XLA shares it out by the shardings
of its inputs and by the axes that the models name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batching import Arrays, Batch, Batches

AXES = ("data", "fsdp", "tensor")

# Logical axis → mesh axes: of an axis' rules the first whose mesh axes no earlier rule has taken for the same array.
# An embedding table lies along its rows alone: along both, XLA rematerialises it for every look-up.
RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # of activations
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("features", None),
    ("logits", "tensor"),
    # of parameters; heads and mlp also of activations
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", ("tensor", "fsdp")),
    ("mlp", "tensor"),
    # A recurrent state would be gathered at every step; and where "embed" is shared out too, XLA's gradient of the loop
    # is wrong (jax 0.10; tests/training/test_mesh.py).
    ("state", None),
    ("vocab", ("tensor", "fsdp")),
    ("vocab", "tensor"),
    ("vector", None),
    ("head_dim", None),
    ("position", None),
    ("distance", None),
    ("layers", None),
)
# What sets the size of an axis that is shared out.
KEYS = {
    "embed": "model.d_model (of recurrent models also embedding_dim, encoder_dim, readout_dim)",
    "heads": "model.num_heads",
    "mlp": "model.d_ff",
    "vocab": "model.vocab_multiple, to which tables are padded,",
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 takes what the others leave.

    data: every device has all parameters and some rows of a batch; fsdp: the same rows, but of the parameters and of
    the optimizer's state a part, gathered when it is used; tensor: heads, hidden units and vocabulary are shared out.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                yield name, "must be at least 1, or -1 for what the other axes leave"
        if list(sizes.values()).count(-1) > 1:
            yield "data", "only one axis of the mesh can be -1: name the sizes of the others"

    def shape(self) -> tuple[int, int, int]:
        """On the devices there are. Raises ValueError when the axes do not multiply to their number."""
        sizes, devices = dataclasses.asdict(self), jax.device_count()
        given = math.prod(size for size in sizes.values() if size != -1)
        data, fsdp, tensor = (devices // given if size == -1 else size for size in sizes.values())
        if data * fsdp * tensor != devices:
            needed = f"a multiple of {given}" if -1 in sizes.values() else f"exactly {given}"
            raise ValueError(
                f"config.mesh = {sizes} needs {needed} devices and there are {devices}: "
                "change mesh.data, mesh.fsdp or mesh.tensor; one of them can be -1, for what the others leave"
            )
        return data, fsdp, tensor

    def data_shards(self) -> int:
        """In how many parts the rows of a batch lie on the devices."""
        data, fsdp, _ = self.shape()
        return data * fsdp


def make_mesh(config: MeshConfig) -> Mesh:
    """Raises ValueError when the axes do not multiply to the number of devices."""
    return jax.make_mesh(config.shape(), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def on_mesh(function: Callable, mesh: Mesh, **options: Any) -> Any:
    """`function` jitted with `options`; the axes that it names lie on the mesh."""

    @functools.wraps(function)
    def traced(*arguments: Any, **keywords: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES):
            return function(*arguments, **keywords)

    return jax.jit(traced, **options)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Everything on every device: what all processes can read."""
    return NamedSharding(mesh, PartitionSpec())


def shardings(boxed: Any, mesh: Mesh) -> Any:
    """Of a tree whose leaves carry logical axis names: its shardings, without the boxes.

    Raises ValueError, naming every array, axis and config key, where a dimension cannot be shared out evenly.
    """
    specs = nn.get_partition_spec(boxed)
    placed = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    problems: dict[tuple, str] = {}
    for (path, leaf), names, sharding in zip(
        jax.tree_util.tree_leaves_with_path(nn.unbox(boxed)),
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
        jax.tree.leaves(placed),
        strict=True,
    ):
        for name, size, along in zip(names, leaf.shape, sharding.spec, strict=False):
            axes = (along,) if isinstance(along, str) else along or ()
            if size % math.prod(mesh.shape[axis] for axis in axes):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                over = " × ".join(f"mesh.{axis} = {mesh.shape[axis]}" for axis in axes)
                problem = (
                    f"{where}: {size} along its axis {name!r} cannot be shared out among {over} devices: change "
                    f"{KEYS.get(name, 'the model')} or the mesh"
                )
                problems.setdefault((name, size, axes), problem)
    if problems:
        raise ValueError("\n".join(problems.values()))
    return placed


def check_rows(rows: Iterable[int], mesh: Mesh, microbatches: int = 1) -> None:
    """Raises ValueError for a batch whose microbatches cannot be shared out among data × fsdp."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    for count in rows:
        if count % (devices * microbatches):
            raise ValueError(
                f"a batch of {count} rows cannot be shared out among mesh.data × mesh.fsdp = {devices} devices in "
                f"training.microbatches = {microbatches}: set data.rows_multiple to a multiple of "
                f"{devices * microbatches}"
            )


def rows_here(sharding: NamedSharding, rows: int) -> slice:
    """Return which of a batch's `rows` this process's devices hold."""
    indices: Any = sharding.addressable_devices_indices_map((rows,))
    held = [index[0].indices(rows) for index in indices.values()]
    return slice(min(start for start, _, _ in held), max(stop for _, stop, _ in held))


def place(arrays: Mapping[str, np.ndarray], mesh: Mesh, rows: int, first: int = 0) -> dict[str, jax.Array]:
    """Place a batch of `rows` on the mesh. `arrays` hold its rows from `first` on, as many as this process needs."""
    sharding = batch_sharding(mesh)

    def one(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(rows)
            return array[start - first : stop - first]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, part)

    return {name: one(array) for name, array in arrays.items()}


def abstract_batch(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a whole batch with the sharding that `feed` gives them."""
    rows = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for name, x in arrays.items()}


class Fed(NamedTuple):
    """A batch of the plan, its arrays on the host, and the whole batch on the devices."""

    batch: Batch
    arrays: Arrays
    placed: dict[str, jax.Array]


def feed(batches: Batches, numbers: Iterable[int], mesh: Mesh, whole: bool = False) -> Iterator[Fed]:
    """Load batches by their numbers and place them on the mesh.

    Each process loads the rows that its devices hold, or the `whole` batch. Filler rows make the rows a multiple of
    data × fsdp devices.
    """
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    for number in numbers:
        batch = batches.plan.batch(number)
        rows = len(batch.indices) + -len(batch.indices) % devices
        batch = batch._replace(indices=np.pad(batch.indices, (0, rows - len(batch.indices)), constant_values=-1))
        here = slice(0, rows) if whole else rows_here(batch_sharding(mesh), rows)
        arrays = batches.load(batch._replace(indices=batch.indices[here]))
        yield Fed(batch, arrays, place(arrays, mesh, rows, here.start))
