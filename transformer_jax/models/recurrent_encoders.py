"""The encoders of recurrent models.

They are a stack of recurrent layers (Sutskever et al. 2014, Cho et al. 2014, Bahdanau
et al. 2015), the same with a pyramid of layers on it (Chan et al. 2016), and none at
all, where the decoder attends to the vectors of a front end (Xu et al. 2015).

Shapes: B batch · S source positions · E what the encoder reads · C encoder's output · D
decoder's state (d_model).
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

from transformer_jax.models.cells import Carry, make_cell
from transformer_jax.models.layers import Dropout, Linear
from transformer_jax.models.recurrent_config import RecurrentConfig

Array = jax.Array


class Encoded(NamedTuple):
    """The encoded source.

    outputs: h (B, S, C), those of the top layer.
    summary: (B, C), the last state of each direction in the top layer, concatenated;
        the mean of h without a recurrent encoder.
    carries: the first carry of each layer of the decoder.
    valid: (B, S), True at the source and False at its padding.
    """

    outputs: Array
    summary: Array
    carries: tuple[Carry, ...]
    valid: Array

    @property
    def vectors(self) -> Array:
        """The outputs, under the name that they have in the Transformer's memory."""
        return self.outputs


export.register_namedtuple_serialization(
    Encoded, serialized_name="transformer_jax.recurrent.Encoded"
)


class Encoder(nn.Module):
    """A stack of recurrent layers, unidirectional or bidirectional.

    Each of the upper `pyramid_layers` reads pairs of outputs of the layer below, and so
    has half as many positions (Chan et al. 2016, Section 3.1). No state depends on
    padding.
    """

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Array, valid: Array) -> Encoded:
        """Read x (B, S, E), of which `valid` (B, S) is the source.

        The last carries of the top layers are the decoder's first carries. A
        bidirectional encoder applies tanh(W · + b) to the last carry of its backward
        direction, which reads the first word last (Bahdanau et al. 2015, Section A.2.2:
        s₀ = tanh(W_s ←h₁)).
        """
        c = self.config
        lengths = valid.sum(axis=1)
        carries: list[Carry] = []
        ends: list[Carry] = []
        for layer in range(c.num_layers + c.pyramid_layers):
            x = Dropout(c.dropout_rate)(x)
            if layer >= c.num_layers:
                x, valid = pairs(x, valid)
                lengths = valid.sum(axis=1)
            if c.bidirectional:
                width = c.encoder_dim // 2
                forward = make_cell(c.cell, width, f"forward_{layer}")
                end, x_forward = run_cell(forward, x, lengths, backwards=False)
                backward = make_cell(c.cell, width, f"backward_{layer}")
                start, x_backward = run_cell(backward, x, lengths, backwards=True)
                x = jnp.concatenate([x_forward, x_backward], axis=-1)
                ends = [end, start]
                if layer >= c.pyramid_layers:
                    carries.append(self._bridge(start, layer))
            else:
                cell = make_cell(c.cell, c.encoder_dim, f"forward_{layer}")
                end, x = run_cell(cell, x, lengths, backwards=c.reverse_source)
                ends = [end]
                if layer >= c.pyramid_layers:
                    carries.append(end)
        last_states = [jax.tree.leaves(end)[-1] for end in ends]
        summary = jnp.concatenate(last_states, axis=-1)
        return Encoded(x, summary, tuple(carries), valid)

    def _bridge(self, carry: Carry, layer: int) -> Carry:
        """Map a carry of half the encoder's width to a carry of the decoder."""
        leaves, structure = jax.tree.flatten(carry)
        bridged = []
        for i, h in enumerate(leaves):
            name = f"bridge_{layer}_{i}"
            bridged.append(bridge(self.config, h, name))
        return jax.tree.unflatten(structure, bridged)


class Annotations(nn.Module):
    """The vectors of a front end as they are, e.g. of the parts of an image.

    Every carry of the decoder starts as tanh(W · + b) of their mean (Xu et al. 2015,
    Section 3.1.2).

    Differs: The paper has multilayer perceptrons of unstated depth there.
    """

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        x: Array,
        valid: Array,
    ) -> Encoded:
        """Return x (B, S, C) and the first carries, see `Encoder`."""
        c = self.config
        count = valid.sum(axis=1, keepdims=True)
        count = jnp.maximum(count, 1)
        total = jnp.where(valid[:, :, None], x, 0).sum(axis=1)
        mean = total / count
        carries = []
        for layer in range(c.num_layers):
            cell = make_cell(c.cell, c.d_model)
            zeros = cell.initialize_carry(jax.random.key(0), (1, c.d_model))
            leaves, structure = jax.tree.flatten(zeros)
            first = []
            for i in range(len(leaves)):
                name = f"first_{layer}_{i}"
                first.append(bridge(c, mean, name))
            carry = jax.tree.unflatten(structure, first)
            carries.append(carry)
        return Encoded(x, mean, tuple(carries), valid)


def bridge(
    c: RecurrentConfig,
    h: Array,
    name: str,
) -> Array:
    """Map h (B, E) to a part of the decoder's first carry, tanh(h W + b) (B, D).

    Call it in a module, which gets the parameters of the map.
    """
    linear = Linear(
        "BE,ED->BD",
        shape=(h.shape[-1], c.d_model),
        axes=("embed", "state"),
        dtype=c.dtype,
        name=name,
    )
    return jnp.tanh(linear(h))


def pairs(x: Array, valid: Array) -> tuple[Array, Array]:
    """Concatenate adjacent positions: [x_{2i}; x_{2i+1}] (B, ⌈S / 2⌉, 2E), of which
    (B, ⌈S / 2⌉) are valid.

    The partner of a last position is zero.
    """
    x = jnp.where(valid[:, :, None], x, 0)
    rows, length, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, length % 2), (0, 0)))
    return x.reshape(rows, -1, 2 * width), valid[:, ::2]


def run_cell(
    cell: Any,
    x: Array,
    lengths: Array,
    backwards: bool,
) -> tuple[Carry, Array]:
    """Run a cell over x (B, S, E) → the last carry, outputs (B, S, C).

    `lengths` (B,) are those of the rows without padding.
    """
    rnn = nn.RNN(cell, return_carry=True, reverse=backwards, keep_order=True)
    return rnn(x, seq_lengths=lengths)
