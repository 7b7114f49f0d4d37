"""A Pallas kernel for TPUs: attention of short sequences, with all scores of a head in on-chip memory at once.

As in FlashAttention (Dao et al. 2022), the T × S matrix of weights never leaves the chip, and the backward pass
computes it again. As the matrix is never divided, the softmax is the plain one.

The kernel reads heads side by side, as the projections write them, so that no array is transposed. A TPU works on
arrays of 128 columns ("lanes"). The kernel therefore computes with the 128 / H heads of such an array together. The
part of one head has zeros in the columns of the others, which products then ignore. Where sequences are shorter than
128, several of them form one block, and the mask keeps them apart.

Shapes: B batch · T query positions · S key positions · N heads · H head width · R sequences per block.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.masks import Mask

Array = jax.Array

LANES = 128
SUBLANES = 16  # Lengths are padded to multiples of this: arrays of bfloat16 are stored in tiles of 16 × 128.
LONGEST = 512  # of the sequences: at this length, the scores of a head and their gradients take 4 of 16 MiB on the chip
BLOCK = 2**19  # the most bytes of an array in a block: the 7 arrays of the backward pass, twice, take 7 of 16 MiB
MASKED = -1e30  # the score of a key that a query may not attend to


def supports(width: int) -> bool:
    """Return True if the kernel supports heads of this width."""
    return LANES % width == 0 or width % LANES == 0


def attend(query: Array, key: Array, value: Array, mask: Mask, *, dtype: str, interpret: bool) -> Array:
    """Return the attention (B, T, N, H) of query (B, T, N, H) to key (B, S, N, H) and value (B, S, N, H), in `dtype`.

    Products have operands in `dtype` and results in float32. A query that may attend to nothing gets zeros. Only
    reverse-mode differentiation works. `interpret` runs the kernel on CPUs.
    """
    (batch, length, heads, width), key_length = query.shape, key.shape[1]
    together = max(1, LANES // max(_up(length, SUBLANES), _up(key_length, SUBLANES)))
    empty = -batch % together, -heads % max(1, LANES // width)

    def folded(x: Array) -> Array:
        """Fold x (B, T, N, H) to (B / R, R T, N H)."""
        x = jnp.pad(x.astype(dtype), ((0, empty[0]), (0, -x.shape[1] % SUBLANES), (0, empty[1]), (0, 0)))
        return x.reshape(-1, together * x.shape[1], x.shape[2] * width)

    def placed(properties: list[Array], length: int) -> Array:
        """Fold P properties of positions, each (B, T), to (B / R, P, R T). Padding is -1."""
        stacked = jnp.stack([jnp.broadcast_to(x, (batch, length)).astype(jnp.int32) for x in properties])
        padded = jnp.pad(stacked, ((0, 0), (0, empty[0]), (0, -length % SUBLANES)), constant_values=-1)
        return padded.reshape(len(properties), (batch + empty[0]) // together, -1).swapaxes(0, 1)

    # A query may attend to a key with the same properties: the sequence and perhaps the segment. If the mask is causal,
    # the last property is the position, and that of the key may also be before that of the query.
    sequence = jnp.arange(batch)[:, None]
    queries, keys = [sequence], [sequence]
    if mask.key_segments is not None:
        real = mask.key_segments > 0
        queries.append(jnp.ones(()) if mask.query_segments is None else mask.query_segments)
        keys.append(jnp.where(real, 1 if mask.query_segments is None else mask.key_segments, -2))
    if mask.causal:
        queries.append(jnp.arange(length))
        keys.append(jnp.arange(key_length))
    compute = _kernels(width, mask.causal, interpret)
    places = placed(queries, length), placed(keys, key_length)
    output = compute(*places, folded(query), folded(key), folded(value))
    return output.reshape(batch + empty[0], -1, heads + empty[1], width)[:batch, :length, :heads]


def _up(length: int, multiple: int) -> int:
    return length + -length % multiple


@functools.cache
def _kernels(width: int, causal: bool, interpret: bool) -> Any:
    """Return the function of (places of queries, places of keys, query, key, value), with its gradient."""
    options = width, causal, interpret

    @jax.custom_vjp
    def compute(*inputs: Array) -> Array:
        (output,) = _call(_forward, inputs, *options)
        return output

    def forward(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
        return compute(*inputs), inputs

    def backward(inputs: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
        return None, None, *_call(_backward, (*inputs, cotangent), *options)

    compute.defvjp(forward, backward)
    return compute


def _call(kernel: Any, inputs: tuple[Array, ...], width: int, causal: bool, interpret: bool) -> list[Array]:
    """Run `_forward` or `_backward` for each block of sequences and, where sequences are long, of heads.

    The first two inputs are places. The outputs have the shapes of the next ones: that of the query, or of the query,
    the key and the value.
    """
    # Imported here, because only TPUs need them.
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    outputs, products = (1, 2) if kernel is _forward else (3, 5)
    columns, tile = inputs[2].shape[2], max(LANES, width)
    longest, item = max(x.shape[1] for x in inputs[2:]), inputs[2].dtype.itemsize
    scores = inputs[2].shape[0] * inputs[2].shape[1] * inputs[3].shape[1] * columns // width
    wide = max(
        x for x in range(tile, columns + 1, tile) if columns % x == 0 and (x == tile or x * longest * item <= BLOCK)
    )
    places = [pallas.BlockSpec((1, *x.shape[1:]), lambda i, _: (i, 0, 0)) for x in inputs[:2]]
    arrays = [pallas.BlockSpec((1, x.shape[1], wide), lambda i, j: (i, 0, j)) for x in inputs[2:]]
    return pallas.pallas_call(
        functools.partial(kernel, width=width, causal=causal),
        grid=(inputs[2].shape[0], columns // wide),
        in_specs=[*places, *arrays],
        out_specs=arrays[:outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[2 : 2 + outputs]],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pallas.CostEstimate(
            flops=2 * products * scores * width,
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *inputs[2 : 2 + outputs])),
        ),
        name=f"short{kernel.__name__}",
        interpret=interpret,
    )(*inputs)


# In the kernels, scores are (keys, queries), so that the sums of the softmax run over rows, which TPUs add up faster
# than columns.


def _forward(query_places: Any, key_places: Any, q: Any, k: Any, v: Any, o: Any, *, width: int, causal: bool) -> None:
    bias = _bias(query_places, key_places, causal)
    for columns in _tiles(q.shape[2], width):
        key = k[0, :, columns]
        output = jnp.zeros((q.shape[1], key.shape[1]))
        for query, value in zip(_heads(q[0, :, columns], width), _heads(v[0, :, columns], width), strict=True):
            weights = _weights(key, query, bias, width)
            output = output + _product(weights.astype(value.dtype), value, 0, 0)
        o[0, :, columns] = output.astype(o.dtype)


def _backward(
    query_places: Any,
    key_places: Any,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    *,
    width: int,
    causal: bool,
) -> None:
    """Write the gradients of P V, with P = softmax(S) and S = Q Kᵀ / √H: Dao et al. 2022, Appendix B.2."""
    bias = _bias(query_places, key_places, causal)
    for columns in _tiles(q.shape[2], width):
        keys, values = k[0, :, columns], v[0, :, columns]
        parts = (_heads(x[0, :, columns], width) for x in (q, k, do))
        sums = [jnp.zeros((x.shape[1], keys.shape[1])) for x in (q, k, v)]
        for query, key, cotangent in zip(*parts, strict=True):
            p = _weights(keys, query, bias, width)
            dp = _product(values, cotangent, 1, 1)
            ds = p * (dp - jnp.sum(p * dp, axis=0, keepdims=True)) * width**-0.5
            p, ds = p.astype(q.dtype), ds.astype(q.dtype)
            added = _product(ds, key, 0, 0), _product(ds, query, 1, 0), _product(p, cotangent, 1, 0)
            sums = [a + b for a, b in zip(sums, added, strict=True)]
        for gradient, total in zip((dq, dk, dv), sums, strict=True):
            gradient[0, :, columns] = total.astype(gradient.dtype)


def _bias(query_places: Any, key_places: Any, causal: bool) -> Array:
    """Return what to add to the scores (keys, queries): 0, or MASKED where a query may not attend to a key."""
    queries, keys = query_places[0], key_places[0]
    shape = keys.shape[1], queries.shape[1]

    def pair(i: int) -> tuple[Array, Array]:
        row = jnp.broadcast_to(keys[i : i + 1], shape[::-1])
        return jnp.transpose(row), jnp.broadcast_to(queries[i : i + 1], shape)

    bias = jnp.zeros(shape, jnp.float32)
    for i in range(len(queries)):
        key, query = pair(i)
        bias = jnp.where(key <= query if causal and i == len(queries) - 1 else key == query, bias, MASKED)
    return bias


def _tiles(columns: int, width: int) -> Iterator[slice]:
    """Yield the columns that are computed together: those of one head, or of the heads that share 128 lanes."""
    tile = max(LANES, width)
    return (slice(start, start + tile) for start in range(0, columns, tile))


def _heads(x: Array, width: int) -> list[Array]:
    """Return x (length, columns) once for each head, with zeros in the columns of other heads."""
    if x.shape[1] == width:
        return [x]
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
    own = [(start <= lane) & (lane < start + width) for start in range(0, x.shape[1], width)]
    return [jnp.where(here, x.astype(jnp.float32), 0).astype(x.dtype) for here in own]


def _weights(key: Array, query: Array, bias: Array, width: int) -> Array:
    """Return the softmax (keys, queries) over the keys; zeros for a query that may attend to none of them."""
    scores = _product(key, query, 1, 1) * width**-0.5 + bias
    highest = jnp.max(scores, axis=0, keepdims=True)
    exp = jnp.exp(scores - highest)
    return exp * jnp.where(highest > MASKED / 2, 1 / jnp.sum(exp, axis=0, keepdims=True), 0)


def _product(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """Return the product of matrices over an axis of each, in float32."""
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
