"""Weights as integers of 8 bits, for products that are not differentiated.

A weight w is stored as round(w / s), with one scale s for each output of the product,
so that the largest weight of an output is 127 or -127. A product rounds its other
factor in the same way, with one scale for each row. The integers are then multiplied
and summed without further rounding, as in Dettmers et al. 2022 (LLM.int8(), Section
2.1), whose separate treatment of outliers is left out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

Array = jax.Array

LARGEST = 127
# XLA's product of one row of integers with a matrix takes ten times as long as that of
# two to sixteen rows, on CPUs. So fewer rows are padded to this many.
LEAST_ROWS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """A weight whose value is values · scale.

    values: int8, in the shape of the weight.
    scale: float32, in the shape of the axes that a product does not sum over.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.values.shape


def rounded(weight: Array, summed: tuple[int, ...]) -> Int8:
    """Return a weight in 8 bits. Products sum over its axes `summed`."""
    largest = jnp.max(jnp.abs(weight), axis=summed, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / LARGEST
    values = jnp.round(weight / scale).astype(jnp.int8)
    return Int8(values, jnp.squeeze(scale, summed))


def rows(table: Int8, ids: Array) -> Array:
    """Look up rows of a table (V, D): ids (…) → (…, D), float32."""
    values = jnp.take(table.values, ids, axis=0)
    scale = jnp.take(table.scale, ids, axis=0)
    return values.astype(jnp.float32) * scale[..., None]


def product(spec: str, x: Array, weight: Int8) -> Array:
    """Return x W in float32, e.g. with the spec "BTD,DNH->BTNH".

    The axes that are summed over are the last ones of x, and the first or the last ones
    of W, in the same order. Those of the result are the others of x, and then of W.
    """
    of_x, of_weight = spec.split("->")[0].split(",")
    num_summed = sum(axis in of_x for axis in of_weight)
    is_first = of_weight[0] in of_x
    outer = x.shape[: x.ndim - num_summed]
    x = x.reshape(math.prod(outer), -1)
    if is_first:
        values = weight.values.reshape(x.shape[1], -1)
    else:
        values = weight.values.reshape(-1, x.shape[1])

    num_rows = len(x)
    x = jnp.pad(x, ((0, max(LEAST_ROWS - num_rows, 0)), (0, 0)))
    left = rounded(x, (1,))
    sums = jax.lax.dot_general(
        left.values,
        values,
        (((1,), (0 if is_first else 1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    y = sums * left.scale[:, None] * weight.scale.reshape(1, -1)
    return y[:num_rows].reshape(*outer, *weight.scale.shape)
