"""Attention of recurrent decoders: one small class per score, each with its parameters.

Shapes: B batch · T target positions · S source positions · D width of the decoder's state s · C width of the encoder's
output h · A hidden units of a score · N heads · H width of a head.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.attention import (
    additive_scores,
    attention_weights,
    dot_scores,
    general_scores,
    padding_mask,
    scaled_dot_product_scores,
)
from transformer_jax.models.layers import Linear, parameter
from transformer_jax.models.numerics import product

Array = jax.Array


class Memory(NamedTuple):
    """The decoder's view of the source: keys as the score wants them, values (B, S, N, H) and summary (B, C)."""

    keys: Array
    values: Array
    summary: Array


def damped_scores(scores: Array, damping: Array) -> Array:
    """s · exp(-λ s) of scores s = q·k / √d_k (B, N, T, S), before `attention_weights`. λ = `damping` ().

    λ = 0 changes nothing. λ > 0 reduces scores beyond 1 / λ; λ < 0 increases large scores. float32 overflows where
    -λ s > 88, so scores must be small. Found in teaching material that gives no source.
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


class Alignment(nn.Module):
    """The weights that a state s gives to the source positions, and the context it gets from them.

    A subclass defines a score. It may also project keys and values, and map the values seen to a context. `hidden` is
    A, `num_heads` is N; most scores need neither. `local_window` > 0 is D of Luong et al.'s local-p attention.
    """

    state_dim: int  # D
    memory_dim: int  # C
    hidden: int = 512
    num_heads: int = 1
    damping: bool = False
    local_window: int = 0
    dtype: str = "float32"

    def setup(self) -> None:
        d = self.state_dim
        self.setup_score()
        if self.damping:
            self.damping_rate = parameter(self, "damping", nn.initializers.zeros, (), ())
        if self.local_window:
            self.position = self.linear(d, d)
            self.position_v = parameter(self, "position_v", nn.initializers.normal(d**-0.5), (d,), ("state",))

    def setup_score(self) -> None:
        """Create the score's parameters."""

    def project(self, h: Array) -> tuple[Array, Array]:
        """Turn h (B, S, C) into keys and values (B, S, N, H), once per sentence."""
        return h, h[:, :, None]

    def scores(self, query: Array, keys: Array) -> Array:
        """Score states (B, T, D) against keys → (B, N, T, S)."""
        raise NotImplementedError

    def context(self, seen: Array) -> Array:
        """Map the values that were seen (B, T, N, H) to the context (B, T, C)."""
        return seen[:, :, 0]

    def __call__(self, query: Array, memory: Memory, valid: Array) -> tuple[Array, Array]:
        """Let states (B, T, D) attend to the memory, valid (B, S) → contexts (B, T, C), weights (B, N, T, S)."""
        scores = self.scores(query, memory.keys)
        if self.damping:
            scores = damped_scores(scores, self.damping_rate)
        if self.local_window:  # p = S · sigmoid(v_pᵀ tanh(W_p s)), Luong et al. 2015, eq. 9
            where = nn.sigmoid(product("BTD,D->BT", jnp.tanh(self.position(query)), self.position_v, self.dtype))
            center = where * valid.sum(axis=1, keepdims=True)
            weights = local_weights(scores[:, 0], center, self.local_window, valid[:, None])[:, None]
        else:
            weights = attention_weights(scores, padding_mask(valid))
        return self.context(product("BNTS,BSNH->BTNH", weights, memory.values, self.dtype)), weights

    @nn.nowrap
    def linear(self, inputs: int, outputs: int) -> Linear:
        return Linear((inputs, outputs), ("embed", "state"), use_bias=False, dtype=self.dtype)


class Additive(Alignment):
    """vᵀ tanh(W_a s + U_a h) (Bahdanau et al. 2015), which with W = [W_a; U_a] is Luong et al.'s vᵀ tanh(W [s; h])."""

    def setup_score(self) -> None:
        a = self.hidden
        self.query, self.key = self.linear(self.state_dim, a), self.linear(self.memory_dim, a)
        self.v = parameter(self, "v", nn.initializers.normal(a**-0.5), (a,), ("state",))

    def project(self, h: Array) -> tuple[Array, Array]:
        return self.key(h), h[:, :, None]

    def scores(self, query: Array, keys: Array) -> Array:
        return additive_scores(self.query(query), keys, self.v)[:, None]


class Dot(Alignment):
    """sᵀ h (Luong et al. 2015)."""

    def scores(self, query: Array, keys: Array) -> Array:
        return dot_scores(query, keys, self.dtype)[:, None]


class General(Alignment):
    """sᵀ W h (Luong et al. 2015)."""

    def setup_score(self) -> None:
        shape = self.state_dim, self.memory_dim
        self.w = parameter(self, "w", nn.initializers.xavier_uniform(), shape, ("embed", "state"))

    def scores(self, query: Array, keys: Array) -> Array:
        return general_scores(query, keys, self.w, self.dtype)[:, None]


class MultiHead(Alignment):
    """q k / √d_k of projected queries, keys and values in N heads (Vaswani et al. 2017)."""

    def setup_score(self) -> None:
        names, heads = ("embed", "state", "head_dim"), (self.num_heads, self.state_dim // self.num_heads)
        self.query = Linear((self.state_dim, *heads), names, use_bias=False, dtype=self.dtype)
        self.key = Linear((self.memory_dim, *heads), names, use_bias=False, dtype=self.dtype)
        self.value = Linear((self.memory_dim, *heads), names, use_bias=False, dtype=self.dtype)
        to_context = ("state", "head_dim", "embed")
        self.output = Linear((*heads, self.memory_dim), to_context, num_inputs=2, use_bias=False, dtype=self.dtype)

    def project(self, h: Array) -> tuple[Array, Array]:
        return self.key(h), self.value(h)

    def scores(self, query: Array, keys: Array) -> Array:
        return scaled_dot_product_scores(self.query(query), keys, self.dtype)

    def context(self, seen: Array) -> Array:
        return self.output(seen)


ALIGNMENTS: dict[str, type[Alignment]] = {
    "additive": Additive,
    "concat": Additive,
    "dot": Dot,
    "general": General,
    "scaled_dot": MultiHead,  # with one head
    "multi_head": MultiHead,
}
