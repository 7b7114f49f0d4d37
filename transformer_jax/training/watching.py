"""Watch a run layer by layer: norms of gradients, parameters and updates, feed-forward
units that do not learn, and how far attention is spread.

A program of its own measures a step before the training step takes it. It recomputes
the gradient and returns no state, so training is bitwise the same as without it.

Shapes: B batch · T query positions · S key positions · N heads · L layers.
"""

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.training.engine import Engine, make_gradient, over_parts
from transformer_jax.training.freezing import (
    Parts,
    name_of,
    part_with,
    without_updates,
)
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.interruption import Stopping, compile_unless
from transformer_jax.training.sharding import on_mesh, replicated, row_shards
from transformer_jax.training.task import Attention, DeviceArrays, Params, Task

log = logging.getLogger(__name__)

LAYERS = "layers"  # the axis of a stack's layers, and the module that has them
UNITS = "mlp"  # the axis of the hidden units of feed-forward networks
DEPTH = 2  # modules in the name of a group outside of stacks
# A unit is dead if the gradient of the weights into it is at most this part of the root
# mean square over the units of its layer.
DEAD = 1e-3
ROWS = 8  # rows per device whose attention weights are in memory at a time

# name → (), or one value for each layer (L,)
Values = dict[str, jax.Array]


class Place(NamedTuple):
    """The place of a parameter in its model.

    path: its name, e.g. "encoder/layers/feed_forward/inner/kernel".
    axes: the names of its axes, e.g. ("layers", "embed", "mlp"), or ().
    """

    path: str
    axes: tuple[str | None, ...]

    @property
    def is_stacked(self) -> bool:
        """True if it has an axis of layers."""
        return LAYERS in self.axes

    @property
    def group(self) -> str:
        """The stack of the parameter, e.g. "encoder/layers", or the first modules of
        its path.
        """
        modules = self.path.split("/")[:-1]
        if self.is_stacked and LAYERS in modules:
            return "/".join(modules[: modules.index(LAYERS) + 1])
        return "/".join(modules[:DEPTH]) or self.path

    def squares(self, leaf: jax.Array, *kept: str) -> jax.Array:
        """Return the sum of squares over all axes but that of the layers and `kept`."""
        names = self.axes or (None,) * leaf.ndim
        summed = [i for i, name in enumerate(names) if name not in (LAYERS, *kept)]
        return jnp.square(leaf.astype(jnp.float32)).sum(axis=tuple(summed))


