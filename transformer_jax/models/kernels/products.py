"""Matrix products in mixed precision, and where their results are rounded and stored.

`product` is einsum of two arrays. `linear` is y = x W + b. `keep` and `round_stream`
return their argument: they tell the compilers of accelerators what to store.
`recomputed` tells that of CPUs.
"""

import functools
import math
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from transformer_jax.errors import UserError
from transformer_jax.models.kernels import int8, plain, platforms
from transformer_jax.models.kernels.int8 import Int8

Array = jax.Array

# The checkpoint name of products with weights, for rematerialisation policies.
WEIGHT_PRODUCT = "weight_product"


def linear(
    spec: str,
    x: Array,
    kernel: Array | Int8,
    bias: Array | None,
    dtype: str = "float32",
    output_dtype: str = "float32",
) -> Array:
    """Return x W + b, where `spec` is that of x W, e.g. "BTD,DNH->BTNH".

    "..." at the beginning of x and of the result stands for any axes.

    The product is computed in `dtype` and summed in float32, except for sums over
    devices (see `product`), and the result is rounded to `output_dtype`. On
    accelerators, it is rounded before and after the bias is added. On GPUs, the
    gradient of x is rounded to `dtype`.
    """
    if platforms.is_gpu():
        # The product rounds x anyway. This rounds the gradient of x, too, so that less
        # is written to memory. For TPUs, it lowers the bound of a step, but raises the
        # compiler's estimate.
        x = x.astype(dtype)
    if "..." in spec:
        written_out = "abcdefgh"[: x.ndim - spec.index(",") + len("...")]
        spec = spec.replace("...", written_out)
    y = product(spec, x, kernel, dtype, output_dtype=stored(output_dtype))
    if bias is not None:
        y = plus_bias(y, bias)
    return checkpoint_name(y.astype(output_dtype), WEIGHT_PRODUCT)


def rounded_product(
    spec: str,
    a: Array,
    b: Array,
    dtype: str,
) -> Array:
    """Return `product(spec, a, b, dtype)`, rounded to `dtype` on accelerators.

    The type of the result is float32 nevertheless. Accelerators write less to memory.
    """
    result = product(spec, a, b, dtype, output_dtype=stored(dtype))
    return result.astype(jnp.float32)


def keep(statistics: Any) -> Any:
    """Return the statistics of a norm, which accelerators keep for the backward pass.

    Otherwise, XLA on GPUs computes them again for the gradient of the gain. The kernel
    that does so also writes every addend of that gradient to memory, in float32. On
    TPUs, this makes no difference.
    """
    if platforms.is_cpu():
        return statistics
    return jax.lax.optimization_barrier(statistics)


def recomputed(f: Callable[..., Array]) -> Callable[..., Array]:
    """Return f, of which CPUs store only the arguments for the backward pass.

    The backward pass computes the rest again. Otherwise, XLA on CPUs would write
    several arrays of the size of the result to memory: for a layer norm, even the gain
    of each position. To compute f twice takes less time, if it is a function of each
    element or position. The compilers of accelerators decide this themselves.
    """
    again = jax.checkpoint(f)

    @functools.wraps(f)
    def call(*arguments: Any) -> Array:
        if platforms.is_cpu() and not plain.is_on():
            return again(*arguments)
        return f(*arguments)

    return call


def round_stream(x: Array, dtype: str) -> Array:
    """Return the sum x of a residual connection, rounded to `dtype` on accelerators.

    Without the barrier, XLA would store float32 for the backward pass. On CPUs,
    rounding here would take longer.
    """
    if dtype == "float32" or platforms.is_cpu():
        return x
    return jax.lax.optimization_barrier(x.astype(dtype))


def stored(dtype: str) -> str:
    """Return the type in which a product writes what will be rounded to `dtype`.

    It is `dtype` on accelerators, which then write less to memory, and float32 on CPUs.
    """
    return "float32" if platforms.is_cpu() else dtype


