"""Metrics for spans of text: answers to questions, and entities given by one tag per
token.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from transformer_jax.errors import UserError
from transformer_jax.metrics import check_pairs

# The tags of each scheme. The type after the hyphen may be left out if there is only
# one, e.g. in "B I O".
SCHEMES = {"iob2": re.compile(r"O|[BI](-.+)?"), "bioes": re.compile(r"O|[BIES](-.+)?")}
OUTSIDE = ("O", "")
UNKNOWN = "?"

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation and English articles, its
    words separated by one space.

    Source: the evaluation scripts of SQuAD (Rajpurkar et al. 2016, section 6.1).
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def answer_exact_match(prediction: str, golds: Collection[str]) -> float:
    """Return 1 if the prediction equals one of the gold answers after normalization,
    else 0.

    The answer to a question without gold answers is "". Gold answers that normalize to
    "" do not count. Both rules are those of the evaluation script of SQuAD 2.0
    (Rajpurkar, Jia and Liang 2018).
    """
    return float(normalize_answer(prediction) in _normalized(golds))


def answer_f1(prediction: str, golds: Collection[str]) -> float:
    """Return the F1 score of the prediction's words, from 0 to 1: the maximum over the
    gold answers.

    Texts are normalized and treated as bags of words. The rules for "" are those of
    `answer_exact_match`.
    """
    words = Counter(normalize_answer(prediction).split())
    return max(_overlap(words, Counter(gold.split())) for gold in _normalized(golds))


def _normalized(golds: Collection[str]) -> list[str]:
    """Return the gold answers that are left after normalization, or only "" if there
    are none.
    """
    return [text for text in map(normalize_answer, golds) if text] or [""]


def _overlap(a: Counter, b: Counter) -> float:
    size = a.total() + b.total()
    return 2 * (a & b).total() / size if size else 1.0


ANSWER_METRICS = {"exact_match": answer_exact_match, "f1": answer_f1}


def squad(
    predictions: Sequence[str], references: Sequence[Collection[str]]
) -> dict[str, float]:
    """Return {"exact_match", "f1"}: the means over all questions of
    `answer_exact_match` and `answer_f1`, from 0 to 1.

    `references` has the gold answers of each question.

    Raises:
        ValueError: The numbers of predictions and references differ or are 0.
    """
    check_pairs(predictions, references)
    return {
        name: float(_scores(metric, predictions, references).mean())
        for name, metric in ANSWER_METRICS.items()
    }


def best_threshold(
    predictions: Sequence[str],
    scores: npt.ArrayLike,
    references: Sequence[Collection[str]],
) -> dict[str, float]:
    """Return the best metrics that a threshold on the no-answer score can reach, and
    their thresholds.

    `predictions` has the best non-empty answer to each question. `scores`, (n,), is the
    score of "no answer" minus the score of that answer. A question keeps its answer if
    its score is at most the threshold, and is answered by "" otherwise. The keys are
    "best_exact_match" and "best_f1", from 0 to 1, and "best_exact_match_threshold" and
    "best_f1_threshold", because each metric has a threshold of its own. Of equally good
    thresholds the lowest is returned. The time is O(n log n).

    Source: `find_best_thresh` of the evaluation script of SQuAD 2.0 (Rajpurkar, Jia and
    Liang 2018). Differs: Equal scores are on the same side of the threshold. If it is
    best to keep no answer, the threshold is less than all scores; the script returns 0.
    An answer that normalizes to "", e.g. "the", counts as "" here as well.

    Raises:
        ValueError: The numbers of predictions, scores and references differ or are 0.
    """
    scores = np.asarray(scores, np.float64).ravel()
    check_pairs(predictions, references)
    check_pairs(scores, references)
    order = scores.argsort()
    ascending = scores[order]
    # of equal scores, only the last can be followed by a cut
    last = np.append(ascending[1:] != ascending[:-1], True)
    # ∞: no context has tokens
    least = ascending[0] if np.isfinite(ascending[0]) else 0.0
    thresholds = np.append(least - abs(least) - 1, ascending[last])
    best = {}
    for name, metric in ANSWER_METRICS.items():
        silent = _scores(metric, [""] * len(references), references)
        gains = (_scores(metric, predictions, references) - silent)[order].cumsum()[
            last
        ]
        means = (silent.sum() + np.append(0, gains)) / len(references)
        best[f"best_{name}"] = float(means.max())
        best[f"best_{name}_threshold"] = float(thresholds[means.argmax()])
    return best


def _scores(
    metric: Callable[[str, Collection[str]], float],
    predictions: Sequence[str],
    references: Sequence[Collection[str]],
) -> np.ndarray:
    """Return the metric of each question, (n,)."""
    return np.array(
        [
            metric(prediction, golds)
            for prediction, golds in zip(predictions, references, strict=True)
        ]
    )


def entities(tags: Sequence[str], scheme: str) -> list[tuple[str, int, int]]:
    """Return the entities of a sentence in order, each as (type, start, end) with the
    position after its last token.

    `scheme` is "iob2" (B begins an entity, I is inside) or "bioes" (in addition E ends
    it, S is a single token). Every sequence of these tags can be read, even a malformed
    one: I or E after B or I of the same type continues an entity; every other tag
    except O begins one. So I after O begins an entity, and an entity in "bioes" may end
    without E. This is the reading of conlleval (Tjong Kim Sang and Buchholz 2000) and
    of seqeval's default mode. With "iob2" it also reads IOB1 correctly.

    Raises:
        ValueError: The scheme is unknown, or a tag is not one of the scheme.
    """
    spans: list[tuple[str, int, int]] = []
    before = OUTSIDE
    for position, part in enumerate(_parts(tags, scheme)):
        prefix, kind = part
        if prefix == UNKNOWN:
            raise UserError(
                f"tag {position} is {tags[position]!r}: tags of {scheme} match "
                f"{SCHEMES[scheme].pattern}; correct the tag, or choose another scheme"
            )
        if _continues(before, part):
            _, start, _ = spans[-1]
            spans[-1] = (kind, start, position + 1)
        elif part != OUTSIDE:
            spans.append((kind, position, position + 1))
        before = part
    return spans


def malformed(tags: Sequence[str], scheme: str) -> list[int]:
    """Return the positions from 0 of the tags that break the scheme, for error messages
    about data.

    These are tags that the scheme does not have, I and E that do not continue B or I of
    the same type, and in "bioes" also B and I that no I or E of the same type
    continues.

    Raises:
        ValueError: The scheme is unknown.
    """
    parts = _parts(tags, scheme)
    neighbors = zip([OUTSIDE, *parts], parts, [*parts[1:], OUTSIDE], strict=False)
    return [
        position
        for position, (before, part, after) in enumerate(neighbors)
        if part[0] == UNKNOWN
        or (part[0] in "IE" and not _continues(before, part))
        or (part[0] in "BI" and not _continues(part, after) and scheme == "bioes")
    ]


def _parts(tags: Sequence[str], scheme: str) -> list[tuple[str, str]]:
    """Return the prefix and the type of each tag.

    The prefix of a tag that is not of the scheme is `UNKNOWN`.
    """
    if scheme not in SCHEMES:
        raise UserError(
            f"{scheme=}: must be one of {', '.join(SCHEMES)}; "
            "convert the tags if they have another scheme"
        )
    return [
        (tag[0], tag[2:]) if SCHEMES[scheme].fullmatch(tag) else (UNKNOWN, tag)
        for tag in tags
    ]


def _continues(before: tuple[str, str], part: tuple[str, str]) -> bool:
    return before[0] in "BI" and part[0] in "IE" and before[1] == part[1]


def entity_f1(
    predicted: Sequence[Sequence[str]], references: Sequence[Sequence[str]], scheme: str
) -> dict[str, float]:
    """Return {"precision", "recall", "f1"} of the entities in all sentences together
    (micro average), from 0 to 1.

    An entity is correct if type, start and end are (CoNLL-2003, Tjong Kim Sang and De
    Meulder 2003). `predicted` and `references` have the tags of each sentence, read by
    `entities`. A score without any entity to count is 0.

    Raises:
        ValueError: The numbers of sentences differ or are 0, a sentence has not one
            prediction per tag, or a tag is not one of the scheme.
    """
    check_pairs(predicted, references)
    guess_count = 0
    answer_count = 0
    right_count = 0
    for number, (guess, reference) in enumerate(
        zip(predicted, references, strict=True)
    ):
        if len(guess) != len(reference):
            raise UserError(
                f"sentence {number} has {len(guess)} "
                f"predicted tags for {len(reference)} tokens: "
                "it must have one for each; predict O for tokens that were cut off"
            )
        guesses = set(entities(guess, scheme))
        answers = set(entities(reference, scheme))
        guess_count += len(guesses)
        answer_count += len(answers)
        right_count += len(guesses & answers)
    return {
        "precision": right_count / max(guess_count, 1),
        "recall": right_count / max(answer_count, 1),
        "f1": 2 * right_count / max(guess_count + answer_count, 1),
    }
