"""Attention (Vaswani et al. 2017, Section 3.2).

The pure functions come first, then `MultiHeadAttention`, the module that holds the
projections.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · K
key-value heads · H head width (d_k) · H' head width of values (d_v). Masks are boolean,
True where attention is allowed, and broadcast to (B, N, T, S).
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

from transformer_jax.errors import UserError
from transformer_jax.models import short
from transformer_jax.models.blocked import blocked_attention
from transformer_jax.models.checks import (
    check_bias,
    check_boolean,
    check_mask,
    check_valid,
    check_vectors,
)
from transformer_jax.models.kernels import (
    cudnn_attention,
    cudnn_runs_here,
    short_attention,
    splash_attention,
)
from transformer_jax.models.layers import Linear, constrain, dropout
from transformer_jax.models.masks import Mask
from transformer_jax.models.numerics import platform, product, stored
from transformer_jax.models.positions import (
    Relations,
    RelativePositions,
    relative_scores,
    relative_values,
    rotate,
)

log = logging.getLogger(__name__)

Array = jax.Array
# (B, T), True at tokens and False at padding; None if there is no padding
Valid = Array | None


def padding_mask(valid: Array) -> Array:
    """Return the mask (B, 1, 1, S) that hides padding from every query.

    `valid` (B, S) is True at tokens.
    """
    check_valid("valid", valid)
    return valid.astype(bool)[:, None, None, :]


def causal_mask(
    length: int, key_length: int | None = None, offset: Array | int = 0
) -> Array:
    """Return the causal mask (1, 1, T, S) of queries from position `offset` on.

    The query at position offset + t may attend to keys 0 … offset + t. T is `length`; S
    is `key_length`, by default T.
    """
    queries = offset + jnp.arange(length)[:, None]
    keys = jnp.arange(length if key_length is None else key_length)[None, :]
    return (keys <= queries)[None, None]


def combine_masks(*masks: Array | None) -> Array | None:
    """Return the logical AND of the masks that are not None; None if all are None."""
    combined = None
    for mask in masks:
        if mask is not None:
            check_boolean("mask", mask, "must be boolean")
            combined = mask if combined is None else combined & mask
    return combined


def scaled_dot_product_scores(
    query: Array, key: Array, dtype: str = "float32"
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


def additive_scores(query: Array, key: Array, v: Array) -> Array:
    """Return vᵀ tanh(W_a s + U_a h), the additive score of Bahdanau et al. 2015.

    This is the e of their eq. 6, in the form of Section A.1.2. query = W_a s (B, T, A),
    key = U_a h (B, S, A), v (A,) → (B, T, S). The caller computes W_a s and U_a h, so
    that U_a h can be computed once per sentence.
    """
    hidden = jnp.tanh(query[:, :, None] + key[:, None])
    return product("BTSA,A->BTS", hidden, v)


def concat_scores(query: Array, key: Array, w: Array, v: Array) -> Array:
    """Return vᵀ tanh(W [s; h]), the concat score of Luong et al. 2015.

    It is in Section 3.1, under eq. 7. query s (B, T, D), key h (B, S, C), w (D + C, A),
    v (A,) → (B, T, S). The first D rows of w multiply s and the others multiply h, so
    `additive_scores` computes the rest.
    """
    above, below = w[: query.shape[-1]], w[query.shape[-1] :]
    return additive_scores(
        product("BTD,DA->BTA", query, above), product("BSC,CA->BSA", key, below), v
    )


def dot_scores(query: Array, key: Array, dtype: str = "float32") -> Array:
    """Return sᵀ h, the dot score of Luong et al. 2015, Section 3.1, under eq. 7.

    query s (B, T, D), key h (B, S, D) → (B, T, S). `scaled_dot_product_scores` also
    divides by √d_k (Vaswani et al. 2017).
    """
    return product("BTD,BSD->BTS", query, key, dtype)


def general_scores(query: Array, key: Array, w: Array, dtype: str = "float32") -> Array:
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
    """Return Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V.

    Vaswani et al. 2017, eq. 1. query (B, T, N, H), key (B, S, N, H), value (B, S, N,
    H') → (B, T, N, H'), float32. `return_weights` adds the weights (B, N, T, S) before
    dropout, float32. `mask` and `bias` broadcast to (B, N, T, S). `relations` adds the
    relative positions of Shaw et al. 2018, eqs. 3 and 4. Products are computed in
    `dtype`. On accelerators, the product with the values is rounded to it if there are
    no `relations`; the type of the result is still float32.

    Differs: The paper has no bias and no dropout on the weights. Dropout acts only if
    `dropout_key` is given.
    """
    scores = scaled_dot_product_scores(query, key, dtype)
    if bias is not None:
        check_bias("bias", bias)
        scores = scores + bias
    if relations is not None:
        scores = scores + relative_scores(
            query,
            relations.key,
            key.shape[1],
            relations.position,
            dtype,
            relations.beams,
        )
    weights = attention_weights(scores, mask)
    dropped = (
        weights if dropout_key is None else dropout(weights, dropout_rate, dropout_key)
    )
    rounded = stored(dtype) if relations is None else "float32"
    output = product(
        "BNTS,BSNH->BTNH", dropped, value, dtype, output_dtype=rounded
    ).astype(jnp.float32)
    if relations is not None:
        output = output + relative_values(
            dropped, relations.value, relations.position, dtype, relations.beams
        )
    return (output, weights) if return_weights else output


def library_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None,
    bias: Array | None,
    dtype: str,
) -> Array:
    """Compute `dot_product_attention` with `jax.nn.dot_product_attention`.

    There is no dropout, and values must be as wide as keys. `bias` is rounded to
    `dtype`.
    """
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    bias = None if bias is None else bias.astype(dtype)
    if mask is not None:
        check_mask(
            "mask", mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        )
        mask = jnp.asarray(mask, bool)
    output = jax.nn.dot_product_attention(
        query, key, value, bias, mask, implementation="xla"
    )
    # where all keys are masked, JAX returns the average of the values
    if mask is not None:
        output = jnp.where(mask.any(axis=-1).swapaxes(1, 2)[..., None], output, 0)
    return output.astype(jnp.float32)


def over_groups(
    attend: Callable[..., Any], query: Array, key: Array, value: Array
) -> tuple[Array, Array]:
    """Let G = N / K query heads share each key-value head, without copying it.

    Ainslie et al. 2023, Section 2.2. query (B, T, N, H), key (B, S, K, H), value (B, S,
    K, H') → output (B, T, N, H'), weights (B, N, T, S). Head n reads key-value head n
    // G. `attend` computes the same for N = K, without dropout: the G heads would drop
    the same weights.
    """
    rows, length, heads, width = query.shape
    query = query.reshape(rows, length, key.shape[2], -1, width)
    output, weights = jax.vmap(attend, in_axes=(3, None, None), out_axes=(3, 2))(
        query, key, value
    )
    return output.reshape(rows, length, heads, -1), weights.reshape(
        rows, heads, *weights.shape[3:]
    )


IMPLEMENTATIONS = ("auto", "einsum", "blocked", "short", "splash", "cudnn", "jax")
FUNCTIONS: dict[str, Callable[..., Array]] = {
    "blocked": blocked_attention,
    "short": short_attention,
    "splash": splash_attention,
    "cudnn": cudnn_attention,
}
# The kernels of a platform, and for which lengths "auto" chooses them: the least number
# of queries and of keys, and the most. It takes the first one that supports the call.
# Compiled for a v5e, with 8,192 tokens, 16 heads of 64 and bfloat16, attention and its
# projections take 3.0 ms forward and backward with einsum at length 128, 4.4 ms at 256
# and 10.9 ms at 1,024, by the compiler's estimates. With splash, it takes 3.7, 3.4 and
# 3.8 ms, if each step of the kernel's grid takes 0.35 µs, for which there is no
# estimate. The kernel of short takes 0.2 ms at 128 and 0.8 ms at 512, by the compiler's
# profile, and the products of the projections 1.0 ms. Nothing was measured on a TPU. On
# a GPU (H200), the kernel of cudnn is 1.9 times as fast as einsum at length 128 and 4.6
# times at 2,048. At 64, it is 1.1 times as fast, which the step of wmt14.py:big does
# not show, and at 32 it is slower.
CUDNN = {"cudnn": (128, math.inf)}
KERNELS = {
    "tpu": {"short": (16, short.LONGEST), "splash": (256, math.inf)},
    "gpu": CUDNN,
    "cuda": CUDNN,
}
# Without a kernel, it chooses "blocked" from this many positions on. On accelerators,
# blocks are only worth the memory they save.
BLOCKED_FROM = {"cpu": 192}
BLOCKED_FROM_ELSEWHERE = 2048


def unsupported(
    implementation: str,
    dropout_rate: float,
    positions: str,
    dtype: str,
    head_dim: int,
    value_dim: int,
) -> Iterator[tuple[str, str]]:
    """Yield (key of `BlockConfig`, remedy) of options that `implementation` lacks."""
    if implementation not in ("short", "splash", "cudnn", "jax"):
        return
    if dropout_rate and implementation != "short":
        yield "attention_dropout_rate", "0"
    if positions == "relative":
        yield "positions", "another value"
    if value_dim != head_dim and implementation != "splash":
        yield "value_dim", f"head_dim = {head_dim}"
    if implementation == "short" and not short.supports(head_dim):
        yield "head_dim", "a divisor of 128, or a multiple of it"
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if (
        implementation == "splash"
        and dtype == "bfloat16"
        and precision not in (None, "default", "bfloat16")
    ):
        # with which it does not compile
        yield "dtype", f"'float32', as jax_default_matmul_precision is {precision!r}"
    if implementation == "cudnn":
        if dtype != "bfloat16":
            yield "dtype", "'bfloat16'"
        if head_dim % 8 or head_dim > 128:
            yield "head_dim", "a multiple of 8, at most 128"


@functools.cache
def choose(
    length: int, key_length: int, backend: str, obstacles: tuple[str, ...] = ()
) -> str:
    """Return the implementation that "auto" stands for, and log why.

    Nothing is logged for one query.

    obstacles: what each kernel of the backend does not support, "" if it supports the
        call.
    """
    limits, blocked_from = (
        KERNELS.get(backend, {}),
        BLOCKED_FROM.get(backend, BLOCKED_FROM_ELSEWHERE),
    )
    missing = dict(zip(limits, obstacles, strict=True))
    usable = {name: limits[name] for name in limits if not missing[name]}
    fewest, most = sorted((length, key_length))
    reasons = "".join(
        f"; {name} does not support {obstacle}"
        for name, obstacle in missing.items()
        if obstacle
    )
    name = next(
        (
            name
            for name, (least, limit) in usable.items()
            if least <= fewest and most <= limit
        ),
        "",
    )
    if name:
        least, limit = usable[name]
        rule, reasons = (
            f"at least {least}" if limit == math.inf else f"{least} to {limit}",
            "",
        )
    elif most >= blocked_from:
        name, rule = "blocked", f"at least {blocked_from}"
    else:
        least = min(
            (least for least, limit in usable.values() if most <= limit),
            default=blocked_from,
        )
        name, rule = "einsum", f"fewer than {least}"
    if length > 1 and (name != "einsum" or limits):
        _log_choice(name, rule, f"{backend}{reasons}")
    return name


@functools.cache
def _log_choice(name: str, rule: str, where: str) -> None:
    """Log a choice once, for the first of all the lengths that it holds for."""
    log.info("attention: %s, as there are %s positions (%s)", name, rule, where)


class KeyValue(NamedTuple):
    """Projected keys (B, K, S, H) and values (B, K, S, H').

    Decoding keeps them between steps, as its cache.

    The head axis comes before the position axis because the products that read the
    cache use this order. With any other order, every step would copy the cache.
    """

    key: Array
    value: Array


export.register_namedtuple_serialization(
    KeyValue, serialized_name="transformer_jax.KeyValue"
)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head₁ … head_N) W_O.

    Here, head_i = Attention(Q W_Qⁱ, K W_Kⁱ, V W_Vⁱ). Vaswani et al. 2017, Section
    3.2.2. Concatenation and W_O are one product with a kernel (N, H', D). `head_dim` is
    d_k and `value_dim` is d_v; neither has to be D / N. The attention weights are sown
    as "weights" in the collection "intermediates".

    positions: "relative" (Shaw et al. 2018; distances are clipped to
        `max_relative_distance`), "rotary" (Su et al. 2021, with θ = `rotary_base`) or
        "none". Only self-attention may have positions.
    num_kv_heads: K key-value heads, each shared by N / K adjacent query heads (Ainslie
        et al. 2023). 1 is multi-query attention (Shazeer 2019); 0 stands for N.
    implementation: "einsum" is `dot_product_attention`, the reference. "blocked" is
        `blocked_attention`, whose memory does not grow with T × S. "short" is
        `short_attention` and "splash" is `splash_attention`, both for TPUs; "cudnn" is
        `cudnn_attention`, for NVIDIA GPUs, and needs bfloat16. "jax" is
        `library_attention`. The last three do not support dropout on the weights. Only
        "einsum" supports "relative" positions and sows the weights. "auto" is a kernel
        of the platform if one supports the call and the lengths, or else "blocked" for
        long sequences and "einsum" for short ones. Where weights are sown, where memory
        is a cache, and where there is a bias or "relative" positions, all but "jax" use
        "einsum".

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

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def setup(self) -> None:
        for name, remedy in self._unsupported(self.implementation, self.dropout_rate):
            given = f"implementation = {self.implementation!r}"
            raise UserError(
                f"{given}: does not support this value of {name}; "
                f"set it to {remedy}, or use 'einsum'"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"num_kv_heads = {self.num_kv_heads}: "
                f"must divide num_heads = {self.num_heads}; 0 stands for num_heads"
            )

        options: dict[str, Any] = {
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "initializer": self.initializer,
            "output_dtype": self.dtype,
        }

        def to_heads(heads: int, width: int) -> Linear:
            axis = "heads" if heads == self.num_heads else "kv_heads"
            return Linear(
                (self.d_model, heads, width), ("embed", axis, "head_dim"), **options
            )

        self.query = to_heads(self.num_heads, self.head_dim)
        self.key = to_heads(self.kv_heads, self.head_dim)
        self.value = to_heads(self.kv_heads, self.value_dim)
        self.output = Linear(
            (self.num_heads, self.value_dim, self.d_model),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            init_scale=self.init_scale,
            **options,
        )
        if self.positions == "relative":
            self.relative = RelativePositions(
                self.max_relative_distance, self.head_dim, self.value_dim
            )

    def project(
        self,
        memory: Array,
        position: Array | int = 0,
        room: int | None = None,
        beams: int = 1,
    ) -> KeyValue:
        """Project memory (B, S, D) to keys and values.

        The positions of memory are position … position + S - 1. Rotary positions must
        be below `room`, by default S. With `beams`, so many adjacent entries share a
        position.
        """
        key = self.key(memory)
        key = (
            rotate(key, position, room, self.rotary_base, beams)
            if self.positions == "rotary"
            else key
        )
        return self._placed(
            KeyValue(jnp.swapaxes(key, 1, 2), jnp.swapaxes(self.value(memory), 1, 2))
        )

    def empty_cache(self, batch_size: int, length: int) -> KeyValue:
        """Return a cache with room for `length` positions."""
        shape = (batch_size, self.kv_heads, length)
        key, value = (
            jnp.zeros((*shape, width), self.dtype)
            for width in (self.head_dim, self.value_dim)
        )
        return self._placed(KeyValue(key, value))

    def _placed(self, heads: KeyValue) -> KeyValue:
        """Constrain the sharding, except of shared heads.

        Tensor devices may not divide their number.
        """
        if self.kv_heads != self.num_heads:
            return heads
        return jax.tree.map(
            lambda x: constrain(x, "batch", "heads", "length", "head_dim"), heads
        )

    def extend(
        self, cache: KeyValue, x: Array, position: Array | int, beams: int = 1
    ) -> KeyValue:
        """Return the cache with the keys and values of x (B, T, D).

        The positions of x are position … position + T - 1. With `beams`, so many
        adjacent entries of x, and of the cache, share a position.
        """

        def write(old: Array, new: Array) -> Array:
            new = new.astype(old.dtype)
            # for decoding.generation, which keeps such a cache without its first axis
            if old.shape[0] == 1:
                return jax.lax.dynamic_update_slice_in_dim(
                    old[0], new[0], position * beams, axis=1
                )[None]
            return jax.lax.dynamic_update_slice_in_dim(
                old, new, position * beams, axis=2
            )

        return jax.tree.map(
            write, cache, self.project(x, position, cache.key.shape[2] // beams, beams)
        )

    def __call__(
        self,
        x: Array,
        memory: Array | KeyValue,
        *,
        mask: Array | Mask | None = None,
        bias: Array | None = None,
        position: Array | int = 0,
        beams: int = 1,
    ) -> Array:
        """Attend from x (B, T, D) to `memory` → (B, T, D).

        `memory` is (B, S, D) or its projection. In self-attention, `memory` is x itself
        or a cache that contains x, starting at `position`. With `beams`, so many
        adjacent entries of x, and of the cache, share a position. If key-value heads
        are shared and `memory` is a projection, `mask` and `bias` must be the same for
        all heads.
        """
        self._check(x, memory, mask)
        projected = memory if isinstance(memory, KeyValue) else self.project(memory)
        key, value = (jnp.swapaxes(x, 1, 2) for x in projected)
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        if self.positions == "rotary":
            query = rotate(
                query, position, key.shape[1] // beams, self.rotary_base, beams
            )
        groups = self.num_heads // self.kv_heads
        dropout_key = (
            self.make_rng("dropout")
            if self.dropout_rate and self.has_rng("dropout")
            else None
        )
        implementation = self._implementation(
            mask, bias, query.shape[1], key.shape[1], dropout_key is not None
        )
        if implementation in FUNCTIONS and not isinstance(mask, Array):
            if implementation == "blocked" and groups > 1:
                key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
            dropping = (
                {}
                if dropout_key is None
                else {"dropout_rate": self.dropout_rate, "dropout_key": dropout_key}
            )
            return self.output(
                FUNCTIONS[implementation](
                    query, key, value, mask=mask, dtype=self.dtype, **dropping
                )
            )
        if isinstance(mask, Mask):
            mask = mask.part(0, query.shape[1], 0, key.shape[1])
        if implementation == "jax":
            return self.output(
                library_attention(
                    query, key, value, mask=mask, bias=bias, dtype=self.dtype
                )
            )
        attend: Callable[..., Any] = functools.partial(
            dot_product_attention,
            mask=mask,
            bias=bias,
            relations=(
                self.relative(position, beams) if self.positions == "relative" else None
            ),
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            dtype=self.dtype,
            return_weights=True,
        )
        if groups == 1:
            heads, weights = attend(query, key, value)
        elif isinstance(memory, KeyValue) and dropout_key is None:
            heads, weights = over_groups(attend, query, key, value)
        else:
            heads, weights = attend(
                query, *(jnp.repeat(x, groups, axis=2) for x in (key, value))
            )
        self.sow("intermediates", "weights", weights)
        return self.output(heads)

    def _check(
        self, x: Array, memory: Array | KeyValue, mask: Array | Mask | None
    ) -> None:
        """Raise UserError if an argument of `__call__` has a wrong shape or type."""
        name = f"the mask of {self.name}" if self.name else "mask"
        check_vectors("x", x, self.d_model)
        if isinstance(memory, KeyValue):
            length = memory.key.shape[2]
        else:
            check_vectors("memory", memory, self.d_model)
            length = memory.shape[1]
        if isinstance(mask, Mask):
            mask.check(name, x.shape[0], x.shape[1], length)
        elif mask is not None:
            check_mask(name, mask, (x.shape[0], self.num_heads, x.shape[1], length))

    def _unsupported(
        self, implementation: str, dropout_rate: float
    ) -> Iterator[tuple[str, str]]:
        return unsupported(
            implementation,
            dropout_rate,
            self.positions,
            self.dtype,
            self.head_dim,
            self.value_dim,
        )

    @property
    def _longest(self) -> int:
        return short.longest(self.head_dim, self.dtype)

    def _implementation(
        self,
        mask: Any,
        bias: Array | None,
        length: int,
        key_length: int,
        dropping: bool,
    ) -> str:
        """Return the implementation for these arguments.

        `dropping`: there is dropout on the weights.
        """
        if self.implementation in ("einsum", "jax"):
            return self.implementation
        # otherwise, they are symbols of jax.export
        fixed = isinstance(length, int) and isinstance(key_length, int)
        if not fixed and self.implementation != "auto":
            raise UserError(
                f"implementation = {self.implementation!r}: "
                "does not support the symbolic lengths "
                f"{length} and {key_length} of jax.export; use 'auto' or 'einsum'"
            )
        special = (
            not fixed
            or bias is not None
            or self.positions == "relative"
            or not isinstance(mask, Mask | None)
        )
        if special or self.is_mutable_collection("intermediates"):
            return "einsum"
        backend = platform()
        kernels = KERNELS.get(backend, {})
        if self.implementation == "auto":
            rate = self.dropout_rate * dropping
            missing = [
                [f"this value of {name}" for name, _ in self._unsupported(kernel, rate)]
                for kernel in kernels
            ]
            if "cudnn" in kernels and not cudnn_runs_here():
                missing[0].append("this device")
            if (
                "short" in kernels
                and not missing[0]
                and self._longest < max(length, key_length) <= short.LONGEST
            ):
                missing[0].append(
                    f"more than {self._longest} positions with this head_dim"
                )
            return choose(
                length,
                key_length,
                backend,
                tuple(" or ".join(names) for names in missing),
            )
        if self.implementation == "short" and max(length, key_length) > self._longest:
            raise UserError(
                "implementation = 'short': "
                f"supports at most {self._longest} positions, "
                f"but there are {length} queries and {key_length} keys; use 'auto'"
            )
        if self.implementation == "blocked" or self.implementation in kernels:
            return self.implementation
        # perhaps on another platform: parameters are the same with all implementations
        if self.is_initializing():
            return "einsum"
        name = self.implementation
        raise UserError(
            f"implementation = {name!r}: "
            f"does not run on this platform, {backend!r}; use 'auto'"
        )