def product(
    spec: str,
    a: Array,
    b: Array | Int8,
    dtype: str = "float32",
    precision: str | None = None,
    output_dtype: str = "float32",
) -> Array:
    """Return `jnp.einsum(spec, a, b)`, multiplied in `dtype`.

    The product is accumulated in float32, and the result has the type `output_dtype`.
    Every index of an operand must occur in the other operand or in the output.
    Gradients are also products in `dtype`, and have the types of a and b. Their factors
    are in the order that needs the fewest transpositions, which is faster on CPUs than
    autodiff of `jnp.einsum`. Devices that share a sum add up parts that are rounded to
    the type of the result. On GPUs, cuBLAS may also add parts of a sum in this type.

    If b is a weight in 8 bits, `dtype` and `precision` mean nothing, see `int8`.

    With float32, every transformation works, including forward-mode differentiation.
    With bfloat16, only reverse-mode differentiation works, and cotangents are rounded
    to bfloat16; autodiff would multiply them in float32, which is much slower. On
    accelerators, `precision` ("highest" is float32) is that of float32 products and
    their gradients; without it, `jax_default_matmul_precision` applies, and the default
    is TF32 or bfloat16 passes.

    Raises:
        ValueError: The shapes do not fit `spec`.
    """
    if isinstance(b, Int8):
        return int8.product(spec, a, b).astype(output_dtype)
    _sizes(spec, a, b)
    if dtype == "float32":
        a = jnp.asarray(a, jnp.float32)
        b = jnp.asarray(b, jnp.float32)
        return _bind(spec, a, b, precision).astype(output_dtype)
    return _rounded_product(spec, a, b, dtype, output_dtype)


def _bind(
    spec: str,
    a: Array,
    b: Array,
    precision: str | None = None,
    output_dtype: str = "float32",
) -> Array:
    return _product_p.bind(
        a, b, spec=spec, precision=precision, output_dtype=output_dtype
    )


def _parse(spec: str) -> tuple[list[str], str]:
    operands, out = spec.split("->")
    return operands.split(","), out


def _sizes(
    spec: str,
    a: Array,
    b: Array,
) -> dict[str, int]:
    (in_a, in_b), _ = _parse(spec)
    sizes: dict[str, int] = {}
    if (len(in_a), len(in_b)) != (a.ndim, b.ndim) or any(
        sizes.setdefault(i, size) != size
        for i, size in zip(in_a + in_b, a.shape + b.shape, strict=True)
    ):
        raise UserError(
            f"{spec} does not fit arrays of shapes {a.shape} and {b.shape}."
        )
    return sizes


def _gradient_specs(spec: str) -> tuple[str, str, bool]:
    """Return the specs of both gradients, and whether that of b takes a first.

    If not, it takes the cotangent first. The gradient of a takes (cotangent, b). In
    that of b, the factor that has the last axis of b comes second, because this axis is
    then last in the product, too.
    """
    (in_a, in_b), out = _parse(spec)
    a_first = in_b[-1] in out
    return (
        f"{out},{in_b}->{in_a}",
        f"{in_a},{out}->{in_b}" if a_first else f"{out},{in_a}->{in_b}",
        a_first,
    )


def _multiply(
    a: Array,
    b: Array,
    *,
    spec: str,
    precision: str | None,
    output_dtype: str,
) -> Array:
    """Multiply on accelerators, where the compiler chooses the layout of arrays."""
    return jnp.einsum(
        spec, a, b, precision=precision, preferred_element_type=output_dtype
    )


def _multiply_on_cpu(
    a: Array,
    b: Array,
    *,
    spec: str,
    precision: str | None,
    output_dtype: str,
) -> Array:
    """Multiply both operands as (batches of) matrices.

    The result is reshaped to the output of `spec`.
    """
    (in_a, in_b), out = _parse(spec)
    batch = [i for i in in_a if i in in_b and i in out]
    summed = [i for i in in_a if i in in_b and i not in out]
    rows = [i for i in in_a if i not in in_b]
    columns = [i for i in in_b if i not in in_a]
    # Matrix products accept transposed operands without a copy. In bfloat16, only the
    # second may be transposed.
    rounded = a.dtype != jnp.float32
    a_transposed = not rounded and [i for i in in_a if i not in batch] == summed + rows
    b_transposed = [i for i in in_b if i not in batch] == columns + summed
    sizes = _sizes(spec, a, b)

    def matrices(x: Array, indices: str, *groups: list[str]) -> Array:
        x = x.transpose([indices.index(i) for i in sum(groups, batch)])
        return x.reshape(
            [sizes[i] for i in batch]
            + [math.prod(sizes[i] for i in group) for group in groups]
        )

    a = (
        matrices(a, in_a, summed, rows)
        if a_transposed
        else matrices(a, in_a, rows, summed)
    )
    b = (
        matrices(b, in_b, columns, summed)
        if b_transposed
        else matrices(b, in_b, summed, columns)
    )
    n = len(batch)
    single = rounded and a.shape[n] == 1
    # with a single row, XLA would convert the whole matrix to float32, which takes
    # longer than a second row
    if single:
        a = jnp.concatenate([a, a], axis=n)
    # barriers keep XLA from fusing the transpositions into a product, which then would
    # not be in bfloat16
    if rounded:
        a, b = jax.lax.optimization_barrier((a, b))
    sums = (n if a_transposed else n + 1,), (n + 1 if b_transposed else n,)
    pairs = tuple(range(n)), tuple(range(n))
    result = jax.lax.dot_general(
        a, b, (sums, pairs), precision=precision, preferred_element_type=jnp.float32
    )
    if rounded:
        result = jax.lax.optimization_barrier(result)
    if single:
        result = jax.lax.slice_in_dim(result, 0, 1, axis=n)
    order = [*batch, *rows, *columns]
    return (
        result.reshape([sizes[i] for i in order])
        .transpose([order.index(i) for i in out])
        .astype(output_dtype)
    )


