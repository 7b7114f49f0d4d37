"""A loop over the layers of a stack, whose parameters are stacked along axis 0.

It computes what `flax.linen.scan` computes, and differs from it in three ways. Layers
can be written out one after the other (see `BlockConfig.unroll`): by the compiler's
estimate, a training step of wmt14.py:big on a v5e then takes 163 ms instead of 239
(docs/results/accelerators.md, "One chip"). Their parameters can be unstacked once,
before a loop over decoding steps. And the variables of the modules around the layers
are not traced into the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.kernels import plain, platforms
from transformer_jax.models.kernels.products import WEIGHT_PRODUCT

Array = jax.Array

# Rematerialisation (Chen et al. 2016): what the backward pass of a layer recomputes.
# "none": nothing. "full": everything. "scores": everything except products with
# weights, so that the (B, N, T, S) arrays of attention are not stored.
REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "scores": jax.checkpoint_policies.save_only_these_names(WEIGHT_PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def over_layers(
    layer: Callable[[Any, Any], tuple[Any, Any]],
    params: Any,
    keys: Any,
    carry: Any,
    *,
    num_layers: int,
    unroll: int,
    remat: str,
) -> tuple[Any, Any]:
    """Run layer(carry, (params, keys)) → (carry, output) for each layer.

    params: a tree with a leading axis of layers, or a tuple with one tree per layer.
    keys: a tree with a leading axis of layers.
    unroll: layers per iteration of the loop. With all of them, there is no loop. On
        CPUs, rematerialisation needs the loop, with one layer per iteration.
    remat: one of REMAT.

    Returns the last carry, and the outputs stacked along axis 1.
    """
    if plain.is_on() and not isinstance(params, tuple):
        unroll = 1
        remat = "none"
    policy = REMAT[remat]
    if policy and platforms.is_cpu():
        # Without a loop, XLA on CPUs computes all layers again before it needs the last
        # one, and saves no memory.
        unroll = 1
    is_loop = unroll < num_layers and not isinstance(params, tuple)
    if policy:
        # Common-subexpression elimination could undo rematerialisation in unrolled
        # layers, but not in a plain loop.
        is_plain = is_loop and unroll == 1
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=not is_plain)
    if is_loop:
        inputs = (params, keys)
        carry, outputs = jax.lax.scan(layer, carry, inputs, unroll=unroll)

        def second(x: Array) -> Array:
            return jnp.moveaxis(x, 0, 1)

        return carry, jax.tree.map(second, outputs)
    by_layer = []
    for inputs in zip(
        as_layers(params, num_layers), unstack(keys, num_layers), strict=True
    ):
        carry, output = layer(carry, inputs)
        by_layer.append(output)

    def stack(*outputs: Array) -> Array:
        return jnp.stack(outputs, axis=1)

    return carry, jax.tree.map(stack, *by_layer)


def as_layers(
    params: Any,
    num_layers: int,
) -> tuple[Any, ...]:
    """Return the parameters of each layer, which may have been unstacked already."""
    if isinstance(params, tuple):
        return params
    return unstack(params, num_layers)


def unstack(
    stacked: Any,
    num_layers: int,
    axis: int = 0,
) -> tuple[Any, ...]:
    """Split a tree whose leaves are stacked along `axis` into one tree per layer.

    The gradient of a split is a concatenation. That of an index would be a sum with one
    addend for each layer, as large as the whole stack.
    """
    leaves, structure = jax.tree.flatten(stacked)
    split = [jax.lax.split(x, [1] * num_layers, axis) for x in leaves]

    def one(layer: int) -> Any:
        own = [jnp.squeeze(parts[layer], axis) for parts in split]
        return jax.tree.unflatten(structure, own)

    return tuple(map(one, range(num_layers)))
