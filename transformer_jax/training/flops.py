"""The FLOPs of a task's loss, counted in its jaxpr."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.models.counting import flops

Shapes = tuple[tuple[str, tuple[int, ...], np.dtype], ...]


def of_loss(
    init: Callable[[jax.Array], Any],
    loss: Callable[..., Any],
    batch: Mapping[str, np.ndarray],
) -> float:
    """Return the FLOPs of the matrix products in `Task.loss` on a batch.

    The products are those of the equations, with padding. `init` and `loss` are methods
    of a task. A count is cached for each of them and the shapes of the batch.
    """
    shapes = tuple((name, x.shape, x.dtype) for name, x in batch.items())
    return _counted(init, loss, shapes)


@functools.lru_cache(maxsize=64)
def _counted(
    init: Callable[[jax.Array], Any], loss: Callable[..., Any], shapes: Shapes
) -> float:
    batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, shape, kind in shapes}
    return flops(loss, _parameters(init), batch, jax.random.key(0), 0)


@functools.lru_cache(maxsize=8)
def _parameters(init: Callable[[jax.Array], Any]) -> Any:
    """Return the shapes of the parameters."""
    return nn.unbox(jax.eval_shape(init, jax.random.key(0)))
