"""The placement of parameters and arrays: axis names, and meshes that the
models do not support.
"""

import json
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax import export
from jax.sharding import AxisType

from transformer_jax.errors import UserError

Array = jax.Array


class Named(nn.LogicallyPartitioned):
    """A box that holds a parameter and the names of its axes.

    `nn.unbox` takes the parameter out.

    Linen maps the names to a mesh with `nn.logical_axis_rules`. NNX would take them for
    axes of a mesh that must be in scope. Here, `flax.nnx.bridge.ToNNX` shards the
    parameter as linen does: not at all without a mesh.
    """

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Return the arguments of the `nnx.Variable` that takes this box's place."""
        names = {
            "out_sharding": self.names,
            "sharding_rules": self.rules,
            "mesh": self.mesh,
        }
        return {"value": self.unbox(), "eager_sharding": False, **names}


export.register_pytree_node_serialization(
    Named,
    serialized_name="transformer_jax.Named",
    # the names; mesh and rules are always None
    serialize_auxdata=lambda fields: json.dumps(fields[0]).encode(),
    deserialize_auxdata=lambda data: (tuple(json.loads(data)), None, None),
)


def named(init: Callable[..., Array], axes: tuple[str, ...]) -> Callable[..., Any]:
    """Return the initializer `init` with its result in a `Named` box.

    `axes` has a name for each axis.
    """
    return lambda *args: Named(init(*args), axes)


def mesh_axes(axis: str) -> tuple[str, ...]:
    """Return the mesh axes that a logical axis is divided along, by the rules in
    scope.
    """
    (axes,) = nn.logical_to_mesh_axes((axis,)) or (None,)
    return (axes,) if isinstance(axes, str) else axes or ()


def check_placement(name: str, x: Any) -> None:
    """Raise UserError if x belongs to a mesh with explicit axes.

    The same holds for the logical axes in scope.
    """
    sharding: Any = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types and any(
        axes is not None for axes in sharding.spec
    )
    mesh = jax.sharding.get_abstract_mesh()
    if nn.get_logical_axis_rules() and AxisType.Explicit in mesh.axis_types:
        explicit = True
        sharding = sharding.update(mesh=mesh)
    if explicit:
        axes = sharding.mesh.axis_names
        raise UserError(
            f"{name}: the mesh has explicit axes {axes}, the default of jax.make_mesh, "
            "but these models need automatic ones; make it with jax.make_mesh(shape, "
            f"{axes}, axis_types=(jax.sharding.AxisType.Auto,) * {len(axes)})"
        )
