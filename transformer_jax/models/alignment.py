"""Attention in recurrent decoders: one module per score function.

A module holds the parameters of its function.

Shapes: B batch · T target positions · S source positions · D width of the decoder's
state s · C width of the encoder's output h · A hidden units of the additive score · N
heads · H head width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.attention import (
    additive_scores,
    attention_weights,
    dot_scores,
    general_scores,
    scaled_dot_product_scores,
)
from transformer_jax.models.checks import check_valid
from transformer_jax.models.kernels.products import product
from transformer_jax.models.layers import Linear, parameter
from transformer_jax.models.masks import padding

Array = jax.Array


class Memory(NamedTuple):
    """The encoded source, as the decoder reads it at every step.

    keys: in the shape that the score function expects.
    values: (B, N, S, H).
    summary: (B, C), see `recurrent_encoders.Encoded`.
    valid: (B, S), True at the source and False at its padding.
    """

    keys: Array
    values: Array
    summary: Array
    valid: Array


def damped_scores(scores: Array, damping: Array) -> Array:
    """Return s · exp(-λ s) for scores s = q·k / √d_k (B, N, T, S).

    Apply it before `attention_weights`. λ = `damping` is a scalar. λ = 0 changes
    nothing. With λ > 0 the result is largest at s = 1 / λ and falls beyond it; λ < 0
    increases large scores. Scores must be small: float32 overflows where -λ s > 88. The
    formula comes from teaching material that gives no source.
    """
    return scores * jnp.exp(-damping * scores)


def local_weights(
    scores: Array,
    center: Array,
    window: int,
    mask: Array,
) -> Array:
    """Return attention weights (B, T, S) around predicted source positions.

    Luong et al. 2015, eq. 10, local-p. The weights are a softmax over the positions s
    in [p - D, p + D], multiplied by exp(-(s - p)² / 2σ²) with σ = D / 2. They do not
    sum to 1.

    scores (B, T, S), center p (B, T); `window` is D. `mask` is boolean and broadcasts
    to (B, T, S).
    """
    positions = jnp.arange(scores.shape[-1], dtype=jnp.float32)
    distance = positions[None, None] - center[..., None]
    weights = attention_weights(scores, mask & (jnp.abs(distance) <= window))
    return weights * jnp.exp(-2 * (distance / window) ** 2)


class Alignment(nn.Module):
    """Base class for attention from decoder states s to encoder outputs h.

    It computes weights, then a context vector.

    A subclass defines `scores`, with its parameters in `setup_score`. It may also
    override `project`, which computes keys and values, and `context`, which maps the
    weighted sum of values to the context.

    `hidden` is A and `num_heads` is N; most scores use neither. `damping` learns the λ
    of `damped_scores`, which starts at 0. `local_window` > 0 is the D of Luong et al.'s
    local-p attention; with 0, attention is global.
    """

    state_dim: int  # D
    memory_dim: int  # C
    hidden: int = 512
    num_heads: int = 1
    damping: bool = False
    local_window: int = 0
    dtype: str = "float32"

    def setup(self) -> None:
        self.setup_score()
        if self.damping:
            zeros = nn.initializers.zeros
            self.damping_rate = parameter(self, "damping", zeros, (), ())
        if self.local_window:
            d = self.state_dim
            self.position = self.linear(d, d)
            init = nn.initializers.normal(d**-0.5)
            self.position_v = parameter(self, "position_v", init, (d,), ("state",))

    def setup_score(self) -> None:
        """Create the score's parameters."""

    def project(self, h: Array) -> tuple[Array, Array]:
        """Map h (B, S, C) to keys and values (B, N, S, H), once per sentence.

        Keys have the shape that `scores` expects.
        """
        return h, h[:, None]

    def scores(self, query: Array, keys: Array) -> Array:
        """Return the scores (B, N, T, S) of states (B, T, D) against the keys."""
        raise NotImplementedError

    def context(self, heads: Array) -> Array:
        """Map the weighted sums of values (B, T, N, H) to contexts (B, T, C)."""
        return heads[:, :, 0]

    def __call__(self, query: Array, memory: Memory) -> tuple[Array, Array]:
        """Attend from states (B, T, D) → contexts (B, T, C), weights (B, N, T, S)."""
        check_valid("valid", memory.valid)
        scores = self.scores(query, memory.keys)
        if self.damping:
            scores = damped_scores(scores, self.damping_rate)
        if self.local_window:
            weights = self._local_weights(scores, query, memory.valid)
        else:
            mask = padding(memory.valid).whole(*scores.shape[2:])
            weights = attention_weights(scores, mask)
        heads = product("BNTS,BNSH->BTNH", weights, memory.values, self.dtype)
        return self.context(heads), weights

    def _local_weights(
        self,
        scores: Array,
        query: Array,
        valid: Array,
    ) -> Array:
        """Return weights (B, 1, T, S) around p = S · sigmoid(v_pᵀ tanh(W_p s)).

        Luong et al. 2015, eq. 9; S does not count padding.
        """
        hidden = jnp.tanh(self.position(query))
        share = product("BTD,D->BT", hidden, self.position_v, self.dtype)
        center = nn.sigmoid(share) * valid.sum(axis=1, keepdims=True)
        one_head = scores[:, 0]
        weights = local_weights(one_head, center, self.local_window, valid[:, None])
        return weights[:, None]

    @nn.nowrap
    def linear(self, inputs: int, outputs: int) -> Linear:
        """Return a linear map of (B, T, inputs) to (B, T, outputs), without bias."""
        return Linear(
            "BTD,DA->BTA",
            shape=(inputs, outputs),
            axes=("embed", "state"),
            use_bias=False,
            dtype=self.dtype,
        )


