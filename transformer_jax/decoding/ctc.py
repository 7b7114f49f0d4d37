"""Decoding of connectionist temporal classification, CTC (Graves et al. 2006).

At each position s of the source, a model has a distribution over labels and the blank.
An alignment π has an id for each position. It becomes a labelling l once equal
neighbours are merged and blanks removed, and P(l) is the sum over its alignments.

So CTC is also a distribution over the next label: P(c | g) = P(g·c …) / P(g …), where
P(g …) is the sum over all labellings that begin with g. `prefixes` is this distribution
as a `Step`. Beam search with it is the prefix search of Graves et al. 2006, Section
3.2, with K prefixes at a time, and its scores are exact: log P(l) for a whole
labelling. A weighted sum with the scores of a decoder is the joint decoding of Watanabe
et al. 2017.

The blank has the id that ends a labelling, which is no label.

Shapes: B batch · K beams · N = B·K rows · S source positions · V vocabulary · T largest
number of labels, and the end.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from transformer_jax.decoding import caches
from transformer_jax.decoding.steps import IMPOSSIBLE, Hypotheses, Step, certain

Array = jax.Array


def log_probabilities(logits: Array, valid: Array, blank: int) -> Array:
    """Return the log-probabilities (B, S, V) of the ids at each position.

    Padding, where `valid` (B, S) is False, is certainly blank, so it adds nothing to a
    labelling.
    """
    padding = certain(blank, logits.shape[-1])[None, None]
    scores = jnp.maximum(jax.nn.log_softmax(logits), IMPOSSIBLE)
    return jnp.where(valid[:, :, None], scores, padding)


def best_path(log_probabilities: Array, max_length: int, blank: int) -> Hypotheses:
    """Return the labelling of the most probable alignment (Graves et al. 2006, Section
    3.2, "best path decoding"), cut to T = `max_length` ids.

    Its score is the log-probability of this alignment alone.

    log_probabilities: (B, S, V), see the function of this name.
    """
    best = log_probabilities.argmax(axis=-1).astype(jnp.int32)
    before = jnp.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=blank)
    is_label = (best != blank) & (best != before)
    place = jnp.where(is_label, jnp.cumsum(is_label, axis=1) - 1, max_length)
    rows = jnp.arange(best.shape[0])[:, None]
    tokens = jnp.full((best.shape[0], max_length), blank, jnp.int32)
    tokens = tokens.at[rows, place].set(best, mode="drop")
    total = log_probabilities.max(axis=-1).sum(axis=1, keepdims=True)
    return Hypotheses(tokens[:, None], total, total)


class Prefix(NamedTuple):
    """Log-probabilities of the alignments of the first s positions, s = 0, …, S, whose
    labelling is a prefix g: the logarithms of γ in Graves 2012, "Supervised Sequence
    Labelling with Recurrent Neural Networks", where prefix search is given in full.

    label: (N, 1 + S), those that end in the last label of g.
    blank: (N, 1 + S), those that end in a blank.
    last: (N,), the last label of g, or the blank if g is empty.
    """

    label: Array
    blank: Array
    last: Array


def prefixes(log_probabilities: Array, blank: int) -> tuple[Step, Prefix]:
    """Return the step that scores the next label or the end, and the empty prefix of
    each row, N = B.

    The step's logits (N, V) are log P(g·c …) for each label c, and log P(g) for the
    end. Their softmax is P(c | g).

    log_probabilities: (B, S, V), see the function of this name.
    """
    rows = log_probabilities.shape[0]
    blanks = log_probabilities[:, :, blank]

    def emitted(label: Array) -> Array:
        """Return the log-probabilities (N, S) of one label (N,) for each prefix."""
        labels = label.reshape(rows, 1, -1)  # (B, 1, K)
        columns = jnp.take_along_axis(log_probabilities, labels, axis=2)
        return columns.swapaxes(1, 2).reshape(label.shape[0], -1)

    def step(prefix: Prefix, newest: Array, position: Array) -> tuple[Array, Prefix]:
        beams = newest.shape[0] // rows
        silence = jnp.repeat(blanks, beams, axis=0)
        longer = _extended(prefix, newest, emitted(newest), silence)
        prefix = jax.tree.map(
            lambda old, new: jnp.where(position > 0, new, old), prefix, longer
        )
        before = jnp.logaddexp(prefix.label, prefix.blank)
        of_row = before[:, :-1].reshape(rows, beams, -1, 1)  # (B, K, S, 1)
        scores = jax.nn.logsumexp(of_row + log_probabilities[:, None], axis=2)
        scores = scores.reshape(newest.shape[0], -1)
        # the last label is new only after a blank
        repeated = prefix.blank[:, :-1] + emitted(prefix.last)
        every = jnp.arange(newest.shape[0])
        scores = scores.at[every, prefix.last].set(jax.nn.logsumexp(repeated, axis=1))
        return scores.at[:, blank].set(before[:, -1]), prefix

    silent = jnp.pad(jnp.cumsum(blanks, axis=1), ((0, 0), (1, 0)))
    empty = Prefix(
        label=jnp.full_like(silent, IMPOSSIBLE),
        blank=silent,
        last=jnp.full(rows, blank, jnp.int32),
    )
    return step, empty


def _extended(prefix: Prefix, label: Array, emitted: Array, silence: Array) -> Prefix:
    """Return g·c, given g, the label c (N,), and the log-probabilities of c and of the
    blank at each position, both (N, S).

    γ_label(s, g·c) = p_s(c) · (γ_label(s - 1, g·c) + φ(s - 1)), where φ is P of the
    alignments of g that c may follow: all, or those that end in a blank if c is the
    last label of g. γ_blank(s, g·c) = p_s(blank) · (γ_label + γ_blank)(s - 1, g·c).
    """
    after = jnp.logaddexp(prefix.label, prefix.blank)
    after = jnp.where((label == prefix.last)[:, None], prefix.blank, after)

    def advance(
        before: tuple[Array, Array], inputs: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        in_label, in_blank = before
        after, as_label, as_blank = inputs
        now = (
            as_label + jnp.logaddexp(in_label, after),
            as_blank + jnp.logaddexp(in_label, in_blank),
        )
        return now, now

    nothing = jnp.full(label.shape, IMPOSSIBLE)
    inputs = (after[:, :-1].T, emitted.T, silence.T)
    _, (in_label, in_blank) = jax.lax.scan(advance, (nothing, nothing), inputs)
    begin = ((0, 0), (1, 0))
    return Prefix(
        label=jnp.pad(in_label.T, begin, constant_values=IMPOSSIBLE),
        blank=jnp.pad(in_blank.T, begin, constant_values=IMPOSSIBLE),
        last=label,
    )


class Joint(NamedTuple):
    """The caches of two steps, see `joint`."""

    first: Any
    second: Any

    def repeat(self, count: int) -> Self:
        """See `caches.Arranged`."""
        return self._replace(
            first=caches.repeat(self.first, count),
            second=caches.repeat(self.second, count),
        )

    def reorder(self, parents: Array) -> Self:
        """See `caches.Arranged`."""
        return self._replace(
            first=caches.reorder(self.first, parents),
            second=caches.reorder(self.second, parents),
        )


def joint(
    first: tuple[Step, Any],
    second: tuple[Step, Any],
    weight: float,
    beams: int,
    unused: int,
) -> tuple[Step, Joint]:
    """Return the step whose log-probabilities are (1 - μ) · those of the first step + μ
    · those of the second, where μ is `weight` (Watanabe et al. 2017, in the part on
    decoding), and its cache with `beams` beams of each row.

    The probabilities of a step must sum to 1, and these sum to less. The rest is that
    of the id `unused`, which is never chosen. So the score of an output is the weighted
    sum of the two log-probabilities. If both steps are certain, there is no rest.
    """
    first_step, first_cache = first
    second_step, second_cache = second

    def step(cache: Joint, newest: Array, position: Array) -> tuple[Array, Joint]:
        first_logits, after_first = first_step(cache.first, newest, position)
        second_logits, after_second = second_step(cache.second, newest, position)
        p = jax.nn.log_softmax(first_logits)
        q = jax.nn.log_softmax(second_logits)
        possible = jnp.minimum(p, q) > IMPOSSIBLE / 2
        scores = jnp.where(possible, (1 - weight) * p + weight * q, IMPOSSIBLE)
        scores = scores.at[:, unused].set(IMPOSSIBLE)
        rest = 1 - jnp.exp(scores).sum(axis=-1)
        tiny = jnp.finfo(rest.dtype).tiny
        rest = jnp.where(rest > 0, jnp.log(jnp.maximum(rest, tiny)), IMPOSSIBLE)
        cache = Joint(after_first, after_second)
        return scores.at[:, unused].set(rest), cache

    cache = Joint(
        first=caches.for_beams(first_cache, beams),
        second=caches.for_beams(second_cache, beams),
    )
    return step, cache
