"""Attention (Vaswani et al. 2017, Section 3.2): pure functions first, then the module that owns the projections.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H width of a head (d_k, or d_v for
values). Masks are boolean, True = may attend, and broadcast to (B, N, T, S).
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.layers import Linear, constrain, dropout, einsum
from transformer_jax.models.positions import Relations, RelativePositions, relative_scores, relative_values, rotate

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


def scaled_dot_product_scores(query: Array, key: Array, dtype: str = "float32") -> Array:
    """Q Kᵀ / √d_k: (B, T, N, H), (B, S, N, H) → (B, N, T, S), float32. d_k is the width of one head.

    Vaswani et al. 2017, in eq. 1.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return einsum("BTNH,BSNH->BNTS", query, key, dtype)


# The road there: scores of a recurrent decoder's state s (D wide) against the encoder's outputs h (C wide), with one
# head, (B, T, S); A hidden units.


def additive_scores(query: Array, key: Array, v: Array) -> Array:
    """vᵀ tanh(W_a s + U_a h): query = W_a s (B, T, A), key = U_a h (B, S, A), v (A,) → (B, T, S).

    Bahdanau et al. 2015, e of eq. 6, in the form of Section A.1.2. The keys are projected once a sentence, hence the
    products outside.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return einsum("BTSA,A->BTS", hidden, v)


def concat_scores(query: Array, key: Array, w: Array, v: Array) -> Array:
    """vᵀ tanh(W [s; h]): query s (B, T, D), key h (B, S, C), w (D + C, A), v (A,) → (B, T, S).

    Luong et al. 2015, Section 3.1, under eq. 7. [s; h] W is s W₁ + h W₂ with W₁ above W₂ in W: `additive_scores`, and
    computed so.
    """
    above, below = w[: query.shape[-1]], w[query.shape[-1] :]
    return additive_scores(einsum("BTD,DA->BTA", query, above), einsum("BSC,CA->BSA", key, below), v)


def dot_scores(query: Array, key: Array, dtype: str = "float32") -> Array:
    """sᵀ h: query (B, T, D), key (B, S, D) → (B, T, S). Luong et al. 2015, Section 3.1, under eq. 7.

    Vaswani et al. 2017 divide by √d_k, the width of a head: `scaled_dot_product_scores`.
    """
    return einsum("BTD,BSD->BTS", query, key, dtype)


def general_scores(query: Array, key: Array, w: Array, dtype: str = "float32") -> Array:
    """sᵀ W h: query (B, T, D), key (B, S, C), w (D, C) → (B, T, S). Luong et al. 2015, Section 3.1, under eq. 7."""
    return einsum("BTC,BSC->BTS", einsum("BTD,DC->BTC", query, w, dtype), key, dtype)


def damped_scores(scores: Array, damping: Array) -> Array:
    """s · exp(-λ s) of scores s = q·k / √d_k (B, N, T, S), which go to `attention_weights` next. λ = `damping` ().

    λ = 0 leaves them as they are; above it, scores beyond 1 / λ count for less again; below, large ones for more.
    float32 overflows where -λ s > 88: scores are to stay small. Met in teaching material, which gives no source.
    """
    return scores * jnp.exp(-damping * scores)


def local_weights(scores: Array, center: Array, window: int, mask: Array) -> Array:
    """Weights (B, T, S) about a predicted position: softmax within [p - D, p + D], times exp(-(s - p)² / 2σ²), σ = D/2.

    scores (B, T, S), center p (B, T), `window` D, `mask` broadcasts to (B, T, S). Luong et al. 2015, eq. 10 (local-p).
    They do not sum to 1.
    """
    distance = jnp.arange(scores.shape[-1], dtype=jnp.float32)[None, None] - center[..., None]
    weights = attention_weights(scores, mask & (jnp.abs(distance) <= window))
    return weights * jnp.exp(-2 * (distance / window) ** 2)


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
    relations: Relations | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    dtype: str = "float32",
    return_weights: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V. Vaswani et al. 2017, eq. 1.

    query (B, T, N, H), key (B, S, N, H), value (B, S, N, H') → (B, T, N, H') and, on request, the weights
    (B, N, T, S) in float32 before dropout. `mask` and `bias` broadcast to (B, N, T, S). Dropout acts on the
    weights when a key is given; the paper has none there. `relations`: those of Shaw et al. 2018, eqs. 3 and 4. The
    products are computed in `dtype`.
    """
    scores = scaled_dot_product_scores(query, key, dtype)
    if bias is not None:
        scores = scores + bias
    if relations is not None:
        scores = scores + relative_scores(query, relations.key, key.shape[1], relations.position, dtype)
    weights = attention_weights(scores, mask)
    dropped = weights if dropout_key is None else dropout(weights, dropout_rate, dropout_key)
    output = einsum("BNTS,BSNH->BTNH", dropped, value, dtype)
    if relations is not None:
        output = output + relative_values(dropped, relations.value, relations.position, dtype)
    return (output, weights) if return_weights else output


