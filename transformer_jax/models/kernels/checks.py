"""A check of the attention kernels on the accelerator at hand."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from transformer_jax.models.kernels import choose
from transformer_jax.models.kernels.accelerators import cudnn_runs_here
from transformer_jax.models.kernels.difference import DROPPED, TOLERANCES, difference


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
        apart = None
        if kernel != "cudnn" or cudnn_runs_here():
            apart = difference(
                choose.FUNCTIONS[kernel],
                reference,
                length=choose.longest(kernel, widths[0], dtype),
                dropout_rate=rate,
                dtype=dtype,
                head_dim=widths[0],
                value_dim=widths[1],
            )
        yield f"attention: {kernel} vs. einsum, {dtype}", apart, allowed
