"""The parameters of a model with its weights in 8 bits, for evaluation and prediction.

The weights are those of linear maps and of output layers; an embedding that is also
the output layer is one of them. All other parameters stay as they are.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import traverse_util

from transformer_jax.models.kernels import int8
from transformer_jax.models.layers import Embedding, Linear, OutputLayer

Params = Mapping[str, Any]

# (path of a weight, the axes that its product sums over), counted from the last one,
# because the weights of layers are stacked
Axes = tuple[tuple[str, tuple[int, ...]], ...]


def summed_axes(init: Callable[[jax.Array], Params]) -> Axes:
    """Return the weights of products in a model, given its `init`."""
    found: dict[str, tuple[int, ...]] = {}

    def note(call: Callable, args: Any, keywords: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        path = "/".join(module.path)
        if isinstance(module, Linear) and method == "__call__":
            rank = len(module.shape)
            found[f"{path}/kernel"] = tuple(range(-rank, module.num_inputs - rank))
        if isinstance(module, Embedding | OutputLayer) and method == "head":
            found[f"{path}/table"] = (-1,)
        return call(*args, **keywords)

    def traced(key: jax.Array) -> Params:
        """Call `init`. JAX may have traced that before, and would not do so again."""
        return init(key)

    with nn.intercept_methods(note):
        jax.eval_shape(traced, jax.random.key(0))
    return tuple(sorted(found.items()))


@functools.partial(jax.jit, static_argnums=1)
def to_int8(params: Params, axes: Axes) -> Params:
    """Return the parameters with the weights of products as `Int8`.

    `axes` are those of `summed_axes`.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    for path, summed in axes:
        flat[path] = int8.rounded(flat[path], summed)
    return traverse_util.unflatten_dict(flat, sep="/")
