"""The matrices and vectors among the parameters, by the names of their axes.

A stack keeps the parameters of its L layers in one array with a first axis "layers", as
several decoders do with "decoders". A projection to N heads of width H has a kernel (D,
N, H). For an optimizer, these are L matrices, and a matrix D × NH. A convolution over C
features has a kernel (rows, columns, C, C'), which is a matrix from all features of a
window to C'.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

STACKED = ("layers", "decoders")
HEADS = ("heads", "kv_heads", "state")
WINDOW = ("kernel_rows", "kernel_columns")
# axes that number tokens, places or classes, in tables of vectors and in classifiers
NUMBERED = {"vocab", "position", "distance", "segment", "classes"}


class Block(NamedTuple):
    """The axes of a matrix or vector; other axes number the blocks of a parameter.

    rows: the axes of a vector, or of a matrix's inputs.
    columns: the axes of a matrix's outputs; a vector has none.
    is_table: True for a matrix whose rows or columns belong to tokens, positions or
        classes.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()
    is_table: bool = False

    @property
    def is_matrix(self) -> bool:
        """True for a parameter with columns, e.g. not a bias."""
        return bool(self.columns)

    def flat(self, x: jax.Array) -> jax.Array:
        """Return a parameter with one axis for rows and one for columns."""
        shape = [size for axis, size in enumerate(x.shape) if axis < self.rows[0]]
        for axes in (self.rows, self.columns):
            shape.append(math.prod(x.shape[axis] for axis in axes))
        return x.reshape(shape)

    def root_mean_square(self, x: jax.Array) -> jax.Array:
        """Return the root mean square of each block; it broadcasts to x."""
        axes = self.rows + self.columns
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def blocks(boxed_params: Any) -> list[Block]:
    """Return the matrices or vectors of each parameter, in leaf order.

    `boxed_params` are boxed with the names of their axes. A parameter without names is
    a vector.
    """
    names = jax.tree.leaves(
        nn.get_partition_spec(boxed_params),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    leaves = jax.tree.leaves(nn.unbox(boxed_params))
    return [_block(axes, leaf.ndim) for axes, leaf in zip(names, leaves, strict=True)]


def _block(names: PartitionSpec, ndim: int) -> Block:
    if len(names) != ndim:
        return Block(tuple(range(ndim)))
    groups: list[list[int]] = []
    for axis, name in enumerate(names):
        if name in STACKED:
            continue
        before = names[axis - 1] if axis > 0 else ""
        if before in WINDOW or (name == "head_dim" and before in HEADS):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) < 2:
        return Block(tuple(axis for group in groups for axis in group))
    rows, *columns = groups
    return Block(
        tuple(rows),
        tuple(axis for group in columns for axis in group),
        not NUMBERED.isdisjoint(names),
    )
