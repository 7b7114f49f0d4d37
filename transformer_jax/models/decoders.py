"""Decoders of recurrent models: one class for each paper's equations of a step.

A step leads from the previous state s_{t-1} and word y_{t-1} to the next state s_t and
an output. The output layer maps the output to the probabilities of word y_t.

Shapes: B batch · K rows that share a source · S source positions · E embedding · C
encoder's output · D decoder's state (d_model) · O output · N heads.
"""

from typing import NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

from transformer_jax.models.alignment import ALIGNMENTS, Memory
from transformer_jax.models.caches import reorder_rows
from transformer_jax.models.cells import Carry, make_cell
from transformer_jax.models.kernels.products import product
from transformer_jax.models.layers import Dropout, Linear, parameter
from transformer_jax.models.recurrent_config import RecurrentConfig

Array = jax.Array


class State(NamedTuple):
    """The decoder's state between steps.

    carries: the carry of each layer.
    fed: h̃ (B, D), the previous output, with input feeding; else None.
    """

    carries: tuple[Carry, ...]
    fed: Array | None = None

    @property
    def top(self) -> Array:
        """s (B, D), the output of the last layer."""
        carry = self.carries[-1]
        return jax.tree.leaves(carry)[-1]

    def reorder(self, parents: Array) -> Self:
        """See `Cache.reorder`."""
        return reorder_rows(self, parents)


class Step(NamedTuple):
    """The result of a step.

    state: the next state.
    output: (B, O).
    weights: of attention, (B, N, S). N is 0 without attention.
    """

    state: State
    output: Array
    weights: Array


for _kind in (State, Memory):
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"transformer_jax.recurrent.{_kind.__name__}"
    )


