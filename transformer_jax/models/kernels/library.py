"""Attention by JAX's own function, to compare with."""

import jax
import jax.numpy as jnp

from transformer_jax.models.masks import Mask, as_mask

Array = jax.Array


def library_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | Array | None = None,
    dtype: str = "float32",
) -> Array:
    """Compute attention with `jax.nn.dot_product_attention`.

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, H) → (B, T, N, H), float32.
    Inputs are rounded to `dtype`. There is no dropout. A query that may attend to
    nothing gets zeros.
    """
    rows, length, heads, _ = query.shape
    mask = as_mask(mask)
    mask.check("mask", rows, heads, length, key.shape[1])
    allowed = mask.whole(length, key.shape[1])
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    if allowed is None:
        output = jax.nn.dot_product_attention(query, key, value, implementation="xla")
        return output.astype(jnp.float32)
    allowed = jnp.asarray(allowed, bool)
    output = jax.nn.dot_product_attention(
        query, key, value, mask=allowed, implementation="xla"
    )
    # Where all keys are masked, JAX returns the average of the values.
    some = allowed.any(axis=-1).swapaxes(1, 2)[..., None]
    return jnp.where(some, output, 0).astype(jnp.float32)
