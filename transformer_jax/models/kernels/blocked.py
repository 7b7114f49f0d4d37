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
        every = itertools.product(
            range(0, self.length, self.rows), range(0, self.key_length, self.columns)
        )
        return np.array(
            [(t, s) for t, s in every if not self.causal or s < t + self.rows], np.int32
        )


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

    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    output = _attention(
        plan,
        heads_first(query, rows),
        heads_first(repeat_heads(key, heads), columns),
        heads_first(repeat_heads(value, heads), columns),
        mask.padded(rows, columns),
        dropout_key,
    )
    return output[:, :, :length].swapaxes(1, 2)


def _divided(length: int, block: int) -> int:
    """Return the size of the fewest equal blocks of at most `block` positions.

    It is a multiple of 8.
    """
    return -(-length // (8 * -(-length // block))) * 8


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

    def body(carry: Any, block: Array) -> tuple[Any, None]:
        t, s = block
        output, largest, total = (_part(x, t, plan.rows) for x in carry)
        scores, allowed = _scores(plan, query, key, mask, block)
        new = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights, scale = _where(allowed, jnp.exp(scores - new)), jnp.exp(largest - new)
        total = total * scale + weights.sum(axis=-1, keepdims=True)
        kept = _dropped(plan, weights, dropout_key, block)
        output = output * scale + product(
            "BNTS,BNSH->BNTH", kept, _part(value, s, plan.columns), plan.dtype
        )
        return tuple(
            map(functools.partial(_write, t), carry, (output, new, total))
        ), None

    shape = query.shape[:3]
    start = (
        jnp.zeros((*shape, value.shape[-1])),
        jnp.full((*shape, 1), LOWEST),
        jnp.zeros((*shape, 1)),
    )
    (output, largest, total), _ = jax.lax.scan(body, start, jnp.asarray(plan.blocks()))
    # a query that may attend to nothing gets zeros
    output = output / jnp.where(total > 0, total, 1)
    log_total = largest + jnp.log(jnp.where(total > 0, total, 1))
    return output, (query, key, value, mask, dropout_key, output, log_total)


def _backward(
    plan: _Plan, saved: tuple, cotangent: Array
) -> tuple[Array, Array, Array, None, None]:
    """Return the gradients of queries, keys and values.

    Algorithm 4 of Dao et al. 2022.
    """
    query, key, value, mask, dropout_key, output, log_total = saved
    # D of the paper: Σ_s P_ts dP_ts
    mean = (cotangent * output).sum(axis=-1, keepdims=True)

    def body(carry: Any, block: Array) -> tuple[Any, None]:
        t, s = block
        scores, allowed = _scores(plan, query, key, mask, block)
        weights = _where(allowed, jnp.exp(scores - _part(log_total, t, plan.rows)))
        above = _part(cotangent, t, plan.rows)
        kept = _dropped(plan, weights, dropout_key, block)
        d_value = product("BNTS,BNTH->BNSH", kept, above, plan.dtype)
        d_kept = product(
            "BNTH,BNSH->BNTS", above, _part(value, s, plan.columns), plan.dtype
        )
        d_weights = _dropped(plan, d_kept, dropout_key, block)
        d_scores = weights * (d_weights - _part(mean, t, plan.rows))
        d_query = product(
            "BNTS,BNSH->BNTH", d_scores, _part(key, s, plan.columns), plan.dtype
        )
        d_key = product(
            "BNTS,BNTH->BNSH", d_scores, _part(query, t, plan.rows), plan.dtype
        )
        steps = zip(carry, (t, s, s), (d_query, d_key, d_value), strict=True)
        return tuple(
            _write(at, x, _part(x, at, dx.shape[2]) + dx) for x, at, dx in steps
        ), None

    start: Any = tuple(jnp.zeros(x.shape) for x in (query, key, value))
    (d_query, d_key, d_value), _ = jax.lax.scan(body, start, jnp.asarray(plan.blocks()))
    return (
        *(
            dx.astype(x.dtype)
            for dx, x in ((d_query, query), (d_key, key), (d_value, value))
        ),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)


def _scores(
    plan: _Plan, query: Array, key: Array, mask: Mask, block: Array
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
        real = (s + jnp.arange(plan.columns) < plan.key_length)[None, None, None]
        allowed = real if allowed is None else allowed & real
    return scores if allowed is None else jnp.where(allowed, scores, LOWEST), allowed


def _dropped(plan: _Plan, x: Array, dropout_key: Array | None, block: Array) -> Array:
    """Apply dropout to a block of weights, or to its cotangent.

    The bits are those of `layers.dropout`.
    """
    if dropout_key is None:
        return x
    index = jnp.uint32(0)  # of each element in the whole array of weights
    sizes = *x.shape[:2], plan.length, plan.key_length
    for axis, (size, first) in enumerate(zip(sizes, (0, 0, *block), strict=True)):
        index = (
            index * size
            + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            + jnp.uint32(first)
        )
    return bits.drop(x, plan.dropout_rate, dropout_key, index)


def _part(x: Array, start: Array, size: int) -> Array:
    """Return positions start … start + size - 1 of x (B, N, T, H)."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _write(start: Array, x: Array, part: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=2)


def _where(allowed: Array | None, x: Array) -> Array:
    return x if allowed is None else jnp.where(allowed, x, 0)
