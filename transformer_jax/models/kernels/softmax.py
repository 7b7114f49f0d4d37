"""The softmax of scores of which some are hidden."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# what is added to a score to hide it, and the score below which all are hidden
LOWEST = float(np.finfo(np.float32).min)
NOTHING = LOWEST / 2


@jax.custom_jvp
def softmax_or_zeros(scores: Array) -> Array:
    """Return the softmax over the last axis, or zeros where all scores are hidden.

    A score is hidden by adding LOWEST to it. On CPUs, the backward pass then takes a
    quarter of the time that it takes if `jnp.where` replaces the score by -∞. Like
    `jax.nn.softmax`, this keeps nothing for the gradient but its result.
    """
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.maximum(largest, NOTHING))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


@softmax_or_zeros.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (scores,) = primals
    (tangent,) = tangents
    weights = softmax_or_zeros(scores)
    mean = (weights * tangent).sum(axis=-1, keepdims=True)
    return weights, weights * (tangent - mean)
