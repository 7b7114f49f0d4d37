"""Attention (Vaswani et al. 2017, Section 3.2).

The pure functions come first, then `MultiHeadAttention`, the module that holds the
projections.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · K
key-value heads · H head width (d_k) · H' head width of values (d_v). Masks are boolean,
True where attention is allowed, and broadcast to (B, N, T, S).
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.models.caches import KeyValue
from transformer_jax.models.checks import (
    check_bias,
    check_mask,
    check_vectors,
    differ,
)
from transformer_jax.models.kernels.choose import Needs, kernel_for, unsupported
from transformer_jax.models.kernels.heads import repeat_heads
from transformer_jax.models.kernels.products import product, rounded_product
from transformer_jax.models.kernels.softmax import LOWEST, softmax_or_zeros
from transformer_jax.models.layers import Linear, RMSNorm, constrain, dropout
from transformer_jax.models.masks import ALL, Mask, as_mask
from transformer_jax.models.positions import (
    NOWHERE,
    UNSCALED,
    Places,
    Relations,
    RelativePositions,
    Scaling,
    make_places,
    relative_scores,
    relative_values,
    rotate,
)

Array = jax.Array
# (B, T), True at tokens and False at padding; None if there is no padding
Valid = Array | None


def scaled_dot_product_scores(
    query: Array,
    key: Array,
    dtype: str = "float32",
) -> Array:
    """Return Q Kᵀ / √d_k, the argument of the softmax in Vaswani et al. 2017, eq. 1.

    query (B, T, N, H), key (B, S, N, H) → (B, N, T, S), float32. d_k is H, the width of
    one head.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return product("BTNH,BSNH->BNTS", query, key, dtype)


# Scores for recurrent decoders: the decoder's state s, of width D, against the
# encoder's outputs h, of width C. There is one head, so scores have shape (B, T, S). A
# is the number of hidden units.


