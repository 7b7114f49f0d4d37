"""Attention (Vaswani et al. 2017, Section 3.2): pure functions first, then the module that owns the projections.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H width of a head (d_k, or d_v for
values). Masks are boolean, True = may attend, and broadcast to (B, N, T, S).
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.layers import Linear, constrain, dropout
from transformer_jax.models.numerics import product
from transformer_jax.models.positions import Relations, RelativePositions, relative_scores, relative_values, rotate

Array = jax.Array
Valid = Array | None  # (B, T), True at tokens and False at padding; None: there is no padding


def padding_mask(valid: Array) -> Array:
    """Hide padding from every query: valid (B, S), True at tokens → (B, 1, 1, S)."""
    return valid.astype(bool)[:, None, None, :]


def causal_mask(length: int, key_length: int | None = None, offset: Array | int = 0) -> Array:
    """Let the query at position offset + t attend to the keys at positions 0 … offset + t: (1, 1, T, S)."""
    queries = offset + jnp.arange(length)[:, None]
    keys = jnp.arange(length if key_length is None else key_length)[None, :]
    return (keys <= queries)[None, None]


def segment_mask(query_segments: Array, key_segments: Array) -> Array:
    """Allow attention within a segment only, and none in segment 0, padding: (B, T), (B, S) → (B, 1, T, S)."""
    queries, keys = query_segments[:, None, :, None], key_segments[:, None, None, :]
    return (queries == keys) & (queries > 0)


def combine_masks(*masks: Array | None) -> Array | None:
    """Return the logical and of the masks that are not None; None if all are."""
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
    return product("BTNH,BSNH->BNTS", query, key, dtype)


# Scores of a recurrent decoder's state s (width D) against the encoder's outputs h (width C), with one head: (B, T, S).
# A is the number of hidden units.


def additive_scores(query: Array, key: Array, v: Array) -> Array:
    """vᵀ tanh(W_a s + U_a h): query = W_a s (B, T, A), key = U_a h (B, S, A), v (A,) → (B, T, S).

    Bahdanau et al. 2015, e of eq. 6, in the form of Section A.1.2. The caller computes W_a s and U_a h, because the
    keys are projected once per sentence.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return product("BTSA,A->BTS", hidden, v)


def concat_scores(query: Array, key: Array, w: Array, v: Array) -> Array:
    """vᵀ tanh(W [s; h]): query s (B, T, D), key h (B, S, C), w (D + C, A), v (A,) → (B, T, S).

    Luong et al. 2015, Section 3.1, under eq. 7. [s; h] W = s W₁ + h W₂ with W₁ above W₂ in W, so this is computed
    by `additive_scores`.
    """
    above, below = w[: query.shape[-1]], w[query.shape[-1] :]
    return additive_scores(product("BTD,DA->BTA", query, above), product("BSC,CA->BSA", key, below), v)


def dot_scores(query: Array, key: Array, dtype: str = "float32") -> Array:
    """sᵀ h: query (B, T, D), key (B, S, D) → (B, T, S). Luong et al. 2015, Section 3.1, under eq. 7.

    `scaled_dot_product_scores` also divides by √d_k (Vaswani et al. 2017).
    """
    return product("BTD,BSD->BTS", query, key, dtype)


def general_scores(query: Array, key: Array, w: Array, dtype: str = "float32") -> Array:
    """sᵀ W h: query (B, T, D), key (B, S, C), w (D, C) → (B, T, S). Luong et al. 2015, Section 3.1, under eq. 7."""
    return product("BTC,BSC->BTS", product("BTD,DC->BTC", query, w, dtype), key, dtype)


