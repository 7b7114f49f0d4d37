"""The device mesh and where every logical axis lies on it."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

# Logical axis of a parameter → mesh axis. An embedding table lies along one mesh axis only: along two, XLA
# rematerialises it for every look-up.
RULES = (
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("vector", None),
    ("head_dim", None),
    ("position", None),
    ("distance", None),
    ("layers", None),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 takes what the others leave."""

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
            raise ValueError(
                f"config.mesh = {sizes} needs a multiple of {given} devices and there are {devices}: "
                "change mesh.data, mesh.fsdp or mesh.tensor"
            )
        return data, fsdp, tensor

    def data_shards(self) -> int:
        """In how many parts the rows of a batch lie on the devices."""
        data, fsdp, _ = self.shape()
        return data * fsdp


def make_mesh(config: MeshConfig) -> Mesh:
    """Raises ValueError when the axes do not multiply to the number of devices."""
    return jax.make_mesh(config.shape(), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def shardings(boxed: Any, mesh: Mesh) -> Any:
    """Of a tree whose leaves carry logical axis names: its shardings, without the boxes."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)


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
