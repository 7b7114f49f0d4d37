"""Beam search. See the package for the shapes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
from transformer_jax.models.caches import reorder_rows, repeat_rows

LENGTH_PENALTY_FORMS = ("wu", "power")
# When the search for a row stops. In the rules of Hugging Face's `generate`, only a
# continuation among the K best may end. "exact" and "hf_never"
# (`early_stopping="never"`): no hypothesis in the beam can beat the worst finished one.
# "hf_false" (False): none could if it ended now, although a longer one might. "hf_true"
# (True): K have finished.
STOPPING_RULES = ("exact", "hf_never", "hf_false", "hf_true")


def lp(length: jax.Array | int, alpha: float, form: str) -> jax.Array:
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


def _join(a: _Beams, b: _Beams) -> _Beams:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, b)


def _for_beams(cache: Cache, beam_size: int) -> Cache:
    if hasattr(cache, "reorder"):
        return cache
    return repeat_rows(cache, beam_size)


def _reordered(cache: Cache, parents: jax.Array) -> Cache:
    if hasattr(cache, "reorder"):
        return cache.reorder(parents)
    return reorder_rows(cache, parents)


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
    end_ids: Sequence[int] = (),
    change: Change | None = None,
) -> Hypotheses:
    """Return the K hypotheses with the largest log P(Y|X) / lp(Y).

    They are found by beam search (Wu et al. 2016, Section 7). K is `beam_size`. The B
    rows of `cache` are repeated K times, and reordered after each step. A cache with a
    method `reorder` has K beams per row from the start; the method gets the old beam
    (B, K) that each new beam continues.

    Each step takes the 2K best continuations of a row. At most K of them end in EOS, so
    K others stay in the beam. Those that end compete for the K places of finished
    hypotheses. Each of the further `end_ids` adds K continuations.

    The search for a row stops, and its finished hypotheses no longer change, once no
    hypothesis in the beam can beat the worst finished one. log P only decreases and lp
    only increases with length, so no score can exceed log P(so far) / lp(T). With
    `n_best`, the caller uses only the first `n_best` places, and the search stops once
    none of these can change. The result in these places is the same but is found
    earlier. Other rules: STOPPING_RULES.

    With `change`, the log-probabilities of the next tokens are changed first, and log P
    is the sum of the changed ones. `change` excludes PAD and BOS, and returns no
    positive value, so that the bound above holds.

    Differs: Wu et al. also prune hypotheses whose log-probability is too far below the
    best. Here, only rank counts.

    Raises ValueError if `length_penalty` or `length_penalty_form` is invalid, see `lp`,
    or `stopping_rule` is unknown.
    """
    if stopping_rule not in STOPPING_RULES:
        raise UserError(
            f"{stopping_rule=}: must be one of {STOPPING_RULES}; "
            "use 'exact' if in doubt"
        )
    B, K, T = batch_size, beam_size, max_length
    fill, exact = eos_id if pad_id is None else pad_id, stopping_rule == "exact"
    wanted = min(n_best or K, K) if exact else K
    ends = (eos_id, *end_ids)
    forbidden = never_chosen(bos_id, pad_id, ends)
    kept_in_step = (1 + len(ends)) * K

    def score(log_probabilities, length):
        penalized = log_probabilities / lp(length, length_penalty, length_penalty_form)
        return jnp.where(log_probabilities > IMPOSSIBLE, penalized, IMPOSSIBLE)

    def unfinished(state):
        position, _, _, done, _ = state
        return (position < T) & ~done.all()

    def advance(state):
        position, alive, finished, done, cache = state
        logits, cache = step(
            cache, alive.tokens[:, :, position].reshape(B * K), position
        )

        # Each of the 2K best of a row is among the 2K best of its beam. This is cheaper
        # than searching all K·V.
        if change is None:
            best_of_each = best_tokens(logits, kept_in_step, forbidden)
        else:
            changed = change(
                jax.nn.log_softmax(logits), alive.tokens.reshape(B * K, -1), position
            )
            best_of_each = k_largest(changed, min(kept_in_step, changed.shape[-1]))
        added, tokens = (x.reshape(B, K, -1) for x in best_of_each)
        totals = jnp.maximum(alive.log_probabilities[:, :, None] + added, IMPOSSIBLE)
        totals, chosen = jax.lax.top_k(totals.reshape(B, -1), kept_in_step)
        parents, token = chosen // added.shape[-1], take(tokens.reshape(B, -1), chosen)
        continued = take(alive.tokens, parents).at[:, :, position + 1].set(token)
        ended = is_end(token, ends)

        going_on, kept = jax.lax.top_k(jnp.where(ended, IMPOSSIBLE, totals), K)
        alive = _Beams(take(continued, kept), going_on, going_on)
        parents = take(parents, kept)
        cache = _reordered(cache, parents)

        may_end = ended if exact else ended & (jnp.arange(kept_in_step)[None] < K)
        # rounding could exceed the bound in done rows
        new = jnp.where(may_end & ~done[:, None], totals, IMPOSSIBLE)
        finished = _join(finished, _Beams(continued, new, score(new, position + 1)))
        finished = take(finished, jax.lax.top_k(finished.scores, K)[1])
        best = score(
            alive.log_probabilities[:, 0],
            position + 1 if stopping_rule == "hf_false" else T,
        )
        worst = finished.scores[:, wanted - 1]
        done |= worst > IMPOSSIBLE if stopping_rule == "hf_true" else best <= worst
        return position + 1, alive, finished, done, cache

    tokens = jnp.full((B, K, 1 + T), fill, jnp.int32).at[:, :, 0].set(bos_id)
    none = jnp.full((B, K), IMPOSSIBLE, jnp.float32)
    # start with one beam, because K equal beams would find the same hypotheses
    first = none.at[:, 0].set(0.0)
    beams, found = _Beams(tokens, first, first), _Beams(tokens, none, none)
    state = (jnp.int32(0), beams, found, jnp.zeros(B, bool), _for_beams(cache, K))
    _, alive, finished, _, _ = jax.lax.while_loop(unfinished, advance, state)
    return _outputs(
        finished, alive._replace(scores=score(alive.log_probabilities, T)), fill
    )


def _outputs(finished: _Beams, cut_off: _Beams, fill: int) -> Hypotheses:
    """Return the K finished hypotheses.

    Their empty places have those that were cut off.
    """
    K = finished.scores.shape[1]
    place, count = (
        jnp.arange(K)[None],
        (finished.scores > IMPOSSIBLE).sum(axis=1, keepdims=True),
    )
    best = take(
        _join(finished, cut_off), jnp.where(place < count, place, K + place - count)
    )
    exists = best.scores > IMPOSSIBLE
    scores, log_probabilities = (
        jnp.where(exists, x, -jnp.inf) for x in (best.scores, best.log_probabilities)
    )
    return Hypotheses(
        jnp.where(exists[:, :, None], best.tokens[:, :, 1:], fill),
        scores,
        log_probabilities,
    )
