"""Decoding of connectionist temporal classification, CTC (Graves et al. 2006).

At each position s of the source, a model has a distribution over labels and the blank.
An alignment π has an id for each position. It becomes a labelling l once equal
neighbours are merged and blanks removed, and P(l) is the sum over its alignments.

So CTC is also a distribution over the next label: P(c | g) = P(g·c …) / P(g …), where
P(g …) is the sum over all labellings that begin with g. `prefixes` is this distribution
as a `Step`. Beam search with it is the prefix search of Graves et al., Section 3.2,
with K prefixes at a time, and its scores are exact: log P(l) for a whole labelling. A
weighted sum with the scores of a decoder is the joint decoding of Watanabe et al. 2017.

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
    rows = jnp.arange(len(best))[:, None]
    tokens = jnp.full((len(best), max_length), blank, jnp.int32)
    tokens = tokens.at[rows, place].set(best, mode="drop")
    total = log_probabilities.max(axis=-1).sum(axis=1, keepdims=True)
    return Hypotheses(tokens[:, None], total, total)


class Prefix(NamedTuple):
    """Log-probabilities of the alignments of the first s positions, s = 0, …, S, whose
    labelling is a prefix g: the forward variables γ of Graves et al. 2006, Section 3.2.

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
    rows, _, size = log_probabilities.shape
    blanks = log_probabilities[:, :, blank]

    def step(prefix: Prefix, newest: Array, position: Array) -> tuple[Array, Prefix]:
        shared = prefix.last.shape[0] // rows  # K beams of a row
        emitted = jnp.repeat(log_probabilities, shared, axis=0)
        longer = _extended(prefix, newest, emitted, blank)
        prefix = jax.tree.map(
            lambda old, new: jnp.where(position > 0, new, old), prefix, longer
        )
        before = jnp.logaddexp(prefix.label, prefix.blank)[:, :-1, None]
        repeated = jnp.arange(size)[None] == prefix.last[:, None]
        before = jnp.where(repeated[:, None], prefix.blank[:, :-1, None], before)
        scores = jax.nn.logsumexp(before + emitted, axis=1)
        whole = jnp.logaddexp(prefix.label[:, -1], prefix.blank[:, -1])
        return scores.at[:, blank].set(whole), prefix

    silent = jnp.pad(jnp.cumsum(blanks, axis=1), ((0, 0), (1, 0)))
    empty = Prefix(
        label=jnp.full_like(silent, IMPOSSIBLE),
        blank=silent,
        last=jnp.full(rows, blank, jnp.int32),
    )
    return step, empty


def _extended(prefix: Prefix, label: Array, emitted: Array, blank: int) -> Prefix:
    """Return g·c, given g, the label c (N,), and log-probabilities (N, S, V).

    γ_label(s, g·c) = p_s(c) · (γ_label(s - 1, g·c) + φ(s - 1)), where φ is P of the
    alignments of g that c may follow: all, or those that end in a blank if c is the
    last label of g. γ_blank(s, g·c) = p_s(blank) · (γ_label + γ_blank)(s - 1, g·c).
    """
    after = jnp.logaddexp(prefix.label, prefix.blank)
    after = jnp.where((label == prefix.last)[:, None], prefix.blank, after)
    of_label = jnp.take_along_axis(emitted, label[:, None, None], axis=2)[:, :, 0]

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
    inputs = (after[:, :-1].T, of_label.T, emitted[:, :, blank].T)
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
    · those of the second, where μ is `weight` (Watanabe et al. 2017, Section II-C), and
    its cache with `beams` beams of each row.

    The probabilities of a step must sum to 1, and these sum to less. The rest is that
    of the id `unused`, which is never chosen. So the score of an output is the weighted
    sum of the two log-probabilities.
    """
    one, its_cache = first
    other, other_cache = second

    def step(cache: Joint, newest: Array, position: Array) -> tuple[Array, Joint]:
        logits, after = one(cache.first, newest, position)
        others, after_other = other(cache.second, newest, position)
        p = jax.nn.log_softmax(logits)
        q = jax.nn.log_softmax(others)
        possible = jnp.minimum(p, q) > IMPOSSIBLE / 2
        scores = jnp.where(possible, (1 - weight) * p + weight * q, IMPOSSIBLE)
        scores = scores.at[:, unused].set(IMPOSSIBLE)
        rest = 1 - jnp.exp(scores).sum(axis=-1)
        rest = jnp.log(jnp.maximum(rest, jnp.finfo(rest.dtype).tiny))
        return scores.at[:, unused].set(rest), Joint(after, after_other)

    cache = Joint(
        caches.for_beams(its_cache, beams), caches.for_beams(other_cache, beams)
    )
    return step, cache
