"""The distance between an attention kernel and the equation, on this accelerator."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.masks import CAUSAL, padding

# The largest difference of a kernel that is right.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
LENGTH = 256  # positions, or fewer if the kernel supports fewer
DROPPED = 0.1  # the rate of dropout on attention weights


def difference(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    length: float,
    dropout_rate: float,
    dtype: str,
    head_dim: int,
    value_dim: int,
) -> float:
    """Return how far outputs and gradients of `kernel` are from those of `reference`,
    relative to their largest values.

    The mask is causal, and half of the second sequence is padding. `reference` is
    `attention.dot_product_attention` and computes in float32. `length` is the most
    positions that the kernel supports.
    """
    positions = int(min(LENGTH, length))
    lengths = jnp.array([[positions], [positions // 2]])
    mask = CAUSAL & padding(jnp.arange(positions)[None] < lengths)
    dropping: dict[str, Any] = {}
    if dropout_rate:
        dropping = {"dropout_rate": dropout_rate, "dropout_key": jax.random.key(1)}
    keys = jax.random.split(jax.random.key(0), 4)
    widths = (head_dim, head_dim, value_dim, value_dim)
    shapes = [(2, positions, 2, width) for width in widths]
    query, key, value, cotangent = map(jax.random.normal, keys, shapes)

    def outputs(attend: Callable[..., Any], **options: Any) -> list[jax.Array]:
        attend = functools.partial(attend, **options, **dropping)
        output, gradients = jax.vjp(attend, query, key, value)
        return [output, *gradients(cotangent)]

    allowed = mask.whole(positions, positions)
    actual = jax.jit(lambda: outputs(kernel, mask=mask, dtype=dtype))()
    expected = jax.jit(lambda: outputs(reference, mask=allowed))()
    return max(map(_relative, actual, expected))


def _relative(actual: jax.Array, expected: jax.Array) -> float:
    return float(abs(actual - expected).max() / abs(expected).max())
