"""Metrics that compare predictions with references."""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import sacrebleu

from transformer_jax.errors import UserError

# The tokenizers of sacreBLEU that download nothing, and the extras of this package that
# two of them need.
BLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
EXTRAS = {"ja-mecab": "ja", "ko-mecab": "ko"}


def bleu(
    hypotheses: Sequence[str],
    references: Sequence[str | Sequence[str]],
    tokenizer: str = "13a",
) -> dict[str, float | str]:
    """Return corpus BLEU (Papineni et al. 2002), from 0 to 100, as computed by
    sacreBLEU (Post 2018).

    A hypothesis has one reference, or a list of as many as the others.

    The result has three keys. "bleu" uses sacreBLEU's `tokenizer`, one of
    `BLEU_TOKENIZERS`, and is meant for raw text; "bleu_signature" is its sacreBLEU
    signature. "bleu_tokenized" is lower-cased and uses the tokens as given, separated
    by spaces; papers report this score for text that was tokenized beforehand.
    """
    # `force`: no warning that the text looks tokenized
    standard = sacrebleu.BLEU(tokenize=tokenizer, force=True)
    as_given = sacrebleu.BLEU(lowercase=True, tokenize="none", force=True)
    streams = _streams(references)
    return {
        "bleu": standard.corpus_score(hypotheses, streams).score,
        "bleu_signature": str(standard.get_signature()),
        "bleu_tokenized": as_given.corpus_score(hypotheses, streams).score,
    }


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return the scores that papers on captions report, from 0 to 100.

    "bleu_1" to "bleu_4" are corpus BLEU with n-grams up to this length, lower-cased,
    with the tokens as given, over all references of a hypothesis; "bleu_4" is
    "bleu_tokenized" of `bleu`. "chrf" is chrF2 (Popović 2015) of sacreBLEU,
    lower-cased, with the best reference of each hypothesis.
    """
    streams = _streams(references)
    scores = {}
    for n in range(1, 5):
        as_given = sacrebleu.BLEU(
            lowercase=True, tokenize="none", force=True, max_ngram_order=n
        )
        scores[f"bleu_{n}"] = as_given.corpus_score(hypotheses, streams).score
    characters = sacrebleu.CHRF(lowercase=True)
    scores["chrf"] = characters.corpus_score(hypotheses, streams).score
    return scores


def _streams(references: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """Return a list of the first reference of each hypothesis, one of the second, …"""
    lists = map(_listed, references)
    return [list(stream) for stream in zip(*lists, strict=True)]


def _listed(entry: str | Sequence[str]) -> Sequence[str]:
    """Return the references of a hypothesis, which may be a single one."""
    return [entry] if isinstance(entry, str) else entry


def missing_extra(tokenizer: str) -> str:
    """Return the extra of this package that `tokenizer` needs and that is not
    installed, or "".
    """
    if tokenizer not in EXTRAS:
        return ""
    try:
        sacrebleu.BLEU(tokenize=tokenizer)
    # without MeCab, or with another dictionary than sacreBLEU's
    except (RuntimeError, AssertionError):
        return EXTRAS[tokenizer]
    return ""


def exact_match(
    hypotheses: Sequence[str], references: Sequence[str | Sequence[str]]
) -> float:
    """Return the share of hypotheses that are equal to their reference, or to one of
    them, from 0 to 1.

    Raises:
        ValueError: The numbers of hypotheses and references differ.
    """
    matches = 0
    for hypothesis, entry in zip(hypotheses, references, strict=True):
        matches += hypothesis in _listed(entry)
    return matches / len(references)


class Edits(NamedTuple):
    """The numbers of edits that turn a reference into a hypothesis, or sums of them."""

    substitutions: int
    deletions: int
    insertions: int


def edits(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> Edits:
    """Return the fewest edits that turn a reference into a hypothesis (Levenshtein
    1966).

    Several alignments may have as few. The result is that with most substitutions.
    """
    # Each cost is a number of edits times `unit`, plus a number of indels below `unit`.
    unit = len(hypothesis) + len(reference) + 1
    indel = unit + 1
    ids = {word: i for i, word in enumerate({*hypothesis, *reference})}
    words = np.array([ids[word] for word in hypothesis], np.int64)
    skipped = indel * np.arange(len(hypothesis) + 1)
    costs = skipped  # of each prefix of the hypothesis, for no word of the reference
    for word in reference:
        deleted = costs + indel
        aligned = costs[:-1] + unit * (words != ids[word])
        costs = deleted.copy()
        costs[1:] = np.minimum(deleted[1:], aligned)
        # insert any number of words after the cheapest prefix
        costs = skipped + np.minimum.accumulate(costs - skipped)
    count, indels = divmod(int(costs[-1]), unit)
    longer = len(hypothesis) - len(reference)
    insertions = (indels + longer) // 2
    return Edits(count - indels, insertions - longer, insertions)


def word_error_rate(
    hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """Return the edits that turn the references into the hypotheses, as a share of the
    references' words.

    Words are separated by spaces. "word_error_rate" is the sum of "substitutions",
    "deletions" and "insertions". It is 0 if all texts are equal, 1 if all hypotheses
    are empty, and exceeds 1 if more words are wrong or too many than the references
    have.

    Raises:
        ValueError: The numbers of hypotheses and references differ or are 0, or the
            references have no word.
    """
    check_pairs(hypotheses, references)
    words = sum(len(reference.split()) for reference in references)
    if not words:
        raise UserError(
            f"{len(references)} references have no word: "
            "a word error rate needs at least one; check the references"
        )
    found = [
        edits(hypothesis.split(), reference.split())
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    rates = {
        name: sum(counts) / words
        for name, counts in zip(Edits._fields, zip(*found, strict=True), strict=True)
    }
    return {"word_error_rate": sum(rates.values()), **rates}


def loss_and_perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Return the loss in nats and its exponential, the perplexity, or an empty dict
    if `means` has no "loss".
    """
    if "loss" not in means:
        return {}
    return {"loss": means["loss"], "perplexity": math.exp(min(means["loss"], 700))}


