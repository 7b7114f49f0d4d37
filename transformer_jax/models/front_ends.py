"""Front ends: what a model reads becomes vectors.

A front end is a module that maps inputs and their validity (B, S) to vectors (B, S', D)
and their validity (B, S'). S' may be smaller than S. The validity is None if there is
no padding. A front end owns the limit on S. It faces a stream of the data, which turns
what files contain into the inputs.

Shapes: B batch · S source positions · T target positions · D width of the vectors.
"""

from typing import Any

import flax.linen as nn
import jax

from transformer_jax.models.attention import Valid
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.layers import Dropout, Embedding
from transformer_jax.models.positions import Positions, check_length

Array = jax.Array


class Tokens(nn.Module):
    """Token embeddings plus positions (Vaswani et al. 2017, Sections 3.4 and 3.5).

    The model creates the parts, because it may share them: source and target can have
    the same embedding. A recurrent model has neither positions nor dropout here.
    """

    embedding: Embedding
    positions: Positions | None = None
    dropout: Dropout | None = None

    def __call__(
        self,
        ids: Array,
        valid: Valid = None,
    ) -> tuple[Array, Valid]:
        """Map ids (B, S) to vectors (B, S, D), with dropout, and return `valid` too.

        `valid` (B, S) is True at tokens and False at padding. None: there is no
        padding.
        """
        if valid is not None:
            check_valid(f"{self.name}_valid", valid, ids.shape)
        x = self.embed(ids)
        if self.dropout is not None:
            x = self.dropout(x)
        return x, valid

    def embed(
        self,
        ids: Array,
        position: Array | int = 0,
    ) -> Array:
        """Map ids (B, T) from `position` on to vectors (B, T, D), without dropout."""
        check_ids(str(self.name), ids, self.embedding.vocab_size)
        x = self.embedding(ids)
        if self.positions is None:
            return x
        return x + self.positions(ids.shape[1], position)

    def check_room(self, room: Any) -> None:
        """Raise ValueError if there are fewer than `room` positions."""
        if self.positions is not None:
            check_length(self.positions.kind, room, self.positions.max_length)