def places_of(axes: Any) -> list[Place]:
    """Return the places of all parameters in leaf order, given the names of their
    axes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        axes, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return [Place(name_of(path), tuple(names)) for path, names in leaves]


def norms(name: str, tree: Params, places: Sequence[Place]) -> Values:
    """Return the norm of a tree of parameters, as `name`, and of each group, as
    `name`/GROUP.
    """
    squares: Values = {}
    for place, leaf in zip(places, jax.tree.leaves(tree), strict=True):
        key = f"{name}/{place.group}"
        squares[key] = squares.get(key, 0.0) + place.squares(leaf)
    total = sum(square.sum() for square in squares.values())
    return {key: jnp.sqrt(square) for key, square in {name: total, **squares}.items()}


def dead_units(gradient: Params, places: Sequence[Place], frozen: Parts) -> Values:
    """Return the share of the feed-forward units of each layer that are dead.

    The gradient of all weights into a ReLU unit is zero if the unit is active at no
    position that the loss depends on. Units with a smooth activation, e.g. GELU or
    SiLU, always have some gradient: theirs is below `DEAD` of the root mean square over
    the units of the layer. Frozen layers are left out, or NaN in a stack that is frozen
    in part.
    """
    squares: Values = {}
    for place, leaf in zip(places, jax.tree.leaves(gradient), strict=True):
        part = part_with(place.path, frozen)
        held = 0 if part is None else frozen[part]
        if place.axes[-1:] != (UNITS,) or held is None:
            continue
        of_units = place.squares(leaf, UNITS)
        if held:
            of_units = of_units.at[:held].set(jnp.nan)
        key = f"dead_units/{place.group}"
        squares[key] = squares.get(key, 0.0) + of_units
    return {key: _share_dead(of_units) for key, of_units in squares.items()}


def _share_dead(squares: jax.Array) -> jax.Array:
    """Return the share of dead units, NaN if a gradient is not finite.

    `squares` (…, F) are the squared norms of their gradients.
    """
    mean = squares.mean(axis=-1)
    is_dead = squares <= DEAD**2 * mean[..., None]
    return jnp.where(jnp.isfinite(mean), is_dead.mean(axis=-1), jnp.nan)


def entropy_sums(attention: Attention, is_example: jax.Array) -> dict[str, tuple]:
    """Return the entropy of the attention of each layer, in nats: its sum (L,) over
    queries, as the mean over heads, and the number of queries, by name.

    Padding and rows without an example, where `is_example` (B,) is False, do not count.
    """
    maps, axes = attention
    sums = {}
    for (name, queries, _), weights in maps.items():
        positions = jnp.arange(weights.shape[-2])[None]
        is_query = positions < axes[queries].lengths[:, None]
        is_query &= is_example[:, None]
        total = weights.sum(axis=-1, keepdims=True)
        shares = weights / jnp.where(total == 0, 1.0, total)
        entropy = jax.scipy.special.entr(shares).sum(axis=-1)  # (B, L, N, T)
        counted = jnp.where(is_query[:, None, None], entropy, 0.0)
        of_layers = counted.mean(axis=2).sum(axis=(0, 2))
        words = re.sub(r"[^\w.-]+", "_", name)
        sums[f"attention_entropy/{words}"] = (of_layers, is_query.sum())
    return sums


def attention_entropy(
    task: Task, params: Params, batch: DeviceArrays, key: jax.Array, shards: int
) -> Values:
    """Return the mean entropy of the attention of each layer, in nats.

    Without dropout. A batch is divided into parts of at most `ROWS` rows for each of
    `shards`, so that the weights of all layers fit in memory.
    """

    def of_part(rows: DeviceArrays, key: jax.Array) -> dict[str, tuple]:
        return entropy_sums(task.attention(params, rows), rows["index"] >= 0)

    rows = len(batch["index"]) // shards
    at_a_time = max(n for n in range(1, ROWS + 1) if rows % n == 0)
    sums = over_parts(of_part, batch, key, rows // at_a_time)
    return {name: total / jnp.maximum(n, 1) for name, (total, n) in sums.items()}


def make_watch(engine: Engine) -> Callable[[TrainState, DeviceArrays], Values]:
    """Return the function watch(state, batch) → what the step on this batch will do to
    each layer. It is not yet jitted.
    """
    training = engine.config.training
    frozen = engine.config.frozen
    places = places_of(engine.axes)
    form = engine.form
    gradient = make_gradient(engine.task, training.microbatches, frozen, form)
    shards = row_shards(engine.mesh.shape)

    def watch(state: TrainState, batch: DeviceArrays) -> Values:
        key = jax.random.fold_in(jax.random.key(training.seed), state.step)
        slope, *_ = gradient(state.params, state.base, batch, key, state.step)
        updates, _ = engine.optimizer.update(slope, state.opt_state, state.params)
        model = form.join(state.params, state.base)
        of_gradient = norms("gradient_norm", slope, places)
        del of_gradient["gradient_norm"]  # the training step returns it
        return {
            **of_gradient,
            **norms("parameter_norm", state.params, places),
            **norms("update_norm", without_updates(updates, frozen), places),
            **dead_units(slope, places, frozen),
            **attention_entropy(engine.task, model, batch, key, shards),
        }

    return watch


class Watch:
    """Watches every `training.watch_every`-th step. With 0, nothing is compiled."""

    def __init__(self, engine: Engine):
        self._every = engine.config.training.watch_every
        self._program = on_mesh(
            make_watch(engine), engine.mesh, out_shardings=replicated(engine.mesh)
        )
        self._compiled: set[tuple] = set()

    def is_due(self, step: int) -> bool:
        """Return True if this step is to be measured."""
        return self._every > 0 and step % self._every == 0

    def measure(
        self, state: TrainState, batch: DeviceArrays, stop: Stopping | None = None
    ) -> dict[str, float]:
        """Return what the step from `state` on `batch` will do, by name. The value of a
        layer has the number of the layer in its name, from 0.

        Raises Interrupted if the run should stop while the program compiles.
        """
        shapes = tuple(array.shape for array in batch.values())
        if shapes not in self._compiled:
            log.info("compiling the program that watches steps")
            compile_unless(stop, self._program.lower(state, batch))
            self._compiled.add(shapes)
        return by_layer(jax.device_get(self._program(state, batch)))


def by_layer(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return one number for each layer: NAME/0, NAME/1, …"""
    numbers = {}
    for name, value in values.items():
        for place in itertools.product(*map(range, np.shape(value))):
            number = float(value[place])
            numbers["/".join([name, *map(str, place)])] = number
    return numbers