def library_attention(
    query: Array, key: Array, value: Array, *, mask: Array | None, bias: Array | None, dtype: str
) -> Array:
    """The same as `dot_product_attention`, by `jax.nn.dot_product_attention`: values as wide as keys, no dropout, no
    weights out."""
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    bias = None if bias is None else bias.astype(dtype)
    output = jax.nn.dot_product_attention(query, key, value, bias, mask, implementation="xla")
    if mask is not None:  # where there is nothing to attend to it averages
        output = jnp.where(mask.any(axis=-1).swapaxes(1, 2)[..., None], output, 0)
    return output.astype(jnp.float32)


class KeyValue(NamedTuple):
    """What queries look at: keys (B, N, S, H) and values (B, N, S, H'). Kept between steps, it is the cache.

    The heads stand before the positions, as in the products that read them: else every step would copy the cache.
    """

    key: Array
    value: Array


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head₁ … head_N) W_O, head_i = Attention(Q W_Qⁱ, K W_Kⁱ, V W_Vⁱ). Section 3.2.2.

    Concatenation and W_O are one product with a kernel (N, H', D). `head_dim` is d_k, `value_dim` d_v; neither
    has to be D / N. The weights are sown as "weights" in the collection "intermediates". `positions`, for
    self-attention: "relative" (Shaw et al. 2018, up to `max_relative_distance`), "rotary" (Su et al. 2021) or "none".
    `implementation`: "einsum" is `dot_product_attention`; "xla" is `library_attention`, without dropout on the weights,
    which are not sown, and without "relative".

    Differs: the projections have biases (`use_bias`), of which the paper says nothing and its authors' code has none.
    """

    num_heads: int
    d_model: int
    head_dim: int
    value_dim: int
    use_bias: bool = True
    dropout_rate: float = 0.0
    dtype: str = "float32"
    positions: str = "none"
    max_relative_distance: int = 16
    implementation: str = "einsum"

    def setup(self) -> None:
        if self.implementation == "xla" and (self.dropout_rate or self.positions == "relative"):
            raise ValueError("implementation = 'xla' has no dropout on weights and no relative positions: use 'einsum'")

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
        if self.positions == "relative":
            self.relative = RelativePositions(self.max_relative_distance, self.head_dim, self.value_dim)

    def project(self, memory: Array, position: Array | int = 0, room: int | None = None) -> KeyValue:
        """(B, S, D) at positions position … position + S - 1, all below `room` → its keys and values."""
        key = self.key(memory)
        key = rotate(key, position, room) if self.positions == "rotary" else key
        heads = KeyValue(jnp.swapaxes(key, 1, 2), jnp.swapaxes(self.value(memory), 1, 2))
        return jax.tree.map(lambda x: constrain(x, "batch", "heads", "length", "head_dim"), heads)

    def empty_cache(self, batch_size: int, length: int) -> KeyValue:
        """Room for `length` positions."""
        shape = (batch_size, self.num_heads, length)
        empty = KeyValue(
            jnp.zeros((*shape, self.head_dim), self.dtype), jnp.zeros((*shape, self.value_dim), self.dtype)
        )
        return jax.tree.map(lambda x: constrain(x, "batch", "heads", "length", "head_dim"), empty)

    def extend(self, cache: KeyValue, x: Array, position: Array | int) -> KeyValue:
        """The cache with the keys and values of x (B, T, D) at positions position … position + T - 1."""

        def write(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, axis=2)

        return jax.tree.map(write, cache, self.project(x, position, cache.key.shape[2]))

    def __call__(
        self,
        x: Array,
        memory: Array | KeyValue,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        position: Array | int = 0,
    ) -> Array:
        """x (B, T, D) gives the queries, `memory` (B, S, D) or its projection the keys and values; → (B, T, D).

        Self-attention: `memory` is x itself, or a cache that holds x from `position` on.
        """
        projected = memory if isinstance(memory, KeyValue) else self.project(memory)
        key, value = (jnp.swapaxes(x, 1, 2) for x in projected)
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        if self.positions == "rotary":
            query = rotate(query, position, key.shape[1])
        if self.implementation == "xla":
            return self.output(library_attention(query, key, value, mask=mask, bias=bias, dtype=self.dtype))
        dropout_key = self.make_rng("dropout") if self.dropout_rate and self.has_rng("dropout") else None
        heads, weights = dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            relations=self.relative(position) if self.positions == "relative" else None,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            dtype=self.dtype,
            return_weights=True,
        )
        self.sow("intermediates", "weights", weights)
        return self.output(heads)
