"""A Pallas kernel for TPUs: attention of short sequences.

All scores of a query are in on-chip memory at once, so that the softmax is the plain
one. As in FlashAttention (Dao et al. 2022), the T × S matrix of weights never leaves
the chip, and the backward pass computes it again.

The kernel reads heads side by side, as the projections write them, so that no array is
transposed. A TPU works on arrays of 128 columns ("lanes"). The kernel therefore
computes with the 128 / H heads of such an array together. The part of one head has
zeros in the columns of the others, which products then ignore. Where sequences are
shorter than 128, several of them form one block, and the mask keeps them apart. Longer
sequences are computed in chunks of 128 queries; if the mask is causal, a chunk reads
only the keys up to its last query.

Shapes: B batch · T query positions · S key positions · N heads · H head width · R
sequences per block.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.kernels.bits import (
    GOLDEN,
    hash_words,
    hashed,
    scale,
    threshold,
)
from transformer_jax.models.masks import Mask

Array = jax.Array

LANES = 128
# Lengths are padded to multiples of this: arrays of bfloat16 are stored in tiles of 16
# × 128.
SUBLANES = 16
# the longest sequence: libtpu takes a minute to compile the kernels for it, and more
# than two for 2,048
LONGEST = 1024
# What is in the 16 MiB that a kernel gets on the chip: the 7 arrays of the backward
# pass, twice, take up to 7 MiB; sums of gradients in float32 up to 2; weights and their
# gradients in a group of heads up to 4.
BLOCK = 2**19  # the most bytes of an array in a block
SCORES = 2**19  # the most scores of a group of heads
MASKED = -1e30  # the score of a key that a query may not attend to


class _Options(NamedTuple):
    """Options that the kernels are compiled for.

    width: H.
    causal: a query attends only to keys at its own position and before.
    single: a block has one sequence, so that keys after a chunk of queries can be
        skipped.
    cut: weights whose random bits are below this are dropped; 0 means no dropout.
    size: T · S, by which the indices of weights grow from head to head.
    """

    width: int
    causal: bool
    single: bool
    cut: int
    size: int
    interpret: bool


def supports(width: int) -> bool:
    """Return True if the kernel supports heads of this width."""
    return LANES % width == 0 or width % LANES == 0


def longest(width: int, dtype: str) -> int:
    """Return the length of the longest sequences that the kernel has room for.

    The heads have a supported width.
    """
    tile = max(LANES, width)
    return min(
        LONGEST,
        BLOCK // (tile * jnp.dtype(dtype).itemsize),
        SCORES // (LANES * (tile // width)),
    )


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    numbers: Array,
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    dtype: str,
    interpret: bool,
) -> Array:
    """Return the attention (B, T, N, H), in `dtype`.

    query (B, T, N, H) attends to key (B, S, N, H) and value (B, S, N, H). Products have
    operands in `dtype` and results in float32. A query that may attend to nothing gets
    zeros. Only reverse-mode differentiation works. `interpret` runs the kernel on CPUs.
    If `dropout_key` is given, weights are dropped as by `layers.dropout`; `numbers` (B,
    N) counts the matrices (T, S) of weights in the whole array.
    """
    batch, length, heads, width = query.shape
    key_length = key.shape[1]
    together = max(1, LANES // max(_up(length, SUBLANES), _up(key_length, SUBLANES)))
    empty = -batch % together, -heads % max(1, LANES // width)

    def folded(x: Array) -> Array:
        """Fold x (B, T, N, H) to (B / R, R T, N H)."""
        x = jnp.pad(
            x.astype(dtype),
            ((0, empty[0]), (0, -x.shape[1] % SUBLANES), (0, empty[1]), (0, 0)),
        )
        return x.reshape(-1, together * x.shape[1], x.shape[2] * width)

    def placed(properties: list[Array], length: int) -> Array:
        """Fold P properties of positions, each (B, T), to (B / R, P, R T).

        Padding is -1.
        """
        stacked = jnp.stack(
            [jnp.broadcast_to(x.astype(jnp.int32), (batch, length)) for x in properties]
        )
        padded = jnp.pad(
            stacked,
            ((0, 0), (0, empty[0]), (0, -length % SUBLANES)),
            constant_values=-1,
        )
        return padded.reshape(
            len(properties), (batch + empty[0]) // together, -1
        ).swapaxes(0, 1)

    queries, keys = _properties(mask, batch, length, key_length)
    cut = 0
    if dropout_key is not None and (cut := threshold(dropout_rate)):
        # The index of a weight is (number · T + t) S + s. Its hash begins with a
        # product and a sum, which are computed for queries, keys and heads apart.
        first, second = hash_words(dropout_key)
        index = (
            numbers[:, :1] * length + jnp.arange(length, dtype=jnp.uint32)[None]
        ) * key_length
        spread = jnp.arange(key_length, dtype=jnp.uint32) * jnp.uint32(GOLDEN)
        queries += [
            jax.lax.bitcast_convert_type(x, jnp.int32)
            for x in (index * jnp.uint32(GOLDEN) + first, second)
        ]
        keys.append(jax.lax.bitcast_convert_type(spread, jnp.int32))
    compute = _kernels(
        _Options(width, mask.causal, together == 1, cut, length * key_length, interpret)
    )
    places = placed(queries, length), placed(keys, key_length)
    output = compute(*places, folded(query), folded(key), folded(value))
    return output.reshape(batch + empty[0], -1, heads + empty[1], width)[
        :batch, :length, :heads
    ]


def _properties(
    mask: Mask,
    batch: int,
    length: int,
    key_length: int,
) -> tuple[list[Array], list[Array]]:
    """Return properties of queries and keys that broadcast to (B, T) and (B, S).

    A query may attend to a key with the same ones: the sequence and perhaps the
    segment. If the mask is causal, the last of them is the position, and that of the
    key may also be before that of the query.
    """
    sequence = jnp.arange(batch)[:, None]
    queries = [sequence]
    keys = [sequence]
    if mask.key_segments is not None:
        real = mask.key_segments > 0
        if mask.query_segments is None:
            queries.append(jnp.ones(()))
            keys.append(jnp.where(real, 1, -2))
        else:
            queries.append(mask.query_segments)
            keys.append(jnp.where(real, mask.key_segments, -2))
    if mask.causal:
        queries.append(jnp.arange(length))
        keys.append(jnp.arange(key_length))
    return queries, keys


def _up(length: int, multiple: int) -> int:
    return length + -length % multiple


@functools.cache
def _kernels(options: _Options) -> Any:
    """Return the function that computes attention, with its gradient.

    Its arguments are places of queries, places of keys, query, key and value.
    """

    @jax.custom_vjp
    def compute(*inputs: Array) -> Array:
        (output,) = _call(_forward, inputs, options)
        return output

    def forward(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
        return compute(*inputs), inputs

    def backward(
        inputs: tuple[Array, ...], cotangent: Array
    ) -> tuple[Array | None, ...]:
        return None, None, *_call(_backward, (*inputs, cotangent), options)

    compute.defvjp(forward, backward)
    return compute


def _call(
    kernel: Any,
    inputs: tuple[Array, ...],
    options: _Options,
) -> list[Array]:
    """Run `_forward` or `_backward` for each block of sequences.

    Where sequences are long, it is run for each block of heads, too. The first two
    inputs are places. The outputs have the shapes of the next ones: that of the query,
    or of the query, the key and the value.
    """
    # Imported here, because only TPUs need them.
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    _, _, query, key, *_ = inputs
    outputs, products = (1, 2) if kernel is _forward else (3, 5)
    columns = query.shape[2]
    tile = max(LANES, options.width)
    longest = max(query.shape[1], key.shape[1])
    item = query.dtype.itemsize
    chunks = list(_chunks(query.shape[1], key.shape[1], options))
    pairs = sum((rows.stop - rows.start) * keys for rows, keys, _ in chunks)
    scores = query.shape[0] * pairs * columns // options.width
    wide = max(
        x
        for x in range(tile, columns + 1, tile)
        if columns % x == 0 and (x == tile or x * longest * item <= BLOCK)
    )
    places = [
        pallas.BlockSpec((1, *x.shape[1:]), lambda i, _: (i, 0, 0)) for x in inputs[:2]
    ]
    arrays = [
        pallas.BlockSpec((1, x.shape[1], wide), lambda i, j: (i, 0, j))
        for x in inputs[2:]
    ]
    sums = [tpu.VMEM((key.shape[1], wide), jnp.float32)] * (outputs - 1)

    def run(*refs: Any) -> None:
        kernel(
            *refs, first=pallas.program_id(1) * (wide // options.width), options=options
        )

    return pallas.pallas_call(
        run,
        grid=(query.shape[0], columns // wide),
        in_specs=[*places, *arrays],
        out_specs=arrays[:outputs],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[2 : 2 + outputs]
        ],
        scratch_shapes=sums,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        cost_estimate=pallas.CostEstimate(
            flops=2 * products * scores * options.width,
            transcendentals=scores,
            bytes_accessed=sum(
                x.size * x.dtype.itemsize for x in (*inputs, *inputs[2 : 2 + outputs])
            ),
        ),
        name=f"short{kernel.__name__}" + ("_dropout" if options.cut else ""),
        interpret=options.interpret,
    )(*inputs)


def _chunks(
    length: int,
    key_length: int,
    options: _Options,
) -> Iterator[tuple[slice, int, int]]:
    """Yield chunks of queries, from the end of the sequence to its beginning.

    For each: which they are, how many keys they read, and how many of these the chunk
    before also reads.
    """
    skips = options.causal and options.single
    for start in reversed(range(0, length, LANES)):
        end = min(start + LANES, length)
        if skips:
            keys = min(end, key_length)
            again = min(start, key_length)
        else:
            keys = key_length
            again = start and key_length
        yield slice(start, end), keys, again


# In the kernels, scores are (keys, queries), so that the sums of the softmax run over
# rows, which TPUs add up faster than columns. The steps of several heads alternate, so
# that the compiler can overlap them.


def _forward(
    query_places: Any,
    key_places: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    *,
    first: Any,
    options: _Options,
) -> None:
    width = options.width
    for rows, keys, _ in _chunks(q.shape[1], k.shape[1], options):
        pairs = _pairs(
            query_places[0, :, rows], key_places[0, :, :keys], first, options
        )
        for group in _groups(q.shape[2], keys, width):
            queries = [
                _heads(q[0, rows, columns], width, width**-0.5) for columns in group
            ]
            values = [_heads(v[0, :keys, columns], width) for columns in group]
            tiles = list(zip(group, queries, strict=True))
            p = [
                [_weights(k[0, :keys, columns], query, pairs.bias) for query in tile]
                for columns, tile in tiles
            ]
            for columns, *tile in zip(group, p, values, strict=True):
                output: Any = 0
                for head, (weights, value) in enumerate(
                    zip(*tile, strict=True), columns.start // width
                ):
                    kept = weights * _factor(pairs, head, options)
                    output = output + _product(kept.astype(value.dtype), value, 0, 0)
                o[0, rows, columns] = output.astype(o.dtype)


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
    key_sums: Any,
    value_sums: Any,
    *,
    first: Any,
    options: _Options,
) -> None:
    """Write the gradients of P V, with P = softmax(S) and S = Q Kᵀ / √H.

    Dao et al. 2022, Appendix B.2.
    """
    width = options.width
    for rows, keys, again in _chunks(q.shape[1], k.shape[1], options):
        pairs = _pairs(
            query_places[0, :, rows], key_places[0, :, :keys], first, options
        )
        for group in _groups(q.shape[2], keys, width):
            queries = [
                _heads(q[0, rows, columns], width, width**-0.5) for columns in group
            ]
            cotangents = [_heads(do[0, rows, columns], width) for columns in group]
            tiles = list(zip(group, queries, strict=True))
            p = [
                [_weights(k[0, :keys, columns], query, pairs.bias) for query in tile]
                for columns, tile in tiles
            ]
            tiles = list(zip(group, cotangents, strict=True))
            dp = [
                [_product(v[0, :keys, columns], cotangent, 1, 1) for cotangent in tile]
                for columns, tile in tiles
            ]
            for columns, *tile in zip(group, queries, cotangents, p, dp, strict=True):
                sums: Any = 0, 0, 0
                parts = zip(*tile, _heads(k[0, :keys, columns], width), strict=True)
                for head, (query, cotangent, weights, slope, key) in enumerate(
                    parts, columns.start // width
                ):
                    factor = _factor(pairs, head, options)
                    kept = weights * factor
                    slope = slope * factor
                    ds = weights * (
                        slope - jnp.sum(weights * slope, axis=0, keepdims=True)
                    )
                    kept = kept.astype(q.dtype)
                    ds = ds.astype(q.dtype)
                    added = (
                        _product(ds, key, 0, 0),
                        _product(ds, query, 1, 0),
                        _product(kept, cotangent, 1, 0),
                    )
                    sums = [a + b for a, b in zip(sums, added, strict=True)]
                dq[0, rows, columns] = (sums[0] * width**-0.5).astype(dq.dtype)
                last = rows.stop == q.shape[1]
                _add(sums[1], key_sums, dk, columns, again, last)
                _add(sums[2], value_sums, dv, columns, again, last)


def _add(
    total: Array,
    so_far: Any,
    gradient: Any,
    columns: slice,
    again: int,
    last: bool,
) -> None:
    """Add what a chunk of queries gives to the gradients of keys or values.

    `total` (keys, columns) has the gradients of those that the chunk reads. The `last`
    chunk of the sequence is computed first. The chunk before reads `again` of these
    keys; the gradients of the others are complete.
    """
    keys = len(total)
    complete = gradient.shape[1]
    if not last:
        total = total + so_far[:keys, columns]
    elif keys < complete:  # no query reads the other keys
        gradient[0, keys:, columns] = jnp.zeros(
            (complete - keys, total.shape[1]), gradient.dtype
        )
    if again:
        so_far[:again, columns] = total[:again]
    if again < keys:
        gradient[0, again:keys, columns] = total[again:].astype(gradient.dtype)


class _Pairs(NamedTuple):
    """Properties of pairs of keys and queries.

    bias: (keys, queries), what to add to the scores: 0, or MASKED where a query may not
        attend to a key.
    spread, second: (keys, queries) and (1, queries) of uint32, what dropout hashes in
        the first head. None: no dropout.
    """

    bias: Array
    spread: Array | None = None
    second: Array | None = None


def _pairs(
    queries: Array,
    keys: Array,
    first: Any,
    options: _Options,
) -> _Pairs:
    """Return the properties of pairs of queries and keys.

    Given are the places of queries (P, queries) and of keys (P, keys), and the number
    of the first head.
    """
    shape = keys.shape[1], queries.shape[1]

    def pair(i: int) -> tuple[Array, Array]:
        row = jnp.broadcast_to(keys[i : i + 1], shape[::-1])
        return jnp.transpose(row), jnp.broadcast_to(queries[i : i + 1], shape)

    bias = jnp.zeros(shape, jnp.float32)
    properties = len(keys) - bool(options.cut)
    for i in range(properties):
        key, query = pair(i)
        bias = jnp.where(
            key <= query if options.causal and i == properties - 1 else key == query,
            bias,
            MASKED,
        )
    if not options.cut:
        return _Pairs(bias)
    # from head to head
    step = np.uint32(options.size * GOLDEN % 2**32).astype(np.int32)
    spread = sum(pair(properties)) + first * step
    return _Pairs(
        bias,
        *(
            jax.lax.bitcast_convert_type(x, jnp.uint32)
            for x in (spread, queries[properties + 1 :])
        ),
    )


def _groups(
    columns: int,
    keys: int,
    width: int,
) -> Iterator[list[slice]]:
    """Yield the columns of groups of heads, if each chunk of queries reads `keys` keys.

    A slice has the columns that are computed together: those of one head, or of the
    heads that share 128 lanes.
    """
    tile = max(LANES, width)
    tiles = [slice(start, start + tile) for start in range(0, columns, tile)]
    size = max(1, SCORES // (LANES * keys * (tile // width)))
    return (tiles[i : i + size] for i in range(0, len(tiles), size))


def _heads(
    x: Array,
    width: int,
    factor: float = 1.0,
) -> list[Array]:
    """Return factor · x (length, columns) once for each head.

    The columns of other heads are zeros.
    """
    scaled = x.astype(jnp.float32) * factor
    if x.shape[1] == width:
        return [scaled.astype(x.dtype)]
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
    own = [
        (start <= lane) & (lane < start + width)
        for start in range(0, x.shape[1], width)
    ]
    return [jnp.where(here, scaled, 0).astype(x.dtype) for here in own]


def _weights(
    key: Array,
    query: Array,
    bias: Array,
) -> Array:
    """Return the softmax (keys, queries) over the keys.

    It is zeros for a query that may attend to none of them. The query is divided by √H.
    """
    scores = _product(key, query, 1, 1) + bias
    highest = jnp.max(scores, axis=0, keepdims=True)
    exp = jnp.exp(scores - highest)
    return exp * jnp.where(
        highest > MASKED / 2, 1 / jnp.sum(exp, axis=0, keepdims=True), 0
    )


def _factor(
    pairs: _Pairs,
    head: int,
    options: _Options,
) -> Array | int:
    """Return what dropout multiplies the weights (keys, queries) of a head by.

    It multiplies their gradients, too.
    """
    if pairs.spread is None or pairs.second is None:
        return 1
    bits = hashed(
        pairs.spread + jnp.uint32(head * options.size * GOLDEN % 2**32), pairs.second
    )
    # A selection of the weights themselves would become a masked product, in which
    # libtpu 0.0.42 fails.
    return jnp.where(bits >= jnp.uint32(options.cut), scale(options.cut), 0)


def _product(
    a: Array,
    b: Array,
    axis_a: int,
    axis_b: int,
) -> Array:
    """Return the product of matrices over an axis of each, in float32."""
    # The compiler of Pallas refuses "highest", which jax_default_matmul_precision may
    # be, for bfloat16.
    precision = None if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = ((axis_a,), (axis_b,)), ((), ())
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
