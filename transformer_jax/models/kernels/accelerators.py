"""Attention by kernels for accelerators: Pallas and cuDNN.

They keep the T × S matrix of weights on the chip. Dao et al. 2022 (FlashAttention). The
values are those of `attention.dot_product_attention` up to rounding. Only
`short_attention` can drop weights. None of them returns the weights.

Shapes: B batch · T query positions · S key positions · N heads · K key-value heads · H
head width (d_k) · H' head width of values (d_v).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from transformer_jax.models.kernels import short
from transformer_jax.models.kernels.heads import heads_first, repeat_heads
from transformer_jax.models.kernels.placement import mesh_axes
from transformer_jax.models.masks import Mask, only_rules

Array = jax.Array

LANES = 128  # The block sizes of splash attention are multiples of this.
# The most positions of a block, of queries and of keys, forward and backward: the
# default of MaxText, Google's training code for TPUs. A block of scores is then 1 MiB
# of the 16 MiB or more of on-chip memory that a kernel gets. Larger blocks could be
# faster on some chips; they have not been measured.
BLOCK = 512


def short_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    dtype: str = "float32",
    interpret: bool = False,
) -> Array:
    """Compute attention with `short.attend`, our Pallas kernel for TPUs.

    It runs on every device of the mesh in scope. query (B, T, N, H), key (B, S, K, H),
    value (B, S, K, H) → (B, T, N, H), float32. Head n reads key-value head n // (N /
    K). Inputs and the output are rounded to `dtype`. T and S are at most
    `short.longest(H, dtype)`, and H divides 128 or is a multiple of it. A query that
    may attend to nothing gets zeros. Only reverse-mode differentiation works. If
    `dropout_key` is given, the weights that are dropped are those of
    `attention.dot_product_attention`, on every mesh. `interpret` runs the kernel on
    CPUs, slowly, for tests.
    """
    dropping: Any = {
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
        "dtype": dtype,
        "interpret": interpret,
    }

    def attend(
        query: Array,
        key: Array,
        value: Array,
        mask: Mask,
        numbers: Array,
    ) -> Array:
        heads = query.shape[2]
        output = short.attend(
            query,
            repeat_heads(key, heads),
            repeat_heads(value, heads),
            mask,
            numbers,
            **dropping,
        )
        return output.astype(jnp.float32)

    rows, _, heads, _ = query.shape
    numbers = jnp.arange(rows * heads, dtype=jnp.uint32).reshape(rows, heads)
    return _on_devices(attend, query, key, value, only_rules(mask), numbers)


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | None = None,
    dtype: str = "float32",
    interpret: bool = False,
) -> Array:
    """Compute attention with splash attention, JAX's Pallas kernel for TPUs.

    It runs on every device of the mesh in scope. query (B, T, N, H), key (B, S, K, H),
    value (B, S, K, H') → (B, T, N, H'), float32. Head n reads key-value head n // (N /
    K). Inputs are rounded to `dtype`. Lengths are padded to blocks of multiples of 128
    positions. If `mask` is causal, blocks above the diagonal are skipped. A query that
    may attend to nothing gets zeros. Only reverse-mode differentiation works.
    `interpret` runs the kernel on CPUs, slowly, for tests.
    """
    attend = functools.partial(_splash, dtype=dtype, interpret=interpret)
    return _on_devices(attend, query, key, value, only_rules(mask))


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | None = None,
    dtype: str = "bfloat16",
) -> Array:
    """Compute attention with cuDNN's kernel for NVIDIA GPUs.

    It runs on every device of the mesh in scope. query (B, T, N, H), key (B, S, K, H),
    value (B, S, K, H) → (B, T, N, H), float32. Head n reads key-value head n // (N /
    K). Inputs are rounded to `dtype`, which must be "bfloat16" here. H must be a
    multiple of 8 and at most 128. If `mask` is causal, blocks above the diagonal are
    skipped. Padding and segments become a bias (B, 1, T, S), because padding need not
    be at the end. A query that may attend to nothing gets zeros.
    """
    return _on_devices(
        functools.partial(_cudnn, dtype=dtype), query, key, value, only_rules(mask)
    )


def cudnn_runs_here() -> bool:
    """Return True if cuDNN's kernel runs on JAX's default device.

    This must be an NVIDIA GPU of compute capability 8.0 or more.
    """
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return (
        re.fullmatch(r"\d+\.\d+", str(capability)) is not None
        and float(capability) >= 8
    )


def _splash(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    *,
    dtype: str,
    interpret: bool,
) -> Array:
    # Imported here, because this part of JAX is experimental and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, length, heads, width = query.shape
    key_length = key.shape[1]
    rows = _block(length)
    columns = _block(key_length)

    query = query * jnp.asarray(width**-0.5, query.dtype)
    query = heads_first(query.astype(dtype), rows)
    key = heads_first(key.astype(dtype), columns)
    value = heads_first(value.astype(dtype), columns)
    # forward; gradients of k and v; of q
    blocks = rows, columns, columns, rows, columns, columns, rows, columns
    shape = query.shape[2], key.shape[2]
    static = splash.CausalMask(shape) if mask.causal else splash.FullMask(shape)
    # With heads as the last axis, memory would be padded to 128 features per head.
    layouts = [
        splash.QKVLayout.SEQ_MINOR
        if x.shape[-1] % LANES
        else splash.QKVLayout.HEAD_DIM_MINOR
        for x in (query, key, value)
    ]
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([static] * heads),
        block_sizes=splash.BlockSizes(*blocks, False, *layouts),
        interpret=interpret,
    )
    if (
        mask.key_segments is None
        and shape[1] > key_length
        and not (mask.causal and length <= key_length)
    ):
        # padded keys get 0
        mask = dataclasses.replace(
            mask, key_segments=jnp.ones((batch, key_length), jnp.int32)
        )
    if mask.key_segments is None:
        output = jax.vmap(kernel)(query, key, value)
    else:
        output = jax.vmap(kernel)(
            query,
            key,
            value,
            splash.SegmentIds(*_ids(mask.padded(rows, columns), shape[0])),
        )
    return _or_zeros(output[:, :, :length].swapaxes(1, 2), mask, key_length)


def _block(length: int) -> int:
    """Return the size of the fewest equal blocks of at most BLOCK positions.

    It is a multiple of 128.
    """
    return -(-length // (LANES * -(-length // BLOCK))) * LANES


def _ids(mask: Mask, length: int) -> tuple[Array, Array]:
    """Return ids of queries (B, T) and keys (B, S) for the segments of `mask`.

    They are equal where the segments allow attention.
    """
    keys: Any = mask.key_segments
    if mask.query_segments is None:
        return jnp.ones((keys.shape[0], length), jnp.int32), (keys > 0).astype(
            jnp.int32
        )
    # keys at padding differ from queries at padding
    return mask.query_segments, jnp.where(keys > 0, keys, -1)


def _cudnn(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    *,
    dtype: str,
) -> Array:
    length = query.shape[1]
    key_length = key.shape[1]
    allowed: Any = None
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    if mask.key_segments is not None:  # the gradient of a bias needs even lengths
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
            for x in (query, key, value)
        )
        shape = query.shape[1], key.shape[1]
        allowed = dataclasses.replace(mask.padded(2, 2), causal=False).part(
            0, shape[0], 0, shape[1]
        )
        allowed = jnp.broadcast_to(allowed, (query.shape[0], 1, *shape))
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    output = attend(query, key, value, mask=allowed, is_causal=mask.causal)
    return _or_zeros(output[:, :length], mask, key_length)


def _or_zeros(
    output: Array,
    mask: Mask,
    key_length: int,
) -> Array:
    """Return output (B, T, N, H'), with zeros where a query may attend to nothing.

    The result is float32. For such queries, the kernels return some average of the
    values. With zeros instead, no gradient flows through it.
    """
    output = output.astype(jnp.float32)
    if mask.key_segments is None:
        return output
    allowed: Any = mask.part(0, output.shape[1], 0, key_length)
    return jnp.where(allowed.any(axis=-1).swapaxes(1, 2)[..., None], output, 0)


def _on_devices(
    attend: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    *of_heads: Array,
) -> Array:
    """Compute `attend` on every device, for its rows of the batch and its heads.

    XLA cannot partition kernels itself.

    Rows or heads that cannot be divided evenly among their devices are computed on each
    of them. `of_heads` are further arguments of `attend`, each (B, N).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if (
        mesh.empty
        or mesh.size == 1
        or any(kind != AxisType.Auto for kind in mesh.axis_types)
    ):
        return attend(query, key, value, mask, *of_heads)

    def share(axis: str, size: int) -> tuple[Any, int]:
        """Return the mesh axes of a logical axis, and their number of devices.

        If this number does not divide `size`: None and 1.
        """
        axes = mesh_axes(axis)
        devices = math.prod(mesh.shape[name] for name in axes)
        return (None, 1) if size % devices else (axes or None, devices)

    rows, _ = share("batch", query.shape[0])
    heads, devices = share("heads", query.shape[2])
    # a device would not have the key-value heads of its heads
    if key.shape[2] % devices:
        key = repeat_heads(key, query.shape[2])
        value = repeat_heads(value, query.shape[2])
    spec = PartitionSpec(rows, None, heads)
    specs = (
        spec,
        spec,
        spec,
        PartitionSpec(rows),
        *[PartitionSpec(rows, heads)] * len(of_heads),
    )
    divided = jax.shard_map(
        attend, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False
    )
    return divided(query, key, value, mask, *of_heads)
