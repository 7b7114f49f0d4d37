"""The recurrent language model (Zaremba et al. 2014).

It is what came before the decoder-only Transformer.

Shapes: B batch · T positions · D width of embeddings and states (d_model) · V
vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.models.attention import Valid
from transformer_jax.models.cells import CELLS, Carry, make_cell
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.layers import (
    Dropout,
    Embedding,
    Head,
    OutputLayer,
    TokenVectors,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RecurrentLMConfig:
    """Config of `RecurrentLM`.

    The defaults are those of the medium model of Zaremba et al. 2014 (Section 4.1).
    """

    architecture: str = "recurrent_lm"
    vocab_size: int = fields.size(10_000, 304)
    cell: str = "lstm"
    num_layers: int = fields.size(2, 2)
    d_model: int = fields.size(650, 16)  # width of embeddings and states
    # the embedding is also the output layer, which then has no bias (Press and Wolf
    # 2017)
    tie_embeddings: bool = False
    dropout_rate: float = fields.random(0.5, 0.0)
    # most tokens of a window, and of a prompt with its continuation
    max_length: int = fields.size(1024, 32)
    vocab_multiple: int = 1
    dtype: str = fields.how("float32")  # of the products outside the cells

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int and value < 1:
                yield name, "must be at least 1"
        if not 0 <= self.dropout_rate < 1:
            yield "dropout_rate", "must be in [0, 1)"
        choices = {
            "architecture": ("recurrent_lm",),
            "cell": tuple(CELLS),
            "dtype": ("float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"

    @property
    def token_vectors(self) -> TokenVectors:
        """The vectors of tokens."""
        factor = self.d_model**0.5
        return TokenVectors("d_model", self.d_model, factor, self.tie_embeddings)

    def check(self) -> None:
        """Raise ValueError for the first of `problems`."""
        for field, rule in self.problems():
            raise UserError(
                f"RecurrentLMConfig.{field} = {getattr(self, field)!r}: {rule}"
            )


class RecurrentLM(nn.Module):
    """A stack of recurrent layers that predicts the next token.

    It has the methods of `GPT`. Dropout acts between layers, and so before the first
    and after the last one, but not from step to step (Zaremba et al. 2014, Section
    3.1). The cache is the carry of each layer.

    Differs: The state is zero at the start of each row; Zaremba et al. continue with
    the state of the batch before. For the cells, see `cells`. Embeddings are multiplied
    by √D.
    """

    config: RecurrentLMConfig

    def setup(self) -> None:
        c = self.config
        c.check()
        self.embedding = Embedding(c.vocab_size, c.d_model, c.vocab_multiple)
        self.cells = [make_cell(c.cell, c.d_model) for _ in range(c.num_layers)]
        self.dropout = Dropout(c.dropout_rate)
        if not c.tie_embeddings:
            self.output = OutputLayer(
                c.vocab_size, c.d_model, c.vocab_multiple, use_bias=True, dtype=c.dtype
            )

    def __call__(
        self,
        tokens: Array,
        valid: Valid = None,
        segments: Any = None,
        positions: Any = 0,
    ) -> Array:
        """Map token ids (B, T) to float32 logits (B, T, padded V) of the next token.

        For the arguments, see `hidden`.
        """
        return self.head()(self.hidden(tokens, valid, segments, positions))

    def hidden(
        self,
        tokens: Array,
        valid: Valid = None,
        segments: Any = None,
        positions: Any = 0,
    ) -> Array:
        """Return the last layer's output (B, T, D). `head` maps it to logits.

        `segments` (B, T) are the numbers of the documents in a row; each document
        starts from a state of zero. `valid` and `positions` are ignored: a state
        depends only on what comes before, and padding follows the tokens.
        """
        check_ids("tokens", tokens, self.config.vocab_size)
        if valid is not None:
            check_valid("valid", valid, tokens.shape, at_end=True)
        if segments is not None:
            check_ids("segments", segments, 2**31, tokens.shape)
        fresh = None
        if segments is not None:
            before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
            fresh = segments != before
        rows, room = tokens.shape
        x, _ = self._run(self.start(rows, room), tokens, fresh)
        return x

    def head(self) -> Head:
        """Return the map from the last layer's output to logits."""
        if self.config.tie_embeddings:
            return self.embedding.head(self.config.dtype)
        return self.output.head()

    def start(
        self,
        rows: int,
        room: int,
    ) -> tuple[Carry, ...]:
        """Return a state of zero for each layer.

        States do not grow, so `room` is ignored.
        """
        shape = (rows, self.config.d_model)
        return tuple(
            cell.initialize_carry(jax.random.key(0), shape) for cell in self.cells
        )

    def extend(
        self,
        cache: tuple[Carry, ...],
        tokens: Array,
        position: Array | int,
        begins: Array | None = None,
    ) -> tuple[Array, tuple[Carry, ...]]:
        """Read token ids (B, T) → logits (B, T, padded V), the new cache.

        The ids follow those in the cache. `begins` (B,) is the position at which each
        row begins; what is read before it is padding. None: all begin at 0.
        """
        fresh = None
        if begins is not None:
            positions = position + jnp.arange(tokens.shape[1])[None]
            fresh = positions <= begins[:, None]
        x, cache = self._run(cache, tokens, fresh)
        return self.head()(x), cache

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return no maps, as there is no attention."""
        return {}

    def _run(
        self,
        carries: tuple[Carry, ...],
        tokens: Array,
        fresh: Array | None,
    ) -> tuple[Array, tuple[Carry, ...]]:
        """Read token ids (B, T) → the last layer's output, the next carries.

        The output (B, T, D) is that after dropout. Where `fresh` (B, T) is True, the
        state is set to zero before the token is read. None stands for False.
        """

        def step(
            cell: Any,
            carry: Carry,
            inputs: tuple[Array, Array | None],
        ) -> tuple[Carry, Array]:
            x, reset = inputs
            if reset is not None:
                carry = jax.tree.map(lambda c: jnp.where(reset[:, None], 0.0, c), carry)
            return cell(carry, x)

        scan = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        x = self.dropout(self.embedding(tokens))
        after = []
        for cell, carry in zip(self.cells, carries, strict=True):
            carry, x = scan(cell, carry, (x, fresh))
            x = self.dropout(x)
            after.append(carry)
        return x, tuple(after)
