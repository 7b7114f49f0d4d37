"""The device mesh, how logical axes lie on it, and how batches reach it.

Every function is compiled for the whole mesh (GSPMD): it is written for one device, and XLA partitions it by the
shardings of its inputs and by the axes that the models name.
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

# Logical axis → mesh axes. For each axis of an array, the first rule applies whose mesh axes are not yet taken by an
# earlier rule. An embedding table is sharded by its rows alone: with both axes, XLA would rematerialise it for every
# lookup.
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
    # A sharded recurrent state would be gathered at every step. With "embed" sharded too, XLA's gradient of the loop
    # is wrong (jax 0.10; tests/training/test_mesh.py).
    ("state", None),
    ("vocab", ("tensor", "fsdp")),
    ("vocab", "tensor"),
    ("vector", None),
    ("head_dim", None),
    ("position", None),
    ("distance", None),
    ("segment", None),
    ("classes", None),
    ("layers", None),
)
# The config key that usually sets the size of a sharded axis, for error messages.
KEYS = {"embed": "model.d_model", "heads": "model.num_heads", "mlp": "model.d_ff", "vocab": "model.vocab_multiple"}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis. One axis may be -1: it takes the devices that the others leave.

    data: devices hold all parameters and different rows of a batch.
    fsdp: devices hold different rows and parts of the parameters and optimizer state, which are gathered for use.
    tensor: devices hold the same rows and different heads, hidden units and vocabulary entries.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                yield name, "must be at least 1, or -1 for the devices that the other axes leave"
        if list(sizes.values()).count(-1) > 1:
            yield "data", "only one axis of the mesh can be -1: set the sizes of the others"

    def shape(self) -> tuple[int, int, int]:
        """Return the sizes of the axes. Raises ValueError if they do not multiply to the number of devices."""
        sizes, devices = dataclasses.asdict(self), jax.device_count()
        given = math.prod(size for size in sizes.values() if size != -1)
        data, fsdp, tensor = (devices // given if size == -1 else size for size in sizes.values())
        if data * fsdp * tensor != devices:
            needed = f"a multiple of {given}" if -1 in sizes.values() else f"exactly {given}"
            raise ValueError(
                f"config.mesh = {sizes} needs {needed} devices and there are {devices}: "
                "change mesh.data, mesh.fsdp or mesh.tensor; one can be -1, for the devices that the others leave"
            )
        return data, fsdp, tensor


def make_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh. Raises ValueError if the axes do not multiply to the number of devices."""
    return jax.make_mesh(config.shape(), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def on_mesh(function: Callable, mesh: Mesh, **options: Any) -> Any:
    """Return `function` jitted with `options`, with its logical axes on the mesh."""

    @functools.wraps(function)
    def traced(*arguments: Any, **keywords: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES):
            return function(*arguments, **keywords)

    return jax.jit(traced, **options)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that keeps whole arrays on every device, where all processes can read them."""
    return NamedSharding(mesh, PartitionSpec())


def shardings(boxed: Any, mesh: Mesh) -> Any:
    """Return the shardings of a tree whose leaves carry logical axis names, without the boxes.

    Raises ValueError where a dimension cannot be divided evenly. The message names array, axis and config key.
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
                    f"{where}: {size} along its axis {name!r} cannot be divided among {over} devices: change "
                    f"{KEYS.get(name, 'the model')} or the mesh"
                )
                problems.setdefault((name, size, axes), problem)
    if problems:
        raise ValueError("\n".join(problems.values()))
    return placed


def check_rows(rows: Iterable[int], mesh: Mesh, microbatches: int = 1) -> None:
    """Raise ValueError for a batch whose microbatches cannot be divided among data × fsdp devices."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    for count in rows:
        if count % (devices * microbatches):
            raise ValueError(
                f"a batch of {count} rows cannot be divided among mesh.data × mesh.fsdp = {devices} devices in "
                f"training.microbatches = {microbatches}: set data.rows_multiple to a multiple of "
                f"{devices * microbatches}"
            )


def abstract_batch(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a whole batch with the sharding that `feed` gives it."""
    rows = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for name, x in arrays.items()}


class Fed(NamedTuple):
    """A batch on the host and on the devices.

    batch: of the plan, with filler rows added that make its rows a multiple of data × fsdp.
    arrays: on the host: the rows of this process, or all rows.
    placed: on the devices: all rows.
    """

    batch: Batch
    arrays: Arrays
    placed: dict[str, jax.Array]


def feed(batches: Batches, numbers: Iterable[int], mesh: Mesh, whole: bool = False) -> Iterator[Fed]:
    """Load the batches with these numbers and place them on the mesh.

    Each process loads the rows of its own devices or, if `whole`, all rows: evaluation decodes them all.
    """
    multiple = mesh.shape["data"] * mesh.shape["fsdp"]
    for number in numbers:
        batch = batches.plan.batch(number)
        indices = np.pad(batch.indices, (0, -len(batch.indices) % multiple), constant_values=-1)
        batch = batch._replace(indices=indices)
        here = slice(0, len(indices)) if whole else rows_here(batch_sharding(mesh), len(indices))
        arrays = batches.load(batch._replace(indices=indices[here]))
        yield Fed(batch, arrays, place(arrays, mesh, len(indices), here.start))


def rows_here(sharding: NamedSharding, rows: int) -> slice:
    """Return which of a batch's `rows` lie on this process's devices."""
    indices: Any = sharding.addressable_devices_indices_map((rows,))
    held = [index[0].indices(rows) for index in indices.values()]
    return slice(min(start for start, _, _ in held), max(stop for _, stop, _ in held))


def place(arrays: Mapping[str, np.ndarray], mesh: Mesh, rows: int, first: int = 0) -> dict[str, jax.Array]:
    """Place a batch of `rows` on the mesh. `arrays` hold its rows from `first` on, at least those of this process."""
    sharding = batch_sharding(mesh)

    def one(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(rows)
            return array[start - first : stop - first]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, part)

    return {name: one(array) for name, array in arrays.items()}
