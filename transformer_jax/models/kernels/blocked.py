"""Attention in blocks, which never stores the T × S matrix of weights.

This holds for the forward and the backward pass. Dao et al. 2022 (FlashAttention),
Algorithms 1, 2 and 4; Rabe and Staats 2021. The values are those of
`attention.dot_product_attention` up to rounding, also with dropout: both draw the same
bits.

Shapes: B batch · T query positions · S key positions · N heads · H head width (d_k) ·
H' head width of values (d_v). Within a block, they stand for its part of an axis.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.kernels import bits, platforms
from transformer_jax.models.kernels.heads import heads_first, repeat_heads
from transformer_jax.models.kernels.products import product
from transformer_jax.models.kernels.softmax import LOWEST, NOTHING
from transformer_jax.models.masks import Mask, only_rules

Array = jax.Array

BLOCK = 512  # positions of a block of queries or keys
# scores of a block on a CPU, for each of its cores: 1 MiB, which fits a core's cache
SCORES_PER_CORE = 2**18


class _Plan(NamedTuple):
    """The sizes and options of a call, none of which is traced.

    scores: the sizes B, N, T and S.
    block: those of a block of scores.
    """

    scores: tuple[int, int, int, int]
    block: tuple[int, int, int, int]
    causal: bool
    dropout_rate: float
    dtype: str

    def blocks(self) -> np.ndarray:
        """Return the index of the first score of each block, (P, 4)."""
        starts = map(range, [0] * 4, self.scores, self.block)
        blocks = list(itertools.product(*starts))
        if self.causal:
            queries = self.block[2]
            blocks = [(b, n, t, s) for b, n, t, s in blocks if s < t + queries]
        return np.array(blocks, np.int32)

    def queries(self, x: Array, first: Array) -> Array:
        """Return the part of x (B, N, T, H) for the block that begins at `first`."""
        b, n, t, _ = self.block
        sizes = (b, n, t, x.shape[3])
        return jax.lax.dynamic_slice(x, _of_queries(first), sizes)

    def keys(self, x: Array, first: Array) -> Array:
        """Return the part of x (B, N, S, H) for the block that begins at `first`."""
        b, n, _, s = self.block
        sizes = (b, n, s, x.shape[3])
        return jax.lax.dynamic_slice(x, _of_keys(first), sizes)


def blocked_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    dtype: str = "float32",
    block: int = BLOCK,
) -> Array:
    """Compute `attention.dot_product_attention` in blocks of `block` queries and keys.

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, H') → (B, T, N, H'), float32.
    Head n reads key-value head n // (N / K). Memory beyond inputs and outputs is that
    of a few blocks, (B, N, block, block); on CPUs, these have so few rows and heads
    that they fit the cache. If `mask` is causal, blocks above the diagonal are skipped.
    Only reverse-mode differentiation works.

    Differs: The backward pass goes through pairs of blocks in the order of the forward
    pass, where the paper's outer loop is over keys.
    """
    rows, length, heads = query.shape[:3]
    key_length = key.shape[1]
    mask = only_rules(mask)
    rate = 0.0 if dropout_key is None else dropout_rate
    queries = _divided(length, block)
    keys = _divided(key_length, block)
    block_rows, block_heads = _rows_and_heads(rows, heads, queries * keys)
    plan = _Plan(
        scores=(rows, heads, length, key_length),
        block=(block_rows, block_heads, queries, keys),
        causal=mask.causal,
        dropout_rate=rate,
        dtype=dtype,
    )

    scale = query.shape[-1] ** -0.5
    query = query * jnp.asarray(scale, query.dtype)
    output = _attention(
        plan,
        heads_first(query, queries),
        heads_first(repeat_heads(key, heads), keys),
        heads_first(repeat_heads(value, heads), keys),
        mask.padded(queries, keys),
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


def _rows_and_heads(rows: int, heads: int, scores: int) -> tuple[int, int]:
    """Return how many rows and heads a block has, with `scores` of each head.

    On CPUs, blocks fit the cache. Elsewhere, and where devices share the rows or the
    heads, a block has all of them.
    """
    if not platforms.is_cpu():
        return rows, heads
    is_shared = jax.sharding.get_abstract_mesh().size > 1
    is_symbolic = not isinstance(rows, int)
    if is_shared or is_symbolic:
        return rows, heads
    most = SCORES_PER_CORE * platforms.cores() // scores
    block_rows = _divisor(rows, most // heads)
    block_heads = _divisor(heads, most)
    return block_rows, block_heads


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, or 1."""
    divisor = min(number, max(most, 1))
    while number % divisor:
        divisor -= 1
    return divisor


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
        first: Array,
    ) -> tuple[Any, None]:
        output, largest, total = (plan.queries(x, first) for x in carry)
        scores = _scores(plan, query, key, mask, first)
        here = scores.max(axis=-1, keepdims=True)
        new = jnp.maximum(largest, here)
        weights = jnp.exp(scores - new)
        scale = jnp.exp(largest - new)
        total = total * scale
        total = total + weights.sum(axis=-1, keepdims=True)
        kept = _dropped(plan, weights, dropout_key, first)
        output = output * scale
        values = plan.keys(value, first)
        output = output + product("BNTS,BNSH->BNTH", kept, values, plan.dtype)
        write = functools.partial(_write, _of_queries(first))
        return tuple(map(write, carry, (output, new, total))), None

    shape = query.shape[:3]
    start = (
        jnp.zeros((*shape, value.shape[-1])),
        jnp.full((*shape, 1), NOTHING),
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

    Algorithm 4 of Dao et al. 2022. The gradients of keys and values are summed as
    (B, N, H, S): products with this result take CPUs half the time.
    """
    query, key, value, mask, dropout_key, output, log_total = saved
    # D of the paper: Σ_s P_ts dP_ts
    mean = (cotangent * output).sum(axis=-1, keepdims=True)

    def body(
        carry: Any,
        first: Array,
    ) -> tuple[Any, None]:
        scores = _scores(plan, query, key, mask, first)
        weights = jnp.exp(scores - plan.queries(log_total, first))
        above = plan.queries(cotangent, first)
        kept = _dropped(plan, weights, dropout_key, first)
        d_value = product("BNTH,BNTS->BNHS", above, kept, plan.dtype)
        values = plan.keys(value, first)
        d_kept = product("BNTH,BNSH->BNTS", above, values, plan.dtype)
        d_weights = _dropped(plan, d_kept, dropout_key, first)
        d_scores = weights * (d_weights - plan.queries(mean, first))
        keys = plan.keys(key, first)
        d_query = product("BNTS,BNSH->BNTH", d_scores, keys, plan.dtype)
        queries = plan.queries(query, first)
        d_key = product("BNTH,BNTS->BNHS", queries, d_scores, plan.dtype)
        so_far_query, so_far_key, so_far_value = carry
        b, n, _, s = first
        transposed = (b, n, 0, s)
        return (
            _add(_of_queries(first), so_far_query, d_query),
            _add(transposed, so_far_key, d_key),
            _add(transposed, so_far_value, d_value),
        ), None

    def zeros(x: Array) -> Array:
        return jnp.zeros(x.swapaxes(2, 3).shape)

    start = (
        jnp.zeros(query.shape),
        zeros(key),
        zeros(value),
    )
    blocks = jnp.asarray(plan.blocks())
    (d_query, d_key, d_value), _ = jax.lax.scan(body, start, blocks)
    return (
        d_query.astype(query.dtype),
        d_key.swapaxes(2, 3).astype(key.dtype),
        d_value.swapaxes(2, 3).astype(value.dtype),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)


def _scores(
    plan: _Plan,
    query: Array,
    key: Array,
    mask: Mask,
    first: Array,
) -> Array:
    """Return the scores of a block (B, N, T, S). LOWEST is added where a key is
    hidden.
    """
    queries = plan.queries(query, first)
    keys = plan.keys(key, first)
    scores = product("BNTH,BNSH->BNTS", queries, keys, plan.dtype)
    row, _, t, s = first
    rows, _, length, key_length = plan.block
    allowed = mask.of_rows(row, rows).part(t, length, s, key_length)
    last = plan.scores[3]
    if last % key_length:
        positions = s + jnp.arange(key_length)
        real = (positions < last)[None, None, None]
        allowed = real if allowed is None else allowed & real
    if allowed is None:
        return scores
    return scores + jnp.where(allowed, 0.0, LOWEST)


def _dropped(
    plan: _Plan,
    x: Array,
    dropout_key: Array | None,
    first: Array,
) -> Array:
    """Apply dropout to a block of weights, or to its cotangent.

    The bits are those of `layers.dropout`.
    """
    if dropout_key is None:
        return x
    index = jnp.uint32(0)  # of each element in the whole array of weights
    for axis, size in enumerate(plan.scores):
        here = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index * size + here + first[axis].astype(jnp.uint32)
    return bits.drop(x, plan.dropout_rate, dropout_key, index)


def _of_queries(first: Array) -> tuple[Any, ...]:
    """Return where in an array (B, N, T, H) a block begins."""
    b, n, t, _ = first
    return b, n, t, 0


def _of_keys(first: Array) -> tuple[Any, ...]:
    """Return where in an array (B, N, S, H) a block begins."""
    b, n, _, s = first
    return b, n, s, 0


def _add(first: tuple[Any, ...], x: Array, part: Array) -> Array:
    """Add `part` to the elements of x from the index `first` on."""
    here = jax.lax.dynamic_slice(x, first, part.shape)
    return _write(first, x, here + part)


def _write(
    first: tuple[Any, ...],
    x: Array,
    part: Array,
) -> Array:
    return jax.lax.dynamic_update_slice(x, part, first)
