"""The device mesh, the mapping of logical axes to it, and the placement of batches.

Functions are written as for one device and compiled for the whole mesh (GSPMD). XLA
partitions them according to the shardings of their inputs and the logical axes that the
models name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batching import Arrays, Batch, Batches
from transformer_jax.data.progress import counted
from transformer_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")  # the rows of a batch are divided along these

# Logical axis → mesh axes. For each axis of an array, the first rule whose mesh axes
# are still unused in this array applies. An embedding table is sharded along its rows
# only: if both axes were sharded, XLA would rematerialize it for every lookup.
RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # Activations.
    ("batch", ROW_AXES),
    ("length", None),
    ("features", None),
    ("logits", "tensor"),
    # Parameters; heads and mlp are also axes of activations.
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", ("tensor", "fsdp")),
    ("mlp", "tensor"),
    # A sharded recurrent state would be gathered at every time step. If "embed" were
    # sharded too, XLA's gradient of the loop would be wrong (jax 0.10;
    # tests/integration/test_mesh.py).
    ("state", None),
    ("vocab", ("tensor", "fsdp")),
    ("vocab", "tensor"),
    ("vector", None),
    ("rank", None),
    ("channels", None),
    ("kernel_rows", None),
    ("kernel_columns", None),
    ("head_dim", None),
    ("position", None),
    ("distance", None),
    ("segment", None),
    ("classes", None),
    ("layers", None),
    ("decoders", None),
)
# For error messages: the config key that usually sets the size of a sharded axis.
KEYS = {
    "embed": "model.d_model",
    "heads": "model.num_heads",
    "mlp": "model.d_ff",
    "vocab": "model.vocab_multiple",
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis.

    One axis may be -1, which assigns all remaining devices to it.

    data: devices hold all parameters and different rows of a batch.
    fsdp: devices hold different rows of a batch and different parts of the parameters
        and the optimizer state; the parameters are gathered for use.
    tensor: devices hold the same rows of a batch and different heads, hidden units and
        vocabulary entries.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                yield name, "must be at least 1, or -1 for all remaining devices"
        if list(sizes.values()).count(-1) > 1:
            yield (
                "data",
                "only one axis of the mesh can be -1: set the sizes of the others",
            )

    def shape(self, devices: int) -> tuple[int, int, int]:
        """Return the sizes of the axes.

        Raises ValueError if their product is not the number of devices.
        """
        sizes = dataclasses.asdict(self)
        given = math.prod(size for size in sizes.values() if size != -1)
        data, fsdp, tensor = (
            devices // given if size == -1 else size for size in sizes.values()
        )
        if data * fsdp * tensor != devices:
            needed = (
                f"a multiple of {given}" if -1 in sizes.values() else f"exactly {given}"
            )
            raise UserError(
                f"config.mesh = {sizes} needs {needed} devices "
                f"and there are {devices}: change mesh.data, mesh.fsdp or mesh.tensor; "
                "one can be -1 for all remaining devices"
            )
        return data, fsdp, tensor


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh of `devices`, by default all.

    Raises ValueError if the product of its axes is another.

    On TPUs, each axis of the mesh lies along whole sides of the slice where that is
    possible, so that its devices are neighbors.
    """
    shape = config.shape(jax.device_count() if devices is None else len(devices))
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # JAX divides sides by itself on v5e only
        grid = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
        return Mesh(grid, AXES, axis_types=types)


def shown(sizes: Mapping[str, int]) -> str:
    """Return the size of a mesh in words, e.g. "8 devices: data 4 × tensor 2"."""
    devices = counted(math.prod(sizes.values()), "device")
    axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return ": ".join(filter(None, [devices, " × ".join(axes)]))


