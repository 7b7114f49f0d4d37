"""Losses as sums and weights, divided once by the engine over all devices and microbatches.

Shapes: B batch · T target positions · D d_model · V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

CHUNK = 512  # positions whose logits exist at a time


def cross_entropy(
    logits: Array, labels: Array, weights: Array, *, vocab_size: int, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """Cross-entropy against q = (1 - ε) · onehot(label) + ε / V, in nats: (weighted sum, sum of weights).

    logits (B, T, padded V), labels (B, T), weights (B, T); ids ≥ `vocab_size` are padding and have no part in q.
    Szegedy et al. 2016, Section 7; Vaswani et al. 2017, Section 5.4 (ε = 0.1).
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = log_z - (1 - label_smoothing) * label_logits
    if label_smoothing:
        losses -= label_smoothing * logits[..., :vocab_size].mean(axis=-1)
    weights = weights.astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def sum_in_chunks(
    loss: Callable[[Any, Array, Array, Array], Array],
    params: Any,
    x: Array,
    labels: Array,
    weights: Array,
    chunk: int = CHUNK,
    shards: int = 1,
) -> Array:
    """Σ loss(params, x, labels, weights) over the positions that have a weight, some at a time.

    x (B, T, D), labels (B, T), weights (B, T), and `loss` a weighted sum over positions: logits over a vocabulary and
    their cross-entropy. What it makes of a chunk, (chunk, V), stays in the cache and never all exists at once; the
    gradient is made along with the value, so that nothing is computed twice; positions without weight (padding) are
    put last and left out. Exact: the order of summation is all that differs from the plain form.

    `shards`: in how many parts the rows lie on the devices. Each part's positions stay there, `chunk` of each are
    taken at a time, and their sums are added when all is done. Fewer where B is no multiple of it.
    Differentiable in `params` and `x`, once, in reverse.
    """
    run, each = _Chunks(x, labels, weights, chunk, shards), jax.vmap(loss, (None, 0, 0, 0))
    nothing = jnp.zeros(run.shards, jnp.float32)
    return jax.lax.fori_loop(0, run.count, lambda i, total: total + each(params, *run(i)), nothing).sum()


def _sum_and_gradient(
    loss: Callable, params: Any, x: Array, labels: Array, weights: Array, chunk: int, shards: int
) -> tuple[Array, tuple[Any, Array]]:
    run, each = _Chunks(x, labels, weights, chunk, shards), jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0, 0, 0))

    def add(i: Array, so_far: tuple) -> tuple:
        total, dparams, dx = so_far
        value, (dp, dxi) = each(params, *run(i))
        dx = jax.lax.dynamic_update_slice_in_dim(dx, dxi[:, 0], i * run.width, axis=1)
        return total + value, jax.tree.map(jnp.add, dparams, dp), dx

    zeros = jax.tree.map(lambda p: jnp.zeros((run.shards, *p.shape), p.dtype), params)
    nothing = jnp.zeros(run.shards, jnp.float32), zeros, jnp.zeros_like(run.x)
    total, dparams, dx = jax.lax.fori_loop(0, run.count, add, nothing)
    return total.sum(), (jax.tree.map(lambda d: d.sum(axis=0), dparams), run.back(dx).reshape(x.shape))


def _scale_gradient(loss: Callable, chunk: int, shards: int, gradient: tuple, cotangent: Array) -> tuple:
    dparams, dx = jax.tree.map(lambda g: g * cotangent, gradient)
    return dparams, dx, None, None


sum_in_chunks.defvjp(_sum_and_gradient, _scale_gradient)


class _Chunks:
    """Positions, those with weight first, cut into chunks of (shards, 1, width); `count` of them have any weight."""

    def __init__(self, x: Array, labels: Array, weights: Array, chunk: int, shards: int):
        self.shards = math.gcd(shards, x.shape[0])

        def cut(a: Array) -> Array:
            return a.reshape(self.shards, -1, *a.shape[2:])

        x, labels, weights = cut(x), cut(labels), cut(weights)
        size = x.shape[1]
        self.width = min(chunk, size)
        self._order = jnp.argsort(weights == 0, axis=1, stable=True)
        self._size, padding = size, -size % self.width

        def sort(a: Array) -> Array:
            order = jnp.expand_dims(self._order, tuple(range(2, a.ndim)))
            a = jnp.take_along_axis(a, order, axis=1)
            return jnp.pad(a, ((0, 0), (0, padding), *((0, 0),) * (a.ndim - 2)))

        self.x, self._labels, self._weights = sort(x), sort(labels), sort(weights)
        self.count = -(-(weights != 0).sum(axis=1).max() // self.width)

    def __call__(self, i: Array) -> tuple[Array, Array, Array]:
        """Chunk i of x, labels and weights: (shards, 1, width, …)."""

        def take(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, i * self.width, self.width, axis=1)[:, None]

        return take(self.x), take(self._labels), take(self._weights)

    def back(self, sorted_x: Array) -> Array:
        """(shards, size + padding, D) → (shards, size, D) in the order that came in."""
        return jnp.take_along_axis(sorted_x[:, : self._size], jnp.argsort(self._order, axis=1)[..., None], axis=1)
