"""Checks of what callers pass to the models.

Types and shapes are checked, and values where they are known.

The checks run while Python does, so they add nothing to a compiled program. Values are
known outside of `jax.jit`. There, ids beyond the vocabulary raise an error; inside,
they give NaN, and negative ids count from the end. Sizes are compared only if both are
integers: `jax.export` also has symbols.

Shapes: B batch · T query positions or ids · S key positions · D width · N heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.models.kernels.placement import check_placement

MEANING = "True (or 1) = may attend, False (or 0) = may not"
VALID = "True (or 1) = token, False (or 0) = padding"


def values(x: Any) -> np.ndarray | None:
    """Return the values of an array, or None if they are not known.

    They are unknown while it is traced, or if other hosts have them.
    """
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def differ(size: Any, other: Any) -> bool:
    """Return True if both sizes are integers and not equal.

    Symbols of `jax.export` are not integers.
    """
    return isinstance(size, int) and isinstance(other, int) and size != other


def check_array(name: str, x: Any, rule: str) -> None:
    """Raise UserError if x is no array, or sharded on a mesh with explicit axes.

    `rule` says what x must be.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise UserError(
            f"{name} is of type {type(x).__name__}: "
            f"must be a JAX or NumPy array, {rule}"
        )
    check_placement(name, x)


def check_vectors(name: str, x: Any, width: int) -> None:
    """Raise UserError unless x is (B, T, `width`)."""
    rule = f"must be (batch, positions, {width})"
    check_array(name, x, rule)
    if x.ndim == 2:
        raise UserError(
            f"{name} has shape {x.shape}: {rule}; "
            f"for one sequence, add the batch axis: {name}[None]"
        )
    if x.ndim != 3 or differ(x.shape[-1], width):
        raise UserError(
            f"{name} has shape {x.shape}: {rule}; "
            "change the array or the model's d_model"
        )


def check_ids(
    name: str, ids: Any, size: int, shape: tuple[Any, ...] | None = None
) -> None:
    """Raise UserError unless `ids` are integers (B, T) in [0, `size`).

    Their values are checked as far as they are known.

    shape: the shape that they must have; None if any (B, T) is right.
    """
    rule = "integers (batch, positions)"
    check_array(name, ids, rule)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise UserError(
            f"{name} has dtype {ids.dtype}: must be {rule}; "
            f"convert with {name}.astype('int32')"
        )
    if ids.ndim != 2:
        raise UserError(
            f"{name} has shape {ids.shape}: must be {rule}; "
            f"for one sequence, pass {name}[None]"
        )
    _check_shape(name, ids, shape)
    known = values(ids)
    if (
        known is not None
        and known.size
        and not 0 <= (low := known.min()) <= (high := known.max()) < size
    ):
        wrong = low if low < 0 else high
        raise UserError(
            f"{name} contains {wrong}: must be at least 0 and below {size}; "
            "change the ids or the size in the config"
        )


def check_valid(
    name: str, valid: Any, shape: tuple[Any, ...] | None = None, at_end: bool = False
) -> None:
    """Raise UserError unless `valid` is boolean or 0 and 1, (B, T) or `shape`.

    `at_end`: padding must follow tokens.
    """
    rule = f"must be boolean (batch, positions), {VALID}"
    check_array(name, valid, rule)
    check_boolean(name, valid, rule)
    if valid.ndim != 2:
        raise UserError(f"{name} has shape {valid.shape}: {rule}")
    _check_shape(name, valid, shape)
    known = values(valid) if at_end else None
    if known is not None and (known[:, 1:] > known[:, :-1]).any():
        raise UserError(
            f"{name} has tokens after padding: "
            "this model needs all padding at the end; move it there"
        )


def check_mask(name: str, mask: Any, shape: tuple[Any, ...]) -> None:
    """Raise UserError unless `mask` is boolean or 0 and 1, and fits `shape`.

    It must have as many axes as `shape`, and broadcast to it. `shape` is that of the
    scores, e.g. (B, N, T, S).
    """
    rule = f"must be boolean and broadcast to {shape}, {MEANING}"
    check_array(name, mask, rule)
    check_boolean(name, mask, rule)
    if mask.ndim != len(shape):
        remedy = (
            "for padding, pass masks.padding(valid), or valid[:, None, None, :]"
            if len(shape) == 4
            else "add axes"
        )
        raise UserError(
            f"{name} has shape {mask.shape}: {rule}, with {len(shape)} axes; {remedy}"
        )
    if any(
        differ(size, 1) and differ(size, other)
        for size, other in zip(mask.shape, shape, strict=True)
    ):
        raise UserError(
            f"{name} has shape {mask.shape}: {rule}; "
            "(batch, heads, queries, keys) are the axes"
        )


def check_bias(name: str, bias: Any) -> None:
    """Raise UserError unless `bias`, which is added to scores, is floating-point."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise UserError(
            f"{name} has dtype {bias.dtype}: must be floating; "
            f"pass a boolean mask as mask={name}"
        )


def check_boolean(name: str, mask: Any, rule: str) -> None:
    """Raise UserError unless `mask` is boolean, or has integers that are 0 and 1.

    Integers are checked as far as they are known.
    """
    shown = f"{name} has dtype {mask.dtype} and shape {mask.shape}: {rule}"
    if not jnp.issubdtype(mask.dtype, jnp.integer) and mask.dtype != bool:
        raise UserError(
            f"{shown}; for an additive mask, where 0 = may attend, pass {name} == 0"
        )
    known = None if mask.dtype == bool else values(mask)
    if known is not None and ((known != 0) & (known != 1)).any():
        raise UserError(
            f"{shown}, but it contains {known[(known != 0) & (known != 1)][0]}"
        )


def check_segments(name: str, ids: Any, rows: Any, length: Any) -> None:
    """Raise UserError unless the ids of a mask have the right shape.

    They must belong to `rows` sequences, or one, of `length` positions.
    """
    if ids is None:
        return
    rows_differ = differ(ids.shape[0], 1) and differ(ids.shape[0], rows)
    if rows_differ or differ(ids.shape[1], length):
        raise UserError(
            f"{name} has {ids.shape} positions: "
            f"must have {(rows, length)}, like the array it belongs to"
        )


def _check_shape(name: str, x: Any, shape: tuple[Any, ...] | None) -> None:
    if shape is not None and any(map(differ, x.shape, shape)):
        raise UserError(
            f"{name} has shape {x.shape}: must be {shape}, like the ids it belongs to"
        )


def exceeds(length: Any, limit: int) -> bool:
    """Return True if `length` is greater than `limit`.

    Raises:
        UserError: `length` is a symbol of `jax.export` for which no limit was given.
    """
    try:
        return length > limit
    except jax.errors.InconclusiveDimensionOperation as unknown:
        remedy = (
            f"pass constraints=['{length} <= {limit}'] to jax.export.symbolic_shape"
        )
        raise UserError(
            f"{length} positions: must be at most {limit} positions; {remedy}"
        ) from unknown