def additive_scores(
    query: Array,
    key: Array,
    v: Array,
) -> Array:
    """Return vᵀ tanh(W_a s + U_a h), the additive score of Bahdanau et al. 2015.

    This is the e of their eq. 6, in the form of Section A.1.2. query = W_a s (B, T, A),
    key = U_a h (B, S, A), v (A,) → (B, T, S). The caller computes W_a s and U_a h, so
    that U_a h can be computed once per sentence.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return product("BTSA,A->BTS", hidden, v)


def dot_scores(
    query: Array,
    key: Array,
    dtype: str = "float32",
) -> Array:
    """Return sᵀ h, the dot score of Luong et al. 2015, Section 3.1, under eq. 7.

    query s (B, T, D), key h (B, S, D) → (B, T, S). `scaled_dot_product_scores` also
    divides by √d_k (Vaswani et al. 2017).
    """
    return product("BTD,BSD->BTS", query, key, dtype)


def general_scores(
    query: Array,
    key: Array,
    w: Array,
    dtype: str = "float32",
) -> Array:
    """Return sᵀ W h, the general score of Luong et al. 2015, Section 3.1, under eq. 7.

    query s (B, T, D), key h (B, S, C), w (D, C) → (B, T, S).
    """
    return product("BTC,BSC->BTS", product("BTD,DC->BTC", query, w, dtype), key, dtype)


def attention_weights(scores: Array, mask: Array | None = None) -> Array:
    """Return the softmax of scores (B, N, T, S) over the keys.

    The weights of a query whose keys are all masked are zeros, not a uniform
    distribution.
    """
    if mask is None:
        return jax.nn.softmax(scores)
    check_mask("mask", mask, scores.shape)
    return softmax_or_zeros(scores + jnp.where(mask, 0.0, LOWEST))


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
    """Return Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V.

    Vaswani et al. 2017, eq. 1. query (B, T, N, H), key (B, S, N, H), value (B, S, N,
    H') → (B, T, N, H'), float32. `return_weights` adds the weights (B, N, T, S) before
    dropout, float32. `mask` and `bias` broadcast to (B, N, T, S). `relations` adds the
    relative positions of Shaw et al. 2018, eqs. 3 and 4. Products are computed in
    `dtype`.

    Differs: The paper has no bias and no dropout on the weights. Dropout acts only if
    `dropout_key` is given.
    """
    scores = scaled_dot_product_scores(query, key, dtype)
    if bias is not None:
        check_bias("bias", bias)
        scores = scores + bias
    if relations is not None:
        scores = scores + relative_scores(
            query, relations.key, relations.distances, dtype
        )
    weights = attention_weights(scores, mask)
    dropped = weights
    if dropout_key is not None:
        dropped = dropout(weights, dropout_rate, dropout_key)
    if relations is None:
        output = rounded_product("BNTS,BSNH->BTNH", dropped, value, dtype)
    else:
        output = product("BNTS,BSNH->BTNH", dropped, value, dtype)
        output = output + relative_values(
            dropped, relations.value, relations.distances, dtype
        )
    return (output, weights) if return_weights else output


def over_groups(
    attention: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
) -> tuple[Array, Array]:
    """Let G = N / K query heads share each key-value head, without copying it.

    Ainslie et al. 2023, Section 2.2. query (B, T, N, H), key (B, S, K, H), value (B, S,
    K, H') → output (B, T, N, H'), weights (B, N, T, S). Head n reads key-value head n
    // G. `attention` computes the same for N = K, without dropout: the G heads would
    drop the same weights.
    """
    rows, length, heads, width = query.shape
    query = query.reshape(rows, length, key.shape[2], -1, width)
    output, weights = jax.vmap(attention, in_axes=(3, None, None), out_axes=(3, 2))(
        query, key, value
    )
    output = output.reshape(rows, length, heads, -1)
    return output, weights.reshape(rows, heads, *weights.shape[3:])


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask = ALL,
    bias: Array | None = None,
    relations: Relations | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    dtype: str = "float32",
    how: str = "auto",
) -> tuple[Array, Array | None]:
    """Return what `dot_product_attention` returns, and the weights if it computed them.

    `how` names an implementation, see `kernels.choose`. Only the equation itself, which
    is "einsum", supports a bias, `relations` and arrays as masks, and returns weights.
    Key-value heads may be shared: key (B, S, K, H), value (B, S, K, H').
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    kernel = kernel_for(
        how,
        query,
        key,
        value,
        mask=mask,
        dropout_rate=rate,
        dtype=dtype,
        equation=dot_product_attention,
        adds_scores=bias is not None or relations is not None,
    )
    if kernel is not None:
        dropping: dict[str, Any] = {}
        if dropout_key is not None:
            dropping = {"dropout_rate": dropout_rate, "dropout_key": dropout_key}
        return kernel(query, key, value, mask=mask, dtype=dtype, **dropping), None
    equation: Callable[..., Any] = dot_product_attention
    return equation(
        query,
        repeat_heads(key, query.shape[2]),
        repeat_heads(value, query.shape[2]),
        mask=mask.whole(query.shape[1], key.shape[1]),
        bias=bias,
        relations=relations,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        dtype=dtype,
        return_weights=True,
    )


def attend_to_cache(
    query: Array, cache: KeyValue, **options: Any
) -> tuple[Array, Array | None]:
    """Return what `attend` returns for the keys and values of a cache, by the equation
    itself.

    `options` are those of `attend` without dropout. If key-value heads are shared,
    `mask` must be the same for all heads. They are copied only if there is a bias.
    """
    key, value = cache.heads()
    attention: Callable[..., Any] = functools.partial(attend, how="einsum", **options)
    if key.shape[2] == query.shape[2] or options.get("bias") is not None:
        return attention(query, key, value)
    return over_groups(attention, query, key, value)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head₁ … head_N) W_O.

    Here, head_i = Attention(Q W_Qⁱ, K W_Kⁱ, V W_Vⁱ). Vaswani et al. 2017, Section
    3.2.2. Concatenation and W_O are one product with a kernel (N, H', D). `head_dim` is
    d_k and `value_dim` is d_v; neither has to be D / N. The attention weights are sown
    as "weights" in the collection "intermediates".

    positions: "relative" (Shaw et al. 2018; distances are clipped to
        `max_relative_distance`), "relative_bias" (Raffel et al. 2020; all layers of a
        stack share the bias, so it comes with `places`), "rotary" (Su et al. 2021, with
        θ = `rotary_base` and `scaling`) or "none". Only self-attention may have
        positions.
    scale_scores: False: scores are not divided by √d_k. The initial W_Q is, instead
        (Raffel et al. 2020, in their code).
    num_kv_heads: K key-value heads, each shared by N / K adjacent query heads (Ainslie
        et al. 2023). 1 is multi-query attention (Shazeer 2019); 0 stands for N.
    output_bias: False: W_O has no bias, even if the other maps have.
    norm_epsilon: not 0: queries and keys of each head pass an RMS norm with this ε
        (Henry et al. 2020; Dehghani et al. 2023, Section 2), before they are rotated.
    implementation: how attention is computed, see `attend`. It is the equation itself
        where memory is a cache, and where weights are sown.

    Differs: The projections have biases, unless `use_bias` is False. The paper does not
    mention biases, and the authors' code has none.

    Raises:
        ValueError: An option or a length is not supported by `implementation`,
            `implementation` does not run on this platform, or K does not divide N.
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
    num_kv_heads: int = 0
    rotary_base: float = 10000.0
    init_scale: float = 1.0  # factor of the initial W_O
    scale_scores: bool = True
    scaling: Scaling = UNSCALED
    output_bias: bool = True
    norm_epsilon: float = 0.0

    @property
    def kv_heads(self) -> int:
        """K, the number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    def setup(self) -> None:
        self._check_options()
        kv_axis = "heads" if self.kv_heads == self.num_heads else "kv_heads"
        options: dict[str, Any] = {
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "initializer": self.initializer,
            "output_dtype": self.dtype,
        }
        self.query = Linear(
            "BTD,DNH->BTNH",
            (self.d_model, self.num_heads, self.head_dim),
            ("embed", "heads", "head_dim"),
            init_scale=1.0 if self.scale_scores else self.head_dim**-0.5,
            **options,
        )
        self.key = Linear(
            "BSD,DKH->BSKH",
            (self.d_model, self.kv_heads, self.head_dim),
            ("embed", kv_axis, "head_dim"),
            **options,
        )
        self.value = Linear(
            "BSD,DKH->BSKH",
            (self.d_model, self.kv_heads, self.value_dim),
            ("embed", kv_axis, "head_dim"),
            **options,
        )
        self.output = Linear(
            "BTNH,NHD->BTD",
            (self.num_heads, self.value_dim, self.d_model),
            ("heads", "head_dim", "embed"),
            init_scale=self.init_scale,
            **options | {"use_bias": self.use_bias and self.output_bias},
        )
        if self.norm_epsilon:
            self.query_norm = RMSNorm(self.norm_epsilon)
            self.key_norm = RMSNorm(self.norm_epsilon)
        if self.positions == "relative":
            self.relative = RelativePositions(
                self.max_relative_distance, self.head_dim, self.value_dim
            )

    def __call__(
        self,
        x: Array,
        memory: Array | KeyValue,
        *,
        mask: Array | Mask | None = None,
        bias: Array | None = None,
        places: Places | None = None,
    ) -> Array:
        """Attend from x (B, T, D) to `memory` → (B, T, D).

        `memory` is (B, S, D), or a cache of its projection, without dropout on the
        weights. In self-attention, it is x itself or a cache that contains x.

        places: where the queries and keys are, if there are positions. The default is
            0 … T - 1 for both.
        mask: If key-value heads are shared and `memory` is a cache, it must be the same
            for all heads.
        bias: is added to the scores; it broadcasts to (B, N, T, S).
        """
        allowed = self._checked(x, memory, mask)
        if places is None:
            places = self._own_places(x, memory)
        relations = None
        if places.distances is not None:
            relations = self.relative(places.distances)
        if places.bias is not None:
            bias = places.bias if bias is None else bias + places.bias
        options: dict[str, Any] = {
            "mask": allowed,
            "bias": bias,
            "relations": relations,
            "dtype": self.dtype,
        }
        if isinstance(memory, KeyValue):
            query = self._queries(x, places)
            heads, weights = attend_to_cache(query, memory, **options)
        else:
            # before the queries, which is faster: see docs/log.md, 2026-11-27
            key, value = self.heads(memory, places)
            query = self._queries(x, places)
            if self.dropout_rate and self.has_rng("dropout"):
                options["dropout_rate"] = self.dropout_rate
                options["dropout_key"] = self.make_rng("dropout")
            heads, weights = attend(query, key, value, how=self._how, **options)
        if weights is not None:
            self.sow("intermediates", "weights", weights)
        return self.output(heads)

    def _queries(self, x: Array, places: Places) -> Array:
        """Project x (B, T, D) to queries (B, T, N, H)."""
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        if self.norm_epsilon:
            query = self.query_norm(query).astype(query.dtype)
        if places.waves is not None:
            query = rotate(query, places.waves)
        if not self.scale_scores:
            # every implementation of attention divides by it
            query = query * jnp.asarray(self.head_dim**0.5, query.dtype)
        return query

    def heads(self, memory: Array, places: Places = NOWHERE) -> tuple[Array, Array]:
        """Project memory (B, S, D) to keys (B, S, K, H) and values (B, S, K, H')."""
        key = self.key(memory)
        if self.norm_epsilon:
            key = self.key_norm(key).astype(key.dtype)
        if places.waves is not None:
            key = rotate(key, places.waves)
        return self._constrained(key), self._constrained(self.value(memory))

    def project(self, memory: Array, places: Places = NOWHERE) -> KeyValue:
        """Return a cache of the keys and values of memory (B, S, D)."""
        return KeyValue.of_heads(*self.heads(memory, places))

    def empty_cache(self, batch_size: int, length: int) -> KeyValue:
        """Return a cache with room for `length` positions."""
        shape = (batch_size, length, self.kv_heads)
        key = jnp.zeros((*shape, self.head_dim), self.dtype)
        value = jnp.zeros((*shape, self.value_dim), self.dtype)
        return KeyValue.of_heads(self._constrained(key), self._constrained(value))

    @nn.nowrap
    def _own_places(self, x: Array, memory: Array | KeyValue) -> Places:
        """Return the places of self-attention without a cache: 0 … T - 1.

        Raises:
            UserError: There are positions, and this is not self-attention of that kind.
        """
        if self.positions == "none":
            return NOWHERE
        length = x.shape[1]
        if self.positions == "relative_bias":
            raise UserError(
                "positions = 'relative_bias': need `places`, because the bias belongs "
                "to the stack; pass Places(bias=…), or use positions = 'none'"
            )
        if isinstance(memory, KeyValue) or differ(memory.shape[1], length):
            raise UserError(
                f"positions = {self.positions!r}: need `places` where memory is not x "
                "itself; pass positions.make_places(…), or use positions = 'none'"
            )
        positions = np.arange(length) if isinstance(length, int) else jnp.arange(length)
        return make_places(
            self.positions,
            positions,
            positions,
            length,
            head_dim=self.head_dim,
            rotary_base=self.rotary_base,
            max_distance=self.max_relative_distance,
            scaling=self.scaling,
        )

    @nn.nowrap
    def _constrained(self, heads: Array) -> Array:
        """Constrain the sharding of keys or values (B, S, K, H) that no heads share.

        Devices that have a part of the heads each may not divide their number.
        """
        if self.kv_heads != self.num_heads:
            return heads
        return constrain(heads, "batch", "length", "heads", "head_dim")

    @property
    def _how(self) -> str:
        """The implementation. Only the equation itself has weights that can be sown.

        Parameters are the same with all implementations, and they may be initialized on
        another platform.
        """
        if self.is_initializing() or self.is_mutable_collection("intermediates"):
            return "einsum"
        return self.implementation

    def _checked(
        self,
        x: Array,
        memory: Array | KeyValue,
        mask: Array | Mask | None,
    ) -> Mask:
        """Return the mask. Raise UserError if an argument has a wrong shape or type."""
        check_vectors("x", x, self.d_model)
        if isinstance(memory, KeyValue):
            length = memory.room
        else:
            check_vectors("memory", memory, self.d_model)
            length = memory.shape[1]
        rules = as_mask(mask)
        name = f"the mask of {self.name}" if self.name else "mask"
        rules.check(name, x.shape[0], self.num_heads, x.shape[1], length)
        return rules

    def _check_options(self) -> None:
        """Raise UserError if options of this module do not fit together."""
        needs = Needs(
            self.dropout_rate,
            self.positions,
            self.dtype,
            self.head_dim,
            self.value_dim,
        )
        for name, remedy in unsupported(self.implementation, needs):
            raise UserError(
                f"implementation = {self.implementation!r}: does not support this "
                f"value of {name}; set it to {remedy}, or use 'einsum'"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"num_kv_heads = {self.num_kv_heads}: must divide num_heads = "
                f"{self.num_heads}; 0 stands for num_heads"
            )
