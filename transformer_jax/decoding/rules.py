"""Rules that change the scores of the next token, in the order of `generate` in
Hugging Face's transformers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.decoding.distributions import penalize
from transformer_jax.decoding.steps import IMPOSSIBLE, certain


@dataclasses.dataclass(frozen=True)
class Rules:
    """A function from scores of the next token to changed scores.

    See `DecodingConfig` for its options.

    ends: the ids that end an output. They are impossible before the last of
        `min_tokens` tokens.
    forbidden: ids that are impossible everywhere.
    given: the number of tokens of a row that were given: the begin id, or a prompt.
    """

    ends: tuple[int, ...]
    forbidden: tuple[int, ...]
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    first_id: int = -1
    renormalize: bool = False
    given: int = 1

    def __call__(
        self, scores: jax.Array, tokens: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return the changed scores (N, V).

        Args:
            scores: logits or log-probabilities (N, V). A row that leaves one token
                possible is not changed.
            tokens: (N, S), the tokens before and including `position`, and anything
                after it. Ids ≥ V stand for no token.
            position: the place of the newest token, a scalar.
        """
        size = scores.shape[-1]
        known = jnp.where(jnp.arange(tokens.shape[1]) <= position, tokens, size)
        changed = scores
        if self.repetition_penalty != 1:
            changed = penalize(changed, _marked(known, size), self.repetition_penalty)
        barred = jnp.isin(jnp.arange(size), jnp.array(self.forbidden, jnp.int32))[None]
        if self.no_repeat_ngram:
            repeating = _completing(known, position, self.no_repeat_ngram)
            barred |= _marked(repeating, size)
        if self.min_tokens:
            early = position + 2 - self.given < self.min_tokens
            barred |= early & jnp.isin(jnp.arange(size), jnp.array(self.ends))[None]
        changed = jnp.where(barred, IMPOSSIBLE, changed)
        if self.first_id >= 0:
            first = certain(self.first_id, size)[None]
            changed = jnp.where(position + 1 == self.given, first, changed)
        decided = (scores > IMPOSSIBLE).sum(axis=-1, keepdims=True) == 1
        changed = jnp.where(decided, scores, changed)
        return jax.nn.log_softmax(changed) if self.renormalize else changed


def rules(
    options: Any, ends: Sequence[int], forbidden: Sequence[int], given: int = 1
) -> Rules | None:
    """Return the rules of a `SamplingConfig`, or None if they change nothing.

    `forbidden` are the ids that the search excludes in any case. See `Rules` for the
    other arguments.
    """
    names = {field.name for field in dataclasses.fields(Rules)}
    chosen = {name: getattr(options, name) for name in names if hasattr(options, name)}
    made = Rules(
        tuple(ends), (*forbidden, *options.forbidden_ids), given=given, **chosen
    )
    return None if made == Rules(tuple(ends), tuple(forbidden), given=given) else made


def _marked(ids: jax.Array, size: int) -> jax.Array:
    """Return (N, `size`) bool, True at the ids (N, S) of each row.

    Ids ≥ `size` are ignored.
    """
    rows = jnp.arange(len(ids))[:, None]
    return jnp.zeros((len(ids), size), bool).at[rows, ids].set(True, mode="drop")


def _completing(known: jax.Array, position: jax.Array, n: int) -> jax.Array:
    """Return the tokens (N, S) that would complete an n-gram for the second time.

    `known` (N, S) are the tokens up to `position`. Places without such a token have an
    id that no token has.
    """
    nothing = jnp.iinfo(jnp.int32).max
    if known.shape[1] < n:
        return jnp.full((len(known), 1), nothing, jnp.int32)
    suffix = jax.lax.dynamic_slice_in_dim(known, position - n + 2, n - 1, axis=1)
    count = known.shape[1] - n + 1
    matches = jnp.arange(count)[None] + n - 1 <= position
    for place in range(n - 1):
        matches &= known[:, place : place + count] == suffix[:, place, None]
    return jnp.where(matches, known[:, n - 1 :], nothing)