class Decoder(nn.Module):
    """Base class for decoders: recurrent layers, attention and a readout.

    A subclass defines `__call__`, with parameters of its own in `setup`.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        self.cells = [make_cell(c.cell, c.d_model) for _ in range(c.num_layers)]
        self.dropout = Dropout(c.dropout_rate)
        if c.attention != "none":
            self.alignment = ALIGNMENTS[c.attention](
                state_dim=c.d_model,
                memory_dim=c.encoder_dim,
                hidden=c.attention_dim,
                num_heads=c.num_heads if c.attention == "multi_head" else 1,
                damping=c.damping,
                local_window=c.local_window,
                dtype=c.dtype,
            )
        if c.readout == "maxout":
            width = c.d_model + c.encoder_dim + c.embedding_dim
            self.maxout = self._linear(width, 2 * c.readout_dim)

    def project(
        self,
        h: Array,
        summary: Array,
        valid: Array,
    ) -> Memory:
        """Return what all steps read of the source.

        h (B, S, C), summary (B, C) and `valid` (B, S) are those of `Encoded`.
        """
        keys = h
        values = h[:, None]
        if self.config.attention != "none":
            keys, values = self.alignment.project(h)
        return Memory(keys, values, summary, valid)

    def first(self, carries: tuple[Carry, ...]) -> State:
        """Return the state before the first step."""
        return State(carries)

    def __call__(
        self,
        state: State,
        y: Array,
        memory: Memory,
    ) -> Step:
        """Read the word y (B, E).

        The memory may have fewer rows, B / K. Then K adjacent rows of y share each row
        of the memory.
        """
        raise NotImplementedError

    def recur(self, state: State, x: Array) -> State:
        """Run the cells of all layers, with dropout between layers."""
        carries = []
        for layer, cell in enumerate(self.cells):
            if layer > 0:
                x = self.dropout(x)
            carry, x = cell(state.carries[layer], x)
            carries.append(carry)
        return State(tuple(carries))

    def attend(self, s: Array, memory: Memory) -> tuple[Array, Array]:
        """Attend from states s (B, D) → contexts (B, C), weights (B, N, S)."""
        rows, width = s.shape
        shared = s.reshape(memory.valid.shape[0], -1, width)
        context, weights = self.alignment(shared, memory)
        positions = weights.shape[-1]
        weights = weights.swapaxes(1, 2).reshape(rows, -1, positions)
        return context.reshape(rows, -1), weights

    def read_out(
        self,
        s: Array,
        context: Array,
        y: Array,
    ) -> Array:
        """Combine state, context and word to the output.

        It is [s; c; y], or a maxout layer of that (Goodfellow et al. 2013): the larger
        one of each pair of units.
        """
        output = concat(s, context, y)
        if self.config.readout == "linear":
            return output
        pairs = self.maxout(output)
        pairs = pairs.reshape(y.shape[0], self.config.readout_dim, 2)
        return pairs.max(axis=-1)

    def _linear(
        self,
        inputs: int,
        outputs: int,
        use_bias: bool = True,
    ) -> Linear:
        return Linear(
            "BC,CO->BO",
            shape=(inputs, outputs),
            axes=("embed", "state"),
            use_bias=use_bias,
            dtype=self.config.dtype,
        )


class Plain(Decoder):
    """s_t = f(s_{t-1}, y_{t-1}), the output (Sutskever et al. 2014, Section 2).

    The source is seen only by the first state.
    """

    def __call__(
        self,
        state: State,
        y: Array,
        memory: Memory,
    ) -> Step:
        state = self.recur(state, y)
        return Step(state, state.top, no_weights(y, memory))


class Cho(Decoder):
    """s_t = f(s_{t-1}, [y_{t-1}; c]), output g(s_t, c, y_{t-1}).

    c is the summary of the source, the same in every step (Cho et al. 2014, Section
    2.2).
    """

    def __call__(
        self,
        state: State,
        y: Array,
        memory: Memory,
    ) -> Step:
        sharing = y.shape[0] // memory.summary.shape[0]
        context = jnp.repeat(memory.summary, sharing, axis=0)
        state = self.recur(state, concat(y, context))
        output = self.read_out(state.top, context, y)
        return Step(state, output, no_weights(y, memory))


class Bahdanau(Decoder):
    """s_t = f(s_{t-1}, [y_{t-1}; c_t]), output g(s_t, c_t, y_{t-1}).

    c_t is attended from s_{t-1} (Bahdanau et al. 2015, Section A.2.2). With
    `context_gate`, it is multiplied by β_t = σ(w · s_{t-1} + b), a scalar (Xu et al.
    2015, Section 4.2.1).
    """

    def setup(self) -> None:
        super().setup()
        if self.config.context_gate:
            d = self.config.d_model
            init = nn.initializers.normal(d**-0.5)
            zeros = nn.initializers.zeros
            self.gate_w = parameter(self, "gate_w", init, (d,), ("state",))
            self.gate_b = parameter(self, "gate_b", zeros, (), ())

    def __call__(
        self,
        state: State,
        y: Array,
        memory: Memory,
    ) -> Step:
        context, weights = self.attend(state.top, memory)
        if self.config.context_gate:
            context = self._gate(state.top) * context
        state = self.recur(state, concat(y, context))
        output = self.read_out(state.top, context, y)
        return Step(state, output, weights)

    def _gate(
        self,
        s: Array,
    ) -> Array:
        """Return β (B, 1) from states s (B, D)."""
        score = product("BD,D->B", s, self.gate_w, self.config.dtype)
        gate = nn.sigmoid(score + self.gate_b)
        return gate[:, None]


class Luong(Decoder):
    """h̃_t = tanh(W_c [c_t; s_t]), the output (Luong et al. 2015, eq. 5).

    s_t = f(s_{t-1}, y_{t-1}), or with input feeding f(s_{t-1}, [y_{t-1}; h̃_{t-1}])
    (Section 3.3). c_t is attended from s_t.
    """

    def setup(self) -> None:
        super().setup()
        c = self.config
        width = c.encoder_dim + c.d_model
        self.combine = self._linear(width, c.d_model, use_bias=False)

    def first(self, carries: tuple[Carry, ...]) -> State:
        state = State(carries)
        return self._feed(state, jnp.zeros(state.top.shape))

    def __call__(
        self,
        state: State,
        y: Array,
        memory: Memory,
    ) -> Step:
        if state.fed is not None:
            y = concat(y, state.fed)
        state = self.recur(state, y)
        context, weights = self.attend(state.top, memory)
        output = jnp.tanh(self.combine(concat(context, state.top)))
        return Step(self._feed(state, output), output, weights)

    def _feed(self, state: State, output: Array) -> State:
        """Return the state with what the next step reads of the output."""
        if not self.config.input_feeding:
            return state
        return state._replace(fed=output)


DECODERS: dict[str, type[Decoder]] = {
    "plain": Plain,
    "cho": Cho,
    "bahdanau": Bahdanau,
    "luong": Luong,
}


def concat(*parts: Array) -> Array:
    """Return [a; b; …], the features of arrays (B, …) in one."""
    return jnp.concatenate(parts, axis=-1)


def no_weights(y: Array, memory: Memory) -> Array:
    """Return the weights (B, 0, S) of a decoder without attention."""
    return jnp.zeros((y.shape[0], 0, memory.valid.shape[1]))
