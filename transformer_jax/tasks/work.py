"""The FLOPs of a training step, counted in the jaxpr of the task's loss."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.models import counting
from transformer_jax.training.task import Arrays, Task, Work, streams

Shapes = tuple[tuple[str, tuple[int, ...], np.dtype], ...]


def training_work(task: Task, batch: Arrays) -> Work:
    """Return the work of a training step on a batch, whose tokens are those of all its
    streams.

    Of the FLOPs, the share of positions that hold a token counts. The backward pass
    counts twice the FLOPs of the forward pass, also for products without a gradient,
    e.g. logits of words that a decoder feeds back to itself. What is computed again to
    save memory does not count (Chowdhery et al. 2022, Appendix B).
    """
    tokens = positions = 0
    for name in streams(batch):
        lengths = batch[f"{name}_length"]
        tokens += int(lengths.sum())
        positions += math.prod(batch[name].shape[: lengths.ndim + 1])
    filled = tokens / positions
    shapes = tuple((name, x.shape, x.dtype) for name, x in batch.items())
    return Work(tokens, 3 * filled * _of_loss(task, shapes))


@functools.lru_cache(maxsize=64)
def _of_loss(task: Task, shapes: Shapes) -> float:
    """Return the FLOPs of a task's loss on a batch of these shapes."""
    batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, shape, kind in shapes}
    return counting.flops(task.loss, _parameters(task), batch, jax.random.key(0), 0)


@functools.lru_cache(maxsize=8)
def _parameters(task: Task) -> Any:
    return nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
