"""Recurrent cells: one step of a layer, from the previous state and an input.

They are those of Flax, in float32. The GRU applies its reset gate after the recurrent
product, like cuDNN. The LSTM has no peepholes.
"""

from typing import Any

import flax.linen as nn

from transformer_jax.models.kernels.placement import named

Carry = Any  # the carry of a cell: h (B, D), or (c, h) for an LSTM

CELLS: dict[str, Any] = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}


def make_cell(kind: str, width: int, name: str | None = None) -> Any:
    """Return a cell with a state of `width` units. `kind` is one of CELLS."""
    return CELLS[kind](
        width,
        kernel_init=named(nn.initializers.lecun_normal(), ("embed", "state")),
        recurrent_kernel_init=named(nn.initializers.orthogonal(), ("embed", "state")),
        bias_init=named(nn.initializers.zeros, ("state",)),
        name=name,
    )
