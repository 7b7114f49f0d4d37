"""A check of the attention kernels on the accelerator at hand.

Outputs and gradients are compared with those of the reference.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.kernels import choose, short
from transformer_jax.models.kernels.accelerators import cudnn_runs_here
from transformer_jax.models.masks import CAUSAL, padding

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
LENGTH, DROPPED = 256, 0.1  # positions, and the rate of dropout on attention weights


def compare_kernels(
    model: Mapping[str, Any], reference: Callable[..., Any]
) -> Iterator[tuple[str, float | None, float]]:
    """Yield (name, difference, allowed difference) of the attention kernels.

    There is one for each kernel of this platform and each type of numbers. The heads
    are those of `model`, a config's section. Kernels that do not support them are left
    out. The difference from `reference`, which is `attention.dot_product_attention` and
    computes in float32, is the largest of outputs and gradients, relative to their
    largest values. None: the kernel does not run on this device.
    """
    if "attention_implementation" not in model:
        return
    widths = model["head_dim"], model["value_dim"]
    kernels = choose.KERNELS.get(jax.default_backend(), {})
    for kernel, (dtype, allowed) in itertools.product(kernels, TOLERANCES.items()):
        if any(choose.unsupported(kernel, 0.0, "none", dtype, *widths)):
            continue
        drops = not any(choose.unsupported(kernel, DROPPED, "none", dtype, *widths))
        rate = DROPPED if drops else 0.0
        difference = None
        if kernel != "cudnn" or cudnn_runs_here():
            difference = _difference(kernel, reference, rate, dtype, *widths)
        yield f"attention: {kernel} vs. einsum, {dtype}", difference, allowed


def _difference(
    kernel: str,
    reference: Callable[..., Any],
    rate: float,
    dtype: str,
    head_dim: int,
    value_dim: int,
) -> float:
    """Return the difference of a kernel with a causal mask and this dropout.

    Half of the second sequence is padding.
    """
    length = LENGTH
    if kernel == "short":
        length = min(LENGTH, short.longest(head_dim, dtype))
    lengths = jnp.array([[length], [length // 2]])
    mask = CAUSAL & padding(jnp.arange(length)[None] < lengths)
    dropping = {"dropout_rate": rate, "dropout_key": jax.random.key(1)} if rate else {}
    keys = jax.random.split(jax.random.key(0), 4)
    widths = (head_dim, head_dim, value_dim, value_dim)
    q, k, v, cotangent = (
        jax.random.normal(key, (2, length, 2, width))
        for key, width in zip(keys, widths, strict=True)
    )

    def outputs(attend: Callable[..., Any], **options: Any) -> list[jax.Array]:
        attend = functools.partial(attend, **options, **dropping)
        output, gradients = jax.vjp(attend, q, k, v)
        return [output, *gradients(cotangent)]

    function = choose.FUNCTIONS[kernel]
    found = jax.jit(lambda: outputs(function, mask=mask, dtype=dtype))()
    allowed = mask.whole(length, length)
    expected = jax.jit(lambda: outputs(reference, mask=allowed))()
    return max(
        float(abs(a - b).max() / abs(b).max())
        for a, b in zip(found, expected, strict=True)
    )
