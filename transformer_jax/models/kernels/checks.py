"""A check of the attention kernels on the accelerator at hand."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from transformer_jax.models.kernels import choose
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
    kernels = choose.KERNELS.get(jax.default_backend(), ())
    for kernel, (dtype, allowed) in itertools.product(kernels, TOLERANCES.items()):
        needs = choose.Needs(0.0, "none", dtype, model["head_dim"], model["value_dim"])
        if any(kernel.unsupported(needs)):
            continue
        apart = None
        if kernel.runs_here():
            apart = difference(
                kernel.function,
                reference,
                length=kernel.longest(needs.head_dim, dtype),
                dropout_rate=DROPPED if kernel.has_dropout else 0.0,
                dtype=dtype,
                head_dim=needs.head_dim,
                value_dim=needs.value_dim,
            )
        yield f"attention: {kernel.name} vs. einsum, {dtype}", apart, allowed
