"""Arrays of heads as kernels want them.

Shapes: B batch · T positions · N heads · K key-value heads · H head width.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def repeat_heads(x: Array, heads: int) -> Array:
    """Return keys or values (B, T, K, H) as (B, T, N, H).

    Each key-value head is copied for its N / K query heads; N is `heads`.
    """
    shared = heads // x.shape[2]
    if shared == 1:
        return x
    return jnp.repeat(x, shared, axis=2)


def heads_first(x: Array, block: int) -> Array:
    """Return x (B, T, N, H) as (B, N, T', H): T' is T, padded to a multiple of `block`
    positions with zeros.
    """
    x = x.swapaxes(1, 2)
    missing = -x.shape[2] % block
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
