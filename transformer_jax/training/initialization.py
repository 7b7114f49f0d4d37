"""The train state: its contents, its shapes and shardings, and its initialization."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from transformer_jax.training import optimizer as optimizers
from transformer_jax.training.lora import Form
from transformer_jax.training.sharding import on_mesh, replicated, shardings
from transformer_jax.training.task import Params, Task


class TrainState(NamedTuple):
    """The contents of a checkpoint.

    `params` are those that are trained: all of the model, or those of LoRA. `step` is
    the number of batches consumed, and thus the position in the data.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    # the moving average of the parameters, or the one that the optimizer keeps; None
    # (no arrays) without either
    ema: Params | None = None
    # with LoRA, the parameters of the model that `params` adapts, see `lora.LowRank`
    base: Params | None = None


def abstract(boxed: Any, mesh: Mesh) -> Any:
    """Return the shape, dtype and sharding of every array, given a tree of shapes
    with logical axis names.
    """
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        nn.unbox(boxed),
        shardings(boxed, mesh),
    )


def abstract_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    ema_decay: float,
    base: Params | None = None,
) -> TrainState:
    """Return the shapes, dtypes and shardings of a state, given those of the
    parameters that are trained, and of the base.

    Moments and averages are sharded like their parameters. Arrays of the optimizer
    without the shape of a parameter, e.g. counts, are whole on every device.
    """
    state = jax.eval_shape(
        lambda params: init_state(params, optimizer, ema_decay), params
    )
    params_by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    mesh = next(iter(params_by_path.values())).sharding.mesh

    def placed(path: tuple, leaf: Any) -> Any:
        sharding = replicated(mesh)
        for start in range(len(path)):
            param = params_by_path.get(path[start:])
            if param is not None and param.shape == leaf.shape:
                sharding = param.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(placed, state)._replace(base=base)


def abstract_parameters(task: Task, mesh: Mesh) -> Params:
    """Return the shapes, dtypes and shardings of a task's parameters."""
    return abstract(jax.eval_shape(task.init, jax.random.key(0)), mesh)


def make_join(
    form: Form, mesh: Mesh, model: Params, donate: bool = False
) -> Callable[[Params, Params | None], Params]:
    """Return a compiled `form.join`.

    `model` are the shapes, dtypes and shardings of its result. With `donate`, the base
    is used up.
    """
    if form.base is None:
        return form.join
    placed = jax.tree.map(lambda x: x.sharding, model)
    return on_mesh(
        form.join, mesh, out_shardings=placed, donate_argnums=1 if donate else None
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of abstract or real arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def trace_init(task: Task) -> tuple[Callable[[jax.Array], Params], Params]:
    """Trace `task.init` once.

    Return a function from a key to the parameters, and their shapes with axis names.
    """
    traced, boxed = jax.make_jaxpr(task.init, return_shape=True)(jax.random.key(0))
    structure = jax.tree.structure(nn.unbox(boxed))
    return lambda key: jax.tree.unflatten(structure, jaxpr_as_fun(traced)(key)), boxed


def initial_parameters(task: Task, mesh: Mesh) -> Params:
    """Return the parameters that a run begins with if it starts from no other one."""
    init, boxed = trace_init(task)
    placed = jax.tree.map(lambda x: x.sharding, abstract(boxed, mesh))
    return jit_init(init, mesh, placed)(jax.random.key(task.config.training.seed))


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    ema_decay: float = 0.0,
    base: Params | None = None,
) -> TrainState:
    """Return the state before the first update."""
    opt_state = optimizer.init(params)
    average = params if ema_decay else optimizers.averaged(opt_state, params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average, base)


def not_finite(params: Params) -> str:
    """Return the name of the first parameter with a value that is not finite on this
    process's devices, or "".
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        parts = (
            shard.data for shard in leaf.addressable_shards if shard.replica_id == 0
        )
        if not all(np.isfinite(np.asarray(part)).all() for part in parts):
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return ""


def jit_init(
    make: Callable[..., Any], mesh: Mesh, out: Any, donate: bool = False
) -> Any:
    """Jit `make`, on CPUs without optimizations: it runs only once, and they take
    longer than they save.

    `out` are the shardings of what it returns. With `donate`, the arrays that it is
    given are used up.
    """
    options = (
        {"xla_backend_optimization_level": 0}
        if mesh.devices.flat[0].platform == "cpu"
        else None
    )
    return jax.jit(
        make,
        out_shardings=out,
        compiler_options=options,
        donate_argnums=0 if donate else None,
    )