def attention_weights(scores: Array, mask: Array | None = None) -> Array:
    """Apply softmax over the keys, (B, N, T, S). A query with nothing to attend to gets zeros, not an average."""
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
    weights when a key is given; the paper has none there. `relations` are those of Shaw et al. 2018, eqs. 3 and 4.
    Products are computed in `dtype`.
    """
    scores = scaled_dot_product_scores(query, key, dtype)
    if bias is not None:
        scores = scores + bias
    if relations is not None:
        scores = scores + relative_scores(query, relations.key, key.shape[1], relations.position, dtype)
    weights = attention_weights(scores, mask)
    dropped = weights if dropout_key is None else dropout(weights, dropout_rate, dropout_key)
    output = product("BNTS,BSNH->BTNH", dropped, value, dtype)
    if relations is not None:
        output = output + relative_values(dropped, relations.value, relations.position, dtype)
    return (output, weights) if return_weights else output


def library_attention(
    query: Array, key: Array, value: Array, *, mask: Array | None, bias: Array | None, dtype: str
) -> Array:
    """Compute `dot_product_attention` by jax's own function. Values must be as wide as keys; it has no dropout."""
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    bias = None if bias is None else bias.astype(dtype)
    output = jax.nn.dot_product_attention(query, key, value, bias, mask, implementation="xla")
    if mask is not None:  # jax averages all values where there is nothing to attend to
        output = jnp.where(mask.any(axis=-1).swapaxes(1, 2)[..., None], output, 0)
    return output.astype(jnp.float32)


class KeyValue(NamedTuple):
    """Keys (B, N, S, H) and values (B, N, S, H'): the cache of attention, when kept between steps.

    Heads come before positions, as in the products that read them; otherwise every step would copy the cache.
    """

    key: Array
    value: Array


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head₁ … head_N) W_O, head_i = Attention(Q W_Qⁱ, K W_Kⁱ, V W_Vⁱ). Section 3.2.2.

    Concatenation and W_O are one product with a kernel (N, H', D). `head_dim` is d_k, `value_dim` d_v; neither
    has to be D / N. The weights are sown as "weights" in the collection "intermediates".

    positions: of self-attention: "relative" (Shaw et al. 2018, up to `max_relative_distance`), "rotary" (Su et al.
        2021) or "none".
    implementation: "einsum" is `dot_product_attention`; "jax" is `library_attention`, which has no dropout on the
        weights, does not sow them, and has no "relative".

    Differs: the projections have biases (`use_bias`). The paper mentions none and its authors' code has none.
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
    initializer: str = "xavier_uniform"

    def setup(self) -> None:
        if self.implementation == "jax" and (self.dropout_rate or self.positions == "relative"):
            raise ValueError("implementation = 'jax' has no dropout on weights and no relative positions: use 'einsum'")

        options: dict[str, Any] = {"use_bias": self.use_bias, "dtype": self.dtype, "initializer": self.initializer}

        def to_heads(width: int) -> Linear:
            return Linear((self.d_model, self.num_heads, width), ("embed", "heads", "head_dim"), **options)

        self.query = to_heads(self.head_dim)
        self.key = to_heads(self.head_dim)
        self.value = to_heads(self.value_dim)
        self.output = Linear(
            (self.num_heads, self.value_dim, self.d_model),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            **options,
        )
        if self.positions == "relative":
            self.relative = RelativePositions(self.max_relative_distance, self.head_dim, self.value_dim)

    def project(self, memory: Array, position: Array | int = 0, room: int | None = None) -> KeyValue:
        """Project memory (B, S, D) at positions position … position + S - 1, all below `room`, to keys and values."""
        key = self.key(memory)
        key = rotate(key, position, room) if self.positions == "rotary" else key
        heads = KeyValue(jnp.swapaxes(key, 1, 2), jnp.swapaxes(self.value(memory), 1, 2))
        return jax.tree.map(lambda x: constrain(x, "batch", "heads", "length", "head_dim"), heads)

    def empty_cache(self, batch_size: int, length: int) -> KeyValue:
        """Return a cache with room for `length` positions."""
        shape = (batch_size, self.num_heads, length)
        empty = KeyValue(
            jnp.zeros((*shape, self.head_dim), self.dtype), jnp.zeros((*shape, self.value_dim), self.dtype)
        )
        return jax.tree.map(lambda x: constrain(x, "batch", "heads", "length", "head_dim"), empty)

    def extend(self, cache: KeyValue, x: Array, position: Array | int) -> KeyValue:
        """Write the keys and values of x (B, T, D) at positions position … position + T - 1 to the cache."""

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
        """Let x (B, T, D) attend to `memory` (B, S, D) or its projection → (B, T, D).

        In self-attention `memory` is x itself, or a cache that holds x from `position` on.
        """
        projected = memory if isinstance(memory, KeyValue) else self.project(memory)
        key, value = (jnp.swapaxes(x, 1, 2) for x in projected)
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        if self.positions == "rotary":
            query = rotate(query, position, key.shape[1])
        if self.implementation == "jax":
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
