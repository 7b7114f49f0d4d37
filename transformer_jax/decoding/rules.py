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
            position: the index of the newest token, a scalar.
        """
        size = scores.shape[-1]
        is_written = jnp.arange(tokens.shape[1]) <= position
        written = jnp.where(is_written, tokens, size)
        changed = scores
        if self.repetition_penalty != 1:
            seen = _marked(written, size)
            changed = penalize(changed, seen, self.repetition_penalty)
        ids = jnp.arange(size)
        barred = jnp.isin(ids, jnp.array(self.forbidden, jnp.int32))[None]
        if self.no_repeat_ngram:
            repeating = _completing(written, position, self.no_repeat_ngram)
            barred |= _marked(repeating, size)
        if self.min_tokens:
            is_early = position + 2 - self.given < self.min_tokens
            is_end = jnp.isin(jnp.arange(size), jnp.array(self.ends))[None]
            barred |= is_early & is_end
        changed = jnp.where(barred, IMPOSSIBLE, changed)
        if self.first_id >= 0:
            first = certain(self.first_id, size)[None]
            changed = jnp.where(position + 1 == self.given, first, changed)
        decided = (scores > IMPOSSIBLE).sum(axis=-1, keepdims=True) == 1
        changed = jnp.where(decided, scores, changed)
        if self.renormalize:
            return jax.nn.log_softmax(changed)
        return changed


def rules(
    options: Any, ends: Sequence[int], forbidden: Sequence[int], given: int = 1
) -> Rules | None:
    """Return the rules of a `SamplingConfig`, or None if they change nothing.

    `forbidden` are the ids that the search excludes in any case. See `Rules` for the
    other arguments.
    """
    names = {field.name for field in dataclasses.fields(Rules)}
    chosen = {name: getattr(options, name) for name in names if hasattr(options, name)}
    all_forbidden = (*forbidden, *options.forbidden_ids)
    requested = Rules(tuple(ends), all_forbidden, given=given, **chosen)
    default = Rules(tuple(ends), tuple(forbidden), given=given)
    return None if requested == default else requested


def _marked(ids: jax.Array, size: int) -> jax.Array:
    """Return (N, `size`) bool, True at the ids (N, S) of each row.

    Ids ≥ `size` are ignored.
    """
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], size), bool).at[rows, ids].set(True, mode="drop")


def _completing(written: jax.Array, position: jax.Array, n: int) -> jax.Array:
    """Return the tokens (N, S - n + 1) that would complete an n-gram for the second
    time.

    Entry i is the last token of the n-gram that starts at i, or an id that no token has
    if the other tokens of this n-gram are not the newest ones. `written` (N, S) are the
    tokens up to `position`.
    """
    nothing = jnp.iinfo(jnp.int32).max
    if written.shape[1] < n:
        return jnp.full((written.shape[0], 1), nothing, jnp.int32)
    newest = jax.lax.dynamic_slice_in_dim(written, position - n + 2, n - 1, axis=1)
    count = written.shape[1] - n + 1
    matches = jnp.arange(count)[None] + n - 1 <= position
    for i in range(n - 1):
        matches &= written[:, i : i + count] == newest[:, i, None]
    return jnp.where(matches, written[:, n - 1 :], nothing)