def on_mesh(function: Callable, mesh: Mesh, **options: Any) -> Any:
    """Return `function`, jitted with `options`, with its logical axes mapped to the
    mesh.

    Raises UserError if JAX compiles nothing: arrays would not get the shardings that
    programs give them.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise UserError(
            "jax_disable_jit is set: training, evaluation and prediction "
            "need compiled programs. Unset the environment variable JAX_DISABLE_JIT; "
            "layers and models alone also work with it"
        )

    @functools.wraps(function)
    def traced(*arguments: Any, **keywords: Any) -> Any:
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            nn.logical_axis_rules(RULES),
        ):
            return function(*arguments, **keywords)

    return jax.jit(traced, **options)


def row_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of parts into which a mesh divides the rows of a batch.

    `sizes` are those of the axes of the mesh, e.g. `mesh.shape`.
    """
    return math.prod(sizes[axis] for axis in ROW_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows are divided over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding with whole arrays on every device, so that every process
    can read them.
    """
    return NamedSharding(mesh, PartitionSpec())


def shardings(boxed: Any, mesh: Mesh) -> Any:
    """Return the shardings of a tree whose leaves are boxed with logical axis names.

    The result has no boxes.

    Key-value heads that query heads share are whole on every tensor device if their
    number does not divide evenly. Raises ValueError if a dimension cannot be divided
    evenly. The message names the array, the axis and the config key.
    """

    def divisible(names: PartitionSpec, leaf: Any) -> PartitionSpec:
        sizes = zip(names, leaf.shape, strict=False)
        return PartitionSpec(
            *(
                None if n == "kv_heads" and size % mesh.shape["tensor"] else n
                for n, size in sizes
            )
        )

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    specs = jax.tree.map(
        divisible, nn.get_partition_spec(boxed), nn.unbox(boxed), is_leaf=is_spec
    )
    placed = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    problems: dict[tuple, str] = {}
    for (path, leaf), names, sharding in zip(
        jax.tree_util.tree_leaves_with_path(nn.unbox(boxed)),
        jax.tree.leaves(specs, is_leaf=is_spec),
        jax.tree.leaves(placed),
        strict=True,
    ):
        for name, size, along in zip(names, leaf.shape, sharding.spec, strict=False):
            axes = (along,) if isinstance(along, str) else along or ()
            if size % math.prod(mesh.shape[axis] for axis in axes):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                over = " × ".join(f"mesh.{axis} = {mesh.shape[axis]}" for axis in axes)
                problem = (
                    f"{where}: size {size} of axis {name!r} cannot be divided among "
                    f"{over} devices: change {KEYS.get(name, 'the model')} or the mesh"
                )
                problems.setdefault((name, size, axes), problem)
    if problems:
        raise UserError("\n".join(problems.values()))
    return placed


def check_rows(rows: Iterable[int], mesh: Mesh, microbatches: int = 1) -> None:
    """Raise ValueError if the microbatches of a batch cannot be divided among data ×
    fsdp devices.
    """
    devices = row_shards(mesh.shape)
    for count in rows:
        if count % (devices * microbatches):
            raise UserError(
                f"a batch of {count} rows cannot be divided "
                f"among mesh.data × mesh.fsdp = {devices} "
                f"devices with training.microbatches = {microbatches}: "
                f"set data.rows_multiple to a multiple of {devices * microbatches}"
            )


def abstract_batch(
    arrays: Mapping[str, np.ndarray], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of a whole batch as placed by `feed`."""
    rows = batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        for name, x in arrays.items()
    }


class Fed(NamedTuple):
    """A batch on the host and on the devices.

    batch: the batch of the plan, padded with filler rows to a multiple of data × fsdp.
    arrays: the host arrays, with the rows of this process or all rows.
    placed: the device arrays, with all rows.
    """

    batch: Batch
    arrays: Arrays
    placed: dict[str, jax.Array]


def feed(
    batches: Batches, numbers: Iterable[int], mesh: Mesh, whole: bool = False
) -> Iterator[Fed]:
    """Load the batches with the given numbers and place them on the mesh.

    Each process loads the rows of its own devices, or all rows if `whole`, as
    evaluation needs to decode them.
    """
    multiple = row_shards(mesh.shape)
    for number in numbers:
        batch = batches.plan.batch(number)
        missing = -len(batch.indices) % multiple
        indices = np.pad(batch.indices, (0, missing), constant_values=-1)
        batch = batch._replace(indices=indices)
        rows = slice(0, len(indices))
        if not whole:
            rows = rows_here(batch_sharding(mesh), len(indices))
        arrays = batches.load(batch._replace(indices=indices[rows]))
        yield Fed(batch, arrays, place(arrays, mesh, len(indices), rows.start))


def rows_here(sharding: NamedSharding, rows: int) -> slice:
    """Return the slice of a batch's rows that is on the devices of this process.

    The batch has `rows` rows.
    """
    indices: Any = sharding.addressable_devices_indices_map((rows,))
    slices = [index[0].indices(rows) for index in indices.values()]
    first = min(start for start, _, _ in slices)
    last = max(stop for _, stop, _ in slices)
    return slice(first, last)


def place(
    arrays: Mapping[str, np.ndarray], mesh: Mesh, rows: int, first: int = 0
) -> dict[str, jax.Array]:
    """Place a batch of `rows` rows on the mesh.

    `arrays` hold its rows from `first` on, and must include all rows of this process.
    """
    sharding = batch_sharding(mesh)

    def one(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(rows)
            return array[start - first : stop - first]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, part)

    return {name: one(array) for name, array in arrays.items()}