# A new primitive, because `custom_vjp` has no forward mode and `custom_jvp` does not
# control the order of the factors.
_product_p = Primitive("product")
_product_p.def_impl(_multiply_on_cpu)
mlir.register_lowering(_product_p, mlir.lower_fun(_multiply, multiple_results=False))
mlir.register_lowering(
    _product_p, mlir.lower_fun(_multiply_on_cpu, multiple_results=False), platform="cpu"
)


@_product_p.def_abstract_eval
def _shape(
    a: jax.core.ShapedArray,
    b: jax.core.ShapedArray,
    *,
    spec: str,
    output_dtype: str,
    **_: object,
) -> jax.core.ShapedArray:
    (in_a, in_b), out = _parse(spec)
    sizes = dict(zip(in_a + in_b, a.shape + b.shape, strict=True))
    return jax.core.ShapedArray(tuple(sizes[i] for i in out), jnp.dtype(output_dtype))


def _transpose_a(
    cotangent: Array,
    _: object,
    b: Array,
    *,
    spec: str,
    precision: str | None,
    **__: object,
) -> Array:
    return _bind(_gradient_specs(spec)[0], cotangent, b, precision)


def _transpose_b(
    cotangent: Array,
    a: Array,
    _: object,
    *,
    spec: str,
    precision: str | None,
    **__: object,
) -> Array:
    _, spec_b, a_first = _gradient_specs(spec)
    return _bind(spec_b, *((a, cotangent) if a_first else (cotangent, a)), precision)


def _vectorize(
    arrays: tuple[Array, Array], axes: tuple, *, spec: str, **options: object
) -> tuple[Array, int]:
    operands, out = _parse(spec)
    new = next(letter for letter in string.ascii_letters if letter not in spec)
    for i, axis in enumerate(axes):
        if isinstance(axis, int):  # otherwise this operand is not batched
            operands[i] = operands[i][:axis] + new + operands[i][axis:]
    return _product_p.bind(
        *arrays, spec=f"{','.join(operands)}->{new}{out}", **options
    ), 0


ad.defbilinear(_product_p, _transpose_a, _transpose_b)
batching.primitive_batchers[_product_p] = _vectorize


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _rounded_product(
    spec: str,
    a: Array,
    b: Array,
    dtype: str,
    output_dtype: str,
) -> Array:
    return _bind(spec, a.astype(dtype), b.astype(dtype), output_dtype=output_dtype)


def _rounded_forward(
    spec: str,
    a: Array,
    b: Array,
    dtype: str,
    output_dtype: str,
) -> tuple[Array, tuple]:
    like = jnp.zeros(0, a.dtype), jnp.zeros(0, b.dtype)
    a = a.astype(dtype)
    b = b.astype(dtype)
    return _rounded_product(spec, a, b, dtype, output_dtype), (a, b, *like)


def _rounded_backward(
    spec: str,
    dtype: str,
    _: str,
    saved: tuple,
    cotangent: Array,
) -> tuple[Array, Array]:
    a, b, like_a, like_b = saved
    spec_a, spec_b, a_first = _gradient_specs(spec)
    da = _rounded_product(spec_a, cotangent, b, dtype, like_a.dtype.name)
    db = _rounded_product(
        spec_b,
        *((a, cotangent) if a_first else (cotangent, a)),
        dtype,
        like_b.dtype.name,
    )
    return da, db


_rounded_product.defvjp(_rounded_forward, _rounded_backward)


def plus_bias(x: Array, bias: Array) -> Array:
    """Return x + bias, where `bias` has the last axes of x.

    On CPUs, the bias is multiplied by ones, so that its gradient is also a product. As
    a sum over the other axes of x, it would take twenty times as long.
    """
    if not platforms.is_cpu():
        return x + jnp.broadcast_to(bias, x.shape)
    rows = "abcdefgh"[: x.ndim - bias.ndim]
    columns = "ijklmn"[: bias.ndim]
    ones = jnp.ones(x.shape[: len(rows)])
    return x + product(
        f"{rows},{columns}->{rows}{columns}", ones, bias, precision="highest"
    )
