"""An n-gram language model with interpolated Kneser–Ney smoothing.

Chen and Goodman 1999, "An empirical study of smoothing techniques for language
modeling", Sections 2.7 and 3. Kneser and Ney 1995 have the idea: an n-gram of a lower
order counts as often as there are different tokens before it.

Names are those of the paper: c is a count, D a discount, γ the weight of the next lower
order, n_i the number of n-grams that occur i times, N_i(h •) the number of tokens that
occur i times after h.
"""

import logging
from typing import NamedTuple

import numpy as np

from transformer_jax.baselines.ngrams import Table, count_ngrams, find_ngrams
from transformer_jax.data.ragged import Ragged

DISCOUNTS = ("one", "modified")
# D1, D2 and D3+ where the counts do not determine them
FALLBACK = {"one": (0.5, 0.5, 0.5), "modified": (0.5, 1.0, 1.5)}

log = logging.getLogger(__name__)


class Level(NamedTuple):
    """The k-grams h w of a model.

    keys: (n,) see `ngrams`.
    log_probability: (n,) log P(w | h), interpolated with all lower orders.
    log_backoff: (n,) log γ(h w), the weight of lower orders after the k-gram: 0 where
        no longer one begins with it.
    """

    keys: np.ndarray
    log_probability: np.ndarray
    log_backoff: np.ndarray


class NgramModel(NamedTuple):
    """A model of order n = len(levels), of tokens 0 to `vocab_size` - 1."""

    levels: list[Level]
    vocab_size: int

    @property
    def order(self) -> int:
        """n, the length of the longest n-grams."""
        return len(self.levels)

    def log_probabilities(self, texts: Ragged) -> np.ndarray:
        """Return log P(token | up to n - 1 tokens before it in its text), in nats, for
        every token of `texts` (tokens,).

        P(w | h) is that of the longest n-gram h w of the model, times the weights γ of
        all longer contexts that the model has. It is 0 for tokens that are never
        predicted.
        """
        result = self.levels[0].log_probability[texts.values]
        keys = [level.keys for level in self.levels]
        orders = find_ngrams(keys, texts, self.vocab_size)
        for level, lower, places in zip(
            self.levels[1:], self.levels[:-1], orders, strict=True
        ):
            backed_off = result[places.ends]
            has_context = places.contexts >= 0
            backed_off[has_context] += lower.log_backoff[places.contexts[has_context]]
            is_known = places.rows >= 0
            backed_off[is_known] = level.log_probability[places.rows[is_known]]
            result[places.ends] = backed_off
        return result


def estimate(
    texts: Ragged, order: int, predicted: np.ndarray, discounts: str = "modified"
) -> NgramModel:
    """Estimate a model of order n from texts.

    For k < n, the k-grams are counted by the number of different tokens before them,
    c(w_1 … w_k) = N_1+(• w_1 … w_k) (Section 2.7); for k = n, by their occurrences.
    P_k(w | h) = (c(h w) - D(c(h w))) / Σ_v c(h v) + γ(h) P_k-1(w | h′), where h′ is h
    without its first token and γ(h) = Σ_i D_i N_i(h •) / Σ_v c(h v). P_0 is uniform
    over the tokens that are predicted, so that unseen ones have a probability.

    Differs: A text begins with one begin token, not with n - 1. An n-gram that contains
    it has no token before it, so it counts by its occurrences, as in KenLM (Heafield et
    al. 2013). A discount that the counts do not determine, in a text too small, is that
    of KenLM's option --discount_fallback.

    Args:
        texts: ids of each text. The first is a begin token, which is given and not
            predicted.
        order: n ≥ 1.
        predicted: (V,) True for ids that may follow. It is False for the begin token,
            unless that is also the token which ends texts.
        discounts: "one" discount of each order, or "modified": D1, D2 and D3+, see
            `discounts_of`.
    """
    vocab_size = len(predicted)
    tables = count_ngrams(texts, order, vocab_size)
    probability = predicted / predicted.sum()  # P_0
    levels: list[Level] = []
    for k, table in enumerate(tables, 1):
        counts = adjusted_counts(table, tables[k] if k < order else None)
        if k == 1:
            counts = np.where(predicted, counts, 0)
            contexts = np.zeros_like(table.keys)  # all have the empty context
            num_contexts = 1
            lower = probability
        else:
            contexts = table.keys // vocab_size
            num_contexts = len(levels[-1].keys)
            lower = probability[table.suffixes]
        discount = discounts_of(counts, discounts, k)[np.minimum(counts, 3)]
        share, gamma = discounted(counts, discount, contexts, num_contexts)
        probability = share + gamma[contexts] * lower
        if k == 1:
            probability[~predicted] = 0
        else:
            levels[-1].log_backoff[:] = np.log(gamma)
        with np.errstate(divide="ignore"):  # log 0 = -inf
            log_probability = np.log(probability)
        levels.append(Level(table.keys, log_probability, np.zeros(len(table.keys))))
    return NgramModel(levels, vocab_size)


def adjusted_counts(table: Table, following: Table | None) -> np.ndarray:
    """Return c of each k-gram (n,): N_1+(• w_1 … w_k), from the table of order k + 1,
    or without it the number of occurrences.
    """
    if following is None:
        return table.counts
    before = np.bincount(following.suffixes, minlength=len(table.keys))
    return np.where(table.initial, table.counts, before)


def discounted(
    counts: np.ndarray, discount: np.ndarray, contexts: np.ndarray, num_contexts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (c(h w) - D) / Σ_v c(h v) of each k-gram h w (n,), and γ of each context h
    (num_contexts,), which is 1 if nothing continues it.

    `contexts` (n,) has the number of each k-gram's context.
    """
    totals = np.bincount(contexts, counts, num_contexts)
    taken = np.bincount(contexts, discount, num_contexts)  # Σ_i D_i N_i(h •)
    is_continued = totals > 0
    totals = np.where(is_continued, totals, 1)
    gamma = np.where(is_continued, taken / totals, 1)
    return (counts - discount) / totals[contexts], gamma


def discounts_of(counts: np.ndarray, discounts: str, order: int) -> np.ndarray:
    """Return the discounts of n-grams with the counts 0, 1, 2, and 3 or more (4,).

    With Y = n_1 / (n_1 + 2 n_2), "one" is D = Y (Section 2.7), and "modified" is D1 =
    1 - 2 Y n_2 / n_1, D2 = 2 - 3 Y n_3 / n_2 and D3+ = 3 - 4 Y n_4 / n_3 (eq. 17). If
    one of these n_i is 0, or a discount is not in (0, i), those of FALLBACK are taken,
    and a message says so.
    """
    n1, n2, n3, n4 = (float(np.sum(counts == i)) for i in range(1, 5))
    values: tuple[float, ...] = ()
    most = (1, 1, 1) if discounts == "one" else (1, 2, 3)
    if discounts == "one" and n1 and n2:
        y = n1 / (n1 + 2 * n2)
        values = (y, y, y)
    elif discounts == "modified" and n1 and n2 and n3 and n4:
        y = n1 / (n1 + 2 * n2)
        values = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    fits = all(0 < value < limit for value, limit in zip(values, most, strict=False))
    if not values or not fits:
        values = FALLBACK[discounts]
        log.info(
            "order %d: the counts of this text determine no discounts; they are %s",
            order,
            ", ".join(f"{value:g}" for value in sorted(set(values))),
        )
    return np.array([0.0, *values])
