"""Beam search. See the package for the shapes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.decoding import caches
from transformer_jax.decoding.distributions import best_tokens, k_largest
from transformer_jax.decoding.steps import (
    IMPOSSIBLE,
    Cache,
    Change,
    Hypotheses,
    Step,
    is_end,
    never_chosen,
    take,
)
from transformer_jax.errors import UserError

LENGTH_PENALTY_FORMS = ("wu", "power")
# When the search for a row stops. In the rules of Hugging Face's `generate`, only a
# continuation among the K best may end. "exact" and "hf_never"
# (`early_stopping="never"`): no hypothesis in the beam can beat the worst finished one.
# "hf_false" (False): none could if it ended now, although a longer one might. "hf_true"
# (True): K have finished.
STOPPING_RULES = ("exact", "hf_never", "hf_false", "hf_true")


def lp(
    length: jax.Array | int,
    alpha: float,
    form: str,
) -> jax.Array:
    """Return the length penalty lp(Y) for |Y| = `length` tokens, including EOS.

    form: "wu" is ((5 + |Y|) / 6)^α (Wu et al. 2016, eq. 14); "power" is |Y|^α. α is
        `alpha`.

    Differs: There is no coverage penalty, which is the other term of that equation.
    Raises ValueError if `alpha` is negative or not finite, or `form` is unknown.
    """
    if form not in LENGTH_PENALTY_FORMS or not 0 <= alpha < math.inf:
        raise UserError(
            f"{form=}, {alpha=}: form must be one "
            f"of {LENGTH_PENALTY_FORMS} and alpha ≥ 0; use 0 for no penalty"
        )
    length = jnp.asarray(length, jnp.float32)
    return ((5.0 + length) / 6.0) ** alpha if form == "wu" else length**alpha


class _Beams(NamedTuple):
    """Hypotheses of each row. A score of IMPOSSIBLE marks an empty place."""

    tokens: jax.Array  # (B, K, 1 + T), BOS first
    log_probabilities: jax.Array  # (B, K)
    scores: jax.Array  # (B, K)


class _State(NamedTuple):
    """The state of the search after the step at `position` - 1."""

    position: jax.Array
    alive: _Beams  # not ended; the scores are the log-probabilities
    finished: _Beams
    done: jax.Array  # (B,), True where the search has stopped
    cache: Cache


def _join(
    a: _Beams,
    b: _Beams,
) -> _Beams:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, b)


@dataclasses.dataclass(frozen=True)
class _Ranking:
    """Rules that rank hypotheses and stop a search.

    max_length: T.
    beam_size: K.
    n_best: the number of finished hypotheses that the caller uses.
    ranks_cut: hypotheses of T tokens rank as if they had ended.
    """

    length_penalty: float
    length_penalty_form: str
    stopping_rule: str
    max_length: int
    beam_size: int
    n_best: int
    ranks_cut: bool

    def __post_init__(self) -> None:
        if self.stopping_rule not in STOPPING_RULES:
            raise UserError(
                f"stopping_rule={self.stopping_rule!r}: must be one of "
                f"{STOPPING_RULES}; use 'exact' if in doubt"
            )

    def score(
        self,
        log_probabilities: jax.Array,
        length: jax.Array | int,
    ) -> jax.Array:
        """Return log P / lp for hypotheses of `length` tokens."""
        penalty = lp(length, self.length_penalty, self.length_penalty_form)
        penalized = log_probabilities / penalty
        return jnp.where(log_probabilities > IMPOSSIBLE, penalized, IMPOSSIBLE)

    def may_end(
        self,
        ended: jax.Array,
        length: jax.Array,
    ) -> jax.Array:
        """Return which of the best continuations of `length` tokens may end.

        They are (B, C), best first; `ended` is True at those whose last token is EOS.
        """
        if self.ranks_cut:
            ended = ended | (length == self.max_length)
        if self.stopping_rule == "exact":
            return ended
        rank = jnp.arange(ended.shape[1])[None]
        return ended & (rank < self.beam_size)

    def stops(
        self,
        alive: _Beams,
        finished: _Beams,
        length: jax.Array,
    ) -> jax.Array:
        """Return the rows (B,) in which hypotheses of `length` tokens cannot win."""
        last = self.beam_size
        if self.stopping_rule == "exact":
            last = min(self.n_best, last)
        worst = finished.scores[:, last - 1]
        if self.stopping_rule == "hf_true":
            return worst > IMPOSSIBLE
        if self.stopping_rule != "hf_false":
            length = jnp.int32(self.max_length)
        best = self.score(alive.log_probabilities[:, 0], length)
        return best <= worst


def beam_search(
    step: Step,
    cache: Cache,
    *,
    batch_size: int,
    max_length: int,
    beam_size: int,
    length_penalty: float,
    length_penalty_form: str,
    bos_id: int,
    eos_id: int,
    pad_id: int | None,
    n_best: int | None = None,
    stopping_rule: str = "exact",
    ranks_cut: bool = False,
    end_ids: Sequence[int] = (),
    change: Change | None = None,
) -> Hypotheses:
    """Return the K hypotheses with the largest log P(Y|X) / lp(Y).

    They are found by beam search (Wu et al. 2016, Section 7). K is `beam_size`. The B
    rows of `cache` are repeated K times, and reordered after each step. A cache that is
    `Arranged` has K beams per row from the start (see `decoding.caches`).

    Each step takes the 2K best continuations of a row. At most K of them end in EOS, so
    K others stay in the beam. Those that end compete for the K places of finished
    hypotheses. Each of the further `end_ids` adds K continuations.

    The search for a row stops, and its finished hypotheses no longer change, once no
    hypothesis in the beam can beat the worst finished one. log P only decreases and lp
    only increases with length, so no score can exceed log P(so far) / lp(T). With
    `n_best`, the caller uses only the first `n_best` places, and the search stops once
    none of these can change. The result in these places is the same but is found
    earlier. Other rules: STOPPING_RULES.

    Hypotheses of `max_length` tokens that have not ended rank below all that have, or
    with `ranks_cut`, among them.

    With `change`, the log-probabilities of the next tokens are changed first, and log P
    is the sum of the changed ones. `change` excludes PAD and BOS, and returns no
    positive value, so that the bound above holds.

    Differs: Wu et al. also prune hypotheses whose log-probability is too far below the
    best. Here, only rank counts.

    Raises ValueError if `length_penalty` or `length_penalty_form` is invalid, see `lp`,
    or `stopping_rule` is unknown.
    """
    fill = eos_id if pad_id is None else pad_id
    ends = (eos_id, *end_ids)
    forbidden = never_chosen(bos_id, pad_id, ends)
    count = (1 + len(ends)) * beam_size
    ranking = _Ranking(
        length_penalty,
        length_penalty_form,
        stopping_rule,
        max_length,
        beam_size,
        n_best or beam_size,
        ranks_cut,
    )

    def unfinished(state: _State) -> jax.Array:
        return (state.position < max_length) & ~state.done.all()

    def advance(state: _State) -> _State:
        position = state.position
        alive = state.alive
        newest = alive.tokens[:, :, position].reshape(-1)
        logits, cache = step(state.cache, newest, position)
        if change is None:
            added, tokens = best_tokens(logits, count, forbidden)
        else:
            texts = alive.tokens.reshape(newest.shape[0], -1)
            changed = change(jax.nn.log_softmax(logits), texts, position)
            added, tokens = k_largest(changed, min(count, changed.shape[-1]))
        totals, parents, token = _best(alive, added, tokens, count)
        continued = take(alive.tokens, parents)
        continued = continued.at[:, :, position + 1].set(token)
        ended = is_end(token, ends)

        going_on = jnp.where(ended, IMPOSSIBLE, totals)
        going_on, kept = jax.lax.top_k(going_on, beam_size)
        alive = _Beams(take(continued, kept), going_on, going_on)
        cache = caches.reorder(cache, take(parents, kept))

        # rounding could exceed the bound in rows that are done
        may_end = ranking.may_end(ended, position + 1) & ~state.done[:, None]
        new = jnp.where(may_end, totals, IMPOSSIBLE)
        new_scores = ranking.score(new, position + 1)
        finished = _join(state.finished, _Beams(continued, new, new_scores))
        finished = _best_beams(finished, beam_size)
        done = state.done | ranking.stops(alive, finished, position + 1)
        return _State(position + 1, alive, finished, done, cache)

    start = _start(batch_size, beam_size, max_length, bos_id, fill)
    state = start._replace(cache=caches.for_beams(cache, beam_size))
    state = jax.lax.while_loop(unfinished, advance, state)
    scores = ranking.score(state.alive.log_probabilities, max_length)
    return _outputs(state.finished, state.alive._replace(scores=scores), fill)


def _start(
    batch_size: int,
    beam_size: int,
    max_length: int,
    bos_id: int,
    fill: int,
) -> _State:
    """Return the state before the first step, without a cache."""
    shape = (batch_size, beam_size)
    tokens = jnp.full((*shape, 1 + max_length), fill, jnp.int32)
    tokens = tokens.at[:, :, 0].set(bos_id)
    none = jnp.full(shape, IMPOSSIBLE, jnp.float32)
    # start with one beam, because K equal beams would find the same hypotheses
    first = none.at[:, 0].set(0.0)
    return _State(
        position=jnp.int32(0),
        alive=_Beams(tokens, first, first),
        finished=_Beams(tokens, none, none),
        done=jnp.zeros(batch_size, bool),
        cache=None,
    )


def _best(
    alive: _Beams,
    added: jax.Array,
    tokens: jax.Array,
    count: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log P, the old beam and the new token of the `count` best continuations of
    each row, each (B, `count`).

    `added` and `tokens` (B·K, C) are the best of each beam: their log-probabilities and
    ids. Each of the best of a row is among the best of its beam, so this is cheaper
    than searching all K·V.
    """
    rows, beams = alive.log_probabilities.shape
    added = added.reshape(rows, beams, -1)
    totals = alive.log_probabilities[:, :, None] + added
    totals = jnp.maximum(totals, IMPOSSIBLE)
    totals, chosen = jax.lax.top_k(totals.reshape(rows, -1), count)
    parents = chosen // added.shape[-1]
    return totals, parents, take(tokens.reshape(rows, -1), chosen)


def _best_beams(
    beams: _Beams,
    count: int,
) -> _Beams:
    _, chosen = jax.lax.top_k(beams.scores, count)
    return take(beams, chosen)


def _outputs(
    finished: _Beams,
    cut_off: _Beams,
    fill: int,
) -> Hypotheses:
    """Return the K finished hypotheses.

    Their empty places have those that were cut off.
    """
    beams = finished.scores.shape[1]
    place = jnp.arange(beams)[None]
    count = (finished.scores > IMPOSSIBLE).sum(axis=1, keepdims=True)
    source = jnp.where(place < count, place, beams + place - count)
    best = take(_join(finished, cut_off), source)
    exists = best.scores > IMPOSSIBLE
    return Hypotheses(
        tokens=jnp.where(exists[:, :, None], best.tokens[:, :, 1:], fill),
        scores=jnp.where(exists, best.scores, -jnp.inf),
        log_probabilities=jnp.where(exists, best.log_probabilities, -jnp.inf),
    )
