"""Attention (Vaswani et al. 2017, Section 3.2): pure functions first, then the module that owns the projections.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H width of a head (d_k, or d_v for
values). Masks are boolean, True = may attend, and broadcast to (B, N, T, S).
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.layers import Linear, dropout

Array = jax.Array


def padding_mask(valid: Array) -> Array:
    """(B, S), True where a key is a token and not padding → (B, 1, 1, S)."""
    return valid.astype(bool)[:, None, None, :]


def causal_mask(length: int, key_length: int | None = None, offset: Array | int = 0) -> Array:
    """(1, 1, T, S): the query at position offset + t may attend to the keys at positions 0 … offset + t."""
    queries = offset + jnp.arange(length)[:, None]
    keys = jnp.arange(length if key_length is None else key_length)[None, :]
    return (keys <= queries)[None, None]


def segment_mask(query_segments: Array, key_segments: Array) -> Array:
    """(B, T), (B, S) → (B, 1, T, S): only within the same segment; segment 0 is padding and sees nothing."""
    queries, keys = query_segments[:, None, :, None], key_segments[:, None, None, :]
    return (queries == keys) & (queries > 0)


def combine_masks(*masks: Array | None) -> Array | None:
    """Logical and of those given; None when none is."""
    combined = None
    for mask in masks:
        if mask is not None:
            combined = mask if combined is None else combined & mask
    return combined


def scaled_dot_product_scores(query: Array, key: Array) -> Array:
    """Q Kᵀ / √d_k: (B, T, N, H), (B, S, N, H) → (B, N, T, S), float32. d_k is the width of one head."""
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32)


def attention_weights(scores: Array, mask: Array | None = None) -> Array:
    """softmax over the keys, (B, N, T, S). A query that may attend to nothing gets zeros: no average, no NaN."""
    if mask is None:
        return jax.nn.softmax(scores)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.where(mask, weights, 0.0)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    return_weights: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V. Vaswani et al. 2017, eq. 1.

    query (B, T, N, H), key (B, S, N, H), value (B, S, N, H') → (B, T, N, H') and, on request, the weights
    (B, N, T, S) in float32 before dropout. `mask` and `bias` broadcast to (B, N, T, S). Dropout acts on the
    weights when a key is given; the paper has none there.
    """
    scores = scaled_dot_product_scores(query, key)
    if bias is not None:
        scores = scores + bias
    weights = attention_weights(scores, mask)
    dropped = weights if dropout_key is None else dropout(weights, dropout_rate, dropout_key)
    output = jnp.einsum("BNTS,BSNH->BTNH", dropped.astype(value.dtype), value)
    return (output, weights) if return_weights else output


class KeyValue(NamedTuple):
    """What queries look at: keys (B, N, S, H) and values (B, N, S, H'). Kept between steps, it is the cache.

    The heads stand before the positions, as in the products that read them: else every step would copy the cache.
    """

    key: Array
    value: Array


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head₁ … head_N) W_O, head_i = Attention(Q W_Qⁱ, K W_Kⁱ, V W_Vⁱ). Section 3.2.2.

    Concatenation and W_O are one product with a kernel (N, H', D). `head_dim` is d_k, `value_dim` d_v; neither
    has to be D / N. The weights are sown as "weights" in the collection "intermediates".

    Differs: the projections have biases (`use_bias`), of which the paper says nothing and its authors' code has none.
    """

    num_heads: int
    d_model: int
    head_dim: int
    value_dim: int
    use_bias: bool = True
    dropout_rate: float = 0.0
    dtype: str = "float32"

    def setup(self) -> None:
        def to_heads(width: int) -> Linear:
            shape = (self.d_model, self.num_heads, width)
            return Linear(shape, ("embed", "heads", "head_dim"), use_bias=self.use_bias, dtype=self.dtype)

        self.query = to_heads(self.head_dim)
        self.key = to_heads(self.head_dim)
        self.value = to_heads(self.value_dim)
        self.output = Linear(
            (self.num_heads, self.value_dim, self.d_model),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            use_bias=self.use_bias,
            dtype=self.dtype,
        )

    def project(self, memory: Array) -> KeyValue:
        """(B, S, D) → its keys and values."""
        return KeyValue(jnp.swapaxes(self.key(memory), 1, 2), jnp.swapaxes(self.value(memory), 1, 2))

    def empty_cache(self, batch_size: int, length: int) -> KeyValue:
        """Room for `length` positions."""
        shape = (batch_size, self.num_heads, length)
        return KeyValue(jnp.zeros((*shape, self.head_dim), self.dtype), jnp.zeros((*shape, self.value_dim), self.dtype))

    def extend(self, cache: KeyValue, x: Array, position: Array | int) -> KeyValue:
        """The cache with the keys and values of x (B, T, D) at positions position … position + T - 1."""

        def write(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=2)

        return jax.tree.map(write, cache, self.project(x))

    def __call__(
        self, x: Array, memory: Array | KeyValue, *, mask: Array | None = None, bias: Array | None = None
    ) -> Array:
        """x (B, T, D) gives the queries, `memory` (B, S, D) or its projection the keys and values; → (B, T, D).

        Self-attention: `memory` is x itself.
        """
        projected = memory if isinstance(memory, KeyValue) else self.project(memory)
        key, value = (jnp.swapaxes(x, 1, 2) for x in projected)
        dropout_key = self.make_rng("dropout") if self.dropout_rate and self.has_rng("dropout") else None
        heads, weights = dot_product_attention(
            self.query(x),
            key,
            value,
            mask=mask,
            bias=bias,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            return_weights=True,
        )
        self.sow("intermediates", "weights", weights)
        return self.output(heads)
