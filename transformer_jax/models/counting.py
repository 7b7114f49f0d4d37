"""FLOPs of the matrix products and convolutions in a program, counted in its jaxpr.

A product of (m, k) and (k, n) counts 2·m·k·n. Masked scores and padding count like
everything else. Products that sum over nothing, e.g. of a bias with ones, do not count.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from transformer_jax.models.kernels import plain


def flops(function: Callable, *arguments: Any) -> float:
    """Return the FLOPs of a call of `function` by the equations, without kernels.

    `arguments` may be `jax.ShapeDtypeStruct`s. A loop counts its body as often as it
    runs, or once if that is not known beforehand; of several branches, the one with
    most FLOPs counts.
    """
    with plain.equations():
        # a new function, because JAX keeps the traces of functions that it knows
        program = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
    return _count(program.jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(map(_flops_of, jaxpr.eqns))


def _flops_of(equation: Any) -> float:
    parameters = equation.params
    shapes = [getattr(variable.aval, "shape", ()) for variable in equation.invars]
    match equation.primitive.name:
        case "product":  # models.kernels.products
            return _einsum(parameters["spec"], *shapes)
        case "dot_general":
            return _dot_general(parameters["dimension_numbers"], *shapes)
        case "conv_general_dilated":
            output = math.prod(equation.outvars[0].aval.shape)
            outputs, *_ = parameters["dimension_numbers"].rhs_spec
            kernel = shapes[1]
            return 2.0 * output * math.prod(kernel) / kernel[outputs]
    inner = [_count(program) for program in _programs(parameters)]
    match equation.primitive.name:
        case "scan":
            return parameters["length"] * sum(inner)
        case "cond":
            return max(inner)
    return sum(inner)


def _einsum(spec: str, a: tuple[int, ...], b: tuple[int, ...]) -> float:
    inputs, output = spec.split("->")
    axes = inputs.replace(",", "")
    if set(axes) == set(output):
        return 0.0
    sizes = dict(zip(axes, a + b, strict=True))
    return 2.0 * math.prod(sizes.values())


def _dot_general(numbers: Any, a: tuple[int, ...], b: tuple[int, ...]) -> float:
    (summed, _), (shared, _) = numbers
    if not summed:
        return 0.0
    counted_twice = math.prod(a[axis] for axis in (*summed, *shared))
    return 2.0 * math.prod(a) * math.prod(b) / counted_twice


def _programs(parameters: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation."""
    for value in parameters.values():
        for item in value if isinstance(value, tuple) else (value,):
            program = getattr(item, "jaxpr", item)
            if hasattr(program, "eqns"):
                yield program
