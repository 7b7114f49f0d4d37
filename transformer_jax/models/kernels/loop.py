"""A loop over the layers of a stack, whose parameters are stacked along axis 0.

It computes what `flax.linen.scan` computes, and differs from it in three ways. Layers
can be written out one after the other (see `BlockConfig.unroll`). Their parameters can
be unstacked once, before a loop over decoding steps. And the variables of the modules
around the layers are not traced into the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.kernels import plain
from transformer_jax.models.kernels.products import WEIGHT_PRODUCT

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
    unroll: layers per iteration of the loop. With all of them, there is no loop.
    remat: one of REMAT.

    Returns the last carry, and the outputs stacked along axis 1.
    """
    if plain.is_on() and not isinstance(params, tuple):
        unroll, remat = 1, "none"
    if policy := REMAT[remat]:
        # Common-subexpression elimination could undo rematerialisation in unrolled
        # layers, but not in a plain loop.
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=unroll > 1)
    if unroll < num_layers:
        carry, outputs = jax.lax.scan(layer, carry, (params, keys), unroll=unroll)
        return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
    each = []
    for own in zip(
        as_layers(params, num_layers), unstack(keys, num_layers), strict=True
    ):
        carry, output = layer(carry, own)
        each.append(output)
    return carry, jax.tree.map(lambda *outputs: jnp.stack(outputs, axis=1), *each)


def as_layers(params: Any, num_layers: int) -> tuple[Any, ...]:
    """Return the parameters of each layer, which may have been unstacked already."""
    return params if isinstance(params, tuple) else unstack(params, num_layers)


def unstack(stacked: Any, num_layers: int, axis: int = 0) -> tuple[Any, ...]:
    """Split a tree whose leaves are stacked along `axis` into one tree per layer."""

    def one(layer: int) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.index_in_dim(x, layer, axis, keepdims=False), stacked
        )

    return tuple(map(one, range(num_layers)))