class Additive(Alignment):
    """vᵀ tanh(W_a s + U_a h) (Bahdanau et al. 2015, Section A.1.2).

    Luong et al.'s concat score, vᵀ tanh(W [s; h]), is the same function with W = [W_a
    U_a].
    """

    def setup_score(self) -> None:
        a = self.hidden
        self.query = self.linear(self.state_dim, a)
        self.key = self.linear(self.memory_dim, a)
        init = nn.initializers.normal(a**-0.5)
        self.v = parameter(self, "v", init, (a,), ("state",))

    def project(self, h: Array) -> tuple[Array, Array]:
        return self.key(h), h[:, None]

    def scores(self, query: Array, keys: Array) -> Array:
        return additive_scores(self.query(query), keys, self.v)[:, None]


class Dot(Alignment):
    """sᵀ h (Luong et al. 2015, Section 3.1). Requires C = D."""

    def scores(self, query: Array, keys: Array) -> Array:
        return dot_scores(query, keys, self.dtype)[:, None]


class General(Alignment):
    """sᵀ W h (Luong et al. 2015, Section 3.1)."""

    def setup_score(self) -> None:
        shape = self.state_dim, self.memory_dim
        self.w = parameter(
            self, "w", nn.initializers.xavier_uniform(), shape, ("embed", "state")
        )

    def scores(self, query: Array, keys: Array) -> Array:
        return general_scores(query, keys, self.w, self.dtype)[:, None]


class MultiHead(Alignment):
    """q·k / √d_k with projected queries, keys and values in N heads of width D / N.

    Vaswani et al. 2017, Section 3.2. The projections have no biases.
    """

    def setup_score(self) -> None:
        heads = (self.num_heads, self.state_dim // self.num_heads)
        of_state = (self.state_dim, *heads)
        of_memory = (self.memory_dim, *heads)
        to_memory = (*heads, self.memory_dim)
        axes = ("embed", "state", "head_dim")
        back = ("state", "head_dim", "embed")
        options: dict[str, Any] = {"use_bias": False, "dtype": self.dtype}
        self.query = Linear("BTD,DNH->BTNH", of_state, axes, **options)
        self.key = Linear("BSC,CNH->BSNH", of_memory, axes, **options)
        self.value = Linear("BSC,CNH->BSNH", of_memory, axes, **options)
        self.output = Linear("BTNH,NHC->BTC", to_memory, back, **options)

    def project(self, h: Array) -> tuple[Array, Array]:
        return self.key(h), self.value(h).swapaxes(1, 2)

    def scores(self, query: Array, keys: Array) -> Array:
        return scaled_dot_product_scores(self.query(query), keys, self.dtype)

    def context(self, heads: Array) -> Array:
        return self.output(heads)


ALIGNMENTS: dict[str, type[Alignment]] = {
    "additive": Additive,
    "concat": Additive,
    "dot": Dot,
    "general": General,
    "scaled_dot": MultiHead,  # with one head, see `decoders`
    "multi_head": MultiHead,
}