def check_pairs(predicted: Collection, references: Collection) -> None:
    """Raise ValueError unless there is at least one prediction, and one reference
    for each.
    """
    if not 0 < len(predicted) == len(references):
        raise UserError(
            f"{len(predicted)} predictions for {len(references)} references: a metric "
            "needs one for each, and at least one; compare the lists before the call"
        )


def f1(
    predicted: Collection[Hashable],
    references: Collection[Hashable],
    labels: Sequence[Hashable],
) -> float:
    """Return the F1 score, the harmonic mean of precision and recall, from 0 to 1.

    With two labels, the second one is the positive class, as in the tasks MRPC and QQP
    of GLUE (Wang et al. 2019). With more labels, the score is the unweighted mean over
    the labels (macro F1). A label that is never predicted correctly scores 0, even if
    it occurs nowhere. This is scikit-learn's `f1_score` with `labels=labels,
    zero_division=0`, and with `average="macro"` for more than two labels.

    Raises:
        ValueError: The numbers of predictions and references differ or are 0, or some
            are not in `labels`.
    """
    guessed, actual, right = _counts(predicted, references)
    if unknown := (guessed | actual).keys() - set(labels):
        raise UserError(
            f"{next(iter(unknown))!r} is not in labels={tuple(labels)}: "
            "all predictions and references must be; "
            "add it to the labels, or convert it to their type"
        )
    scores = [
        2 * right[label] / max(guessed[label] + actual[label], 1) for label in labels
    ]
    return scores[1] if len(labels) == 2 else sum(scores) / len(labels)


def matthews(
    predicted: Collection[Hashable], references: Collection[Hashable]
) -> float:
    """Return the Matthews correlation of two or more classes, from -1 to 1.

    This is R_K of Gorodkin (2004), "Comparing two K-category assignments by a
    K-category correlation coefficient". For two classes it equals the coefficient of
    Matthews (1975). It is 0 where it is undefined: if all predictions are the same, or
    all references.

    Raises:
        ValueError: The numbers of predictions and references differ or are 0.
    """
    guessed, actual, right = _counts(predicted, references)
    n = len(references)
    covariance = n * right.total() - sum(
        guessed[label] * actual[label] for label in actual
    )
    variances = [
        n * n - sum(count * count for count in counts.values())
        for counts in (guessed, actual)
    ]
    return covariance / math.sqrt(math.prod(variances)) if all(variances) else 0.0


def _counts(
    predicted: Collection[Hashable], references: Collection[Hashable]
) -> tuple[Counter, Counter, Counter]:
    """Return how often each label is predicted, is the reference, and is both at
    once.
    """
    check_pairs(predicted, references)
    right = Counter(p for p, r in zip(predicted, references, strict=True) if p == r)
    return Counter(predicted), Counter(references), right


def pearson(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Return Pearson's linear correlation of two lists of n numbers, from -1 to 1.

    It is undefined if all numbers of a list are equal, e.g. if n is 1; the result is
    0.0 then. It is NaN if some number is not finite.

    Raises:
        ValueError: The lists have different lengths or are empty.
    """
    a, b = (np.asarray(values, np.float64).ravel() for values in (x, y))
    check_pairs(a, b)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    if not (np.ptp(a) and np.ptp(b)):
        return 0.0
    a = a - a.mean()
    b = b - b.mean()
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Return Spearman's rank correlation of two lists of n numbers, from -1 to 1.

    This is Pearson's correlation of their ranks. Equal numbers share the mean of their
    ranks. The result is 0.0 if all numbers of a list are equal, and NaN if a list
    contains NaN.

    Raises:
        ValueError: The lists have different lengths or are empty.
    """
    return pearson(_ranks(x), _ranks(y))


def _ranks(values: npt.ArrayLike) -> np.ndarray:
    """Return the rank of each of n numbers, (n,) float64, from 1. NaN has the rank
    NaN.
    """
    values = np.asarray(values, np.float64).ravel()
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum() - (counts - 1) / 2
    return np.where(np.isnan(values), np.nan, mean_ranks[inverse])
