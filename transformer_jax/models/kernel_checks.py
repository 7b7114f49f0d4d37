"""A check of the attention kernels on the accelerator at hand.

Outputs and gradients are compared with those of the reference.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models import attention, kernels, short
from transformer_jax.models.masks import CAUSAL, padding

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
LENGTH, DROPPED = 256, 0.1  # positions, and the rate of dropout on attention weights


def compare_kernels(
    model: Mapping[str, Any],
) -> Iterator[tuple[str, float | None, float]]:
    """Yield (name, difference, allowed difference) of the attention kernels.

    There is one for each kernel of this platform and each type of numbers. The heads
    are those of `model`, a config's section. Kernels that do not support them are left
    out. The difference from the reference, which computes in float32, is the largest of
    outputs and gradients, relative to their largest values. None: the kernel does not
    run on this device.
    """
    names = (
        attention.KERNELS.get(jax.default_backend(), {})
        if "attention_implementation" in model
        else {}
    )
    for kernel, (dtype, allowed) in itertools.product(names, TOLERANCES.items()):
        arguments = "none", dtype, model["head_dim"], model["value_dim"]
        if not any(attention.unsupported(kernel, 0.0, *arguments)):
            rate = (
                0.0
                if any(attention.unsupported(kernel, DROPPED, *arguments))
                else DROPPED
            )
            runs = kernel != "cudnn" or kernels.cudnn_runs_here()
            difference = _difference(kernel, rate, *arguments[1:]) if runs else None
            yield f"attention: {kernel} vs. einsum, {dtype}", difference, allowed


def _difference(
    kernel: str, rate: float, dtype: str, head_dim: int, value_dim: int
) -> float:
    """Return the difference of a kernel with a causal mask and this dropout.

    Half of the second sequence is padding.
    """
    length = (
        min(LENGTH, short.longest(head_dim, dtype)) if kernel == "short" else LENGTH
    )
    mask = CAUSAL & padding(
        jnp.arange(length)[None] < jnp.array([[length], [length // 2]])
    )
    dropping = {"dropout_rate": rate, "dropout_key": jax.random.key(1)} if rate else {}
    q, k, v, cotangent = (
        jax.random.normal(key, (2, length, 2, width))
        for key, width in zip(
            jax.random.split(jax.random.key(0), 4),
            (head_dim, head_dim, value_dim, value_dim),
            strict=True,
        )
    )

    def outputs(attend: Callable[..., Any], **options: Any) -> list[jax.Array]:
        output, gradients = jax.vjp(
            functools.partial(attend, **options, **dropping), q, k, v
        )
        return [output, *gradients(cotangent)]

    found = jax.jit(
        lambda: outputs(attention.FUNCTIONS[kernel], mask=mask, dtype=dtype)
    )()
    expected = jax.jit(
        lambda: outputs(
            attention.dot_product_attention, mask=mask.part(0, length, 0, length)
        )
    )()
    return max(
        float(abs(a - b).max() / abs(b).max())
        for a, b in zip(found, expected, strict=True)
    )
