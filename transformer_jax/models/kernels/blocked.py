"""Attention in blocks, which never stores the T × S matrix of weights.

This holds for the forward and the backward pass. Dao et al. 2022 (FlashAttention),
Algorithms 1, 2 and 4; Rabe and Staats 2021. The values are those of
`attention.dot_product_attention` up to rounding, also with dropout: both draw the same
bits.

Shapes: B batch · T query positions · S key positions · N heads · H head width (d_k) ·
H' head width of values (d_v).
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.kernels import bits
from transformer_jax.models.kernels.heads import heads_first, repeat_heads
from transformer_jax.models.kernels.products import product
from transformer_jax.models.masks import Mask, only_rules

Array = jax.Array

# positions of a block of queries or keys. If the mask is causal: a quarter of T, within
# these bounds
BLOCK = 512
CAUSAL_BLOCKS = 64, 256
LOWEST = float(np.finfo(np.float32).min)


class _Plan(NamedTuple):
    """The lengths, sizes of blocks and options of a call, none of which is traced."""

    length: int
    key_length: int
    rows: int  # queries of a block
    columns: int  # keys of a block
    causal: bool
    dropout_rate: float
    dtype: str

    def blocks(self) -> np.ndarray:
        """Return the first query and key of each block of scores, (P, 2)."""
        queries = range(0, self.length, self.rows)
        keys = range(0, self.key_length, self.columns)
        blocks = list(itertools.product(queries, keys))
        if self.causal:
            blocks = [(t, s) for t, s in blocks if s < t + self.rows]
        return np.array(blocks, np.int32)


def blocked_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    dtype: str = "float32",
    block: int | None = None,
) -> Array:
    """Compute `attention.dot_product_attention` in blocks of `block` queries and keys.

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, H') → (B, T, N, H'), float32.
    Head n reads key-value head n // (N / K). Memory beyond inputs and outputs is that
    of a few blocks, (B, N, block, block). If `mask` is causal, blocks above the
    diagonal are skipped. By default, a block has 512 positions, or if `mask` is causal,
    a quarter of T, at least 64 and at most 256. Only reverse-mode differentiation
    works.

    Differs: The backward pass goes through pairs of blocks in the order of the forward
    pass, where the paper's outer loop is over keys.
    """
    length, heads = query.shape[1:3]
    key_length = key.shape[1]
    mask = only_rules(mask)
    rate = 0.0 if dropout_key is None else dropout_rate
    if block is None and mask.causal:
        least, most = CAUSAL_BLOCKS
        block = min(max(length // 4, least), most)
    elif block is None:
        block = BLOCK
    rows = _divided(length, block)
    columns = _divided(key_length, block)
    plan = _Plan(length, key_length, rows, columns, mask.causal, rate, dtype)

    scale = query.shape[-1] ** -0.5
    query = query * jnp.asarray(scale, query.dtype)
    output = _attention(
        plan,
        heads_first(query, rows),
        heads_first(repeat_heads(key, heads), columns),
        heads_first(repeat_heads(value, heads), columns),
        mask.padded(rows, columns),
        dropout_key,
    )
    return output[:, :, :length].swapaxes(1, 2)


def _divided(
    length: int,
    block: int,
) -> int:
    """Return the size of the fewest equal blocks of at most `block` positions.

    It is a multiple of 8.
    """
    count = -(-length // block)
    return -(-length // (8 * count)) * 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: _Plan,
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    dropout_key: Array | None,
) -> Array:
    return _forward(plan, query, key, value, mask, dropout_key)[0]


def _forward(
    plan: _Plan,
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    dropout_key: Array | None,
) -> tuple[Array, tuple]:
    """Return the output (B, N, T, H'), and what the backward pass needs.

    Algorithm 2 of Dao et al. 2022.
    """

    def body(
        carry: Any,
        block: Array,
    ) -> tuple[Any, None]:
        t, s = block
        rows = functools.partial(_part, start=t, size=plan.rows)
        output, largest, total = map(rows, carry)
        scores, allowed = _scores(plan, query, key, mask, block)
        here = scores.max(axis=-1, keepdims=True)
        new = jnp.maximum(largest, here)
        weights = _where(allowed, jnp.exp(scores - new))
        scale = jnp.exp(largest - new)
        total = total * scale
        total = total + weights.sum(axis=-1, keepdims=True)
        kept = _dropped(plan, weights, dropout_key, block)
        output = output * scale
        values = _part(value, s, plan.columns)
        output = output + product("BNTS,BNSH->BNTH", kept, values, plan.dtype)
        write = functools.partial(_write, t)
        return tuple(map(write, carry, (output, new, total))), None

    shape = query.shape[:3]
    start = (
        jnp.zeros((*shape, value.shape[-1])),
        jnp.full((*shape, 1), LOWEST),
        jnp.zeros((*shape, 1)),
    )
    blocks = jnp.asarray(plan.blocks())
    (output, largest, total), _ = jax.lax.scan(body, start, blocks)
    # a query that may attend to nothing gets zeros
    output = output / jnp.where(total > 0, total, 1)
    log_total = jnp.log(jnp.where(total > 0, total, 1))
    log_total = largest + log_total
    return output, (query, key, value, mask, dropout_key, output, log_total)


def _backward(
    plan: _Plan,
    saved: tuple,
    cotangent: Array,
) -> tuple[Array, Array, Array, None, None]:
    """Return the gradients of queries, keys and values.

    Algorithm 4 of Dao et al. 2022.
    """
    query, key, value, mask, dropout_key, output, log_total = saved
    # D of the paper: Σ_s P_ts dP_ts
    mean = (cotangent * output).sum(axis=-1, keepdims=True)

    def body(
        carry: Any,
        block: Array,
    ) -> tuple[Any, None]:
        t, s = block
        scores, allowed = _scores(plan, query, key, mask, block)
        rows = functools.partial(_part, start=t, size=plan.rows)
        columns = functools.partial(_part, start=s, size=plan.columns)
        weights = _where(allowed, jnp.exp(scores - rows(log_total)))
        above = rows(cotangent)
        kept = _dropped(plan, weights, dropout_key, block)
        d_value = product("BNTS,BNTH->BNSH", kept, above, plan.dtype)
        d_kept = product("BNTH,BNSH->BNTS", above, columns(value), plan.dtype)
        d_weights = _dropped(plan, d_kept, dropout_key, block)
        d_scores = weights * (d_weights - rows(mean))
        d_query = product("BNTS,BNSH->BNTH", d_scores, columns(key), plan.dtype)
        d_key = product("BNTS,BNTH->BNSH", d_scores, rows(query), plan.dtype)
        so_far_query, so_far_key, so_far_value = carry
        return (
            _add(t, so_far_query, d_query),
            _add(s, so_far_key, d_key),
            _add(s, so_far_value, d_value),
        ), None

    start = (
        jnp.zeros(query.shape),
        jnp.zeros(key.shape),
        jnp.zeros(value.shape),
    )
    blocks = jnp.asarray(plan.blocks())
    (d_query, d_key, d_value), _ = jax.lax.scan(body, start, blocks)
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)


def _scores(
    plan: _Plan,
    query: Array,
    key: Array,
    mask: Mask,
    block: Array,
) -> tuple[Array, Array | None]:
    """Return the scores of a pair of blocks, and where attention is allowed.

    The scores are (B, N, rows, columns). None: attention is allowed everywhere.
    """
    t, s = block
    scores = product(
        "BNTH,BNSH->BNTS",
        _part(query, t, plan.rows),
        _part(key, s, plan.columns),
        plan.dtype,
    )
    allowed = mask.part(t, plan.rows, s, plan.columns)
    if plan.key_length % plan.columns:
        positions = s + jnp.arange(plan.columns)
        real = (positions < plan.key_length)[None, None, None]
        allowed = real if allowed is None else allowed & real
    if allowed is None:
        return scores, None
    return jnp.where(allowed, scores, LOWEST), allowed


def _dropped(
    plan: _Plan,
    x: Array,
    dropout_key: Array | None,
    block: Array,
) -> Array:
    """Apply dropout to a block of weights, or to its cotangent.

    The bits are those of `layers.dropout`.
    """
    if dropout_key is None:
        return x
    t, s = block
    index = jnp.uint32(0)  # of each element in the whole array of weights
    axes = (
        (x.shape[0], 0),
        (x.shape[1], 0),
        (plan.length, t),
        (plan.key_length, s),
    )
    for axis, (size, first) in enumerate(axes):
        here = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index * size + here + jnp.uint32(first)
    return bits.drop(x, plan.dropout_rate, dropout_key, index)


def _part(
    x: Array,
    start: Array,
    size: int,
) -> Array:
    """Return positions start … start + size - 1 of x (B, N, T, H)."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _add(start: Array, x: Array, part: Array) -> Array:
    """Add `part` to the positions of x from `start` on."""
    size = part.shape[2]
    return _write(start, x, _part(x, start, size) + part)


def _write(
    start: Array,
    x: Array,
    part: Array,
) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=2)


def _where(
    allowed: Array | None,
    x: Array,
) -> Array:
    if allowed is None:
        return x
    return jnp.where(allowed, x, 0)
