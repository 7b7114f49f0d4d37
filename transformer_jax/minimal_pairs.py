"""Minimal pairs: does a model give the acceptable one of two sentences the higher
probability? (BLiMP, Warstadt et al. 2020.)
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from transformer_jax import files
from transformer_jax.data.files import DataError
from transformer_jax.data.tables import tsv_file
from transformer_jax.errors import UserError

COLUMNS = ("field", "phenomenon", "paradigm", "sentence_good", "sentence_bad")
CHUNK = 10_000  # sentences scored at a time, to bound memory
# Sums of the same numbers in another order differ by rounding: a smaller relative
# difference is a tie.
ROUNDING = 1e-9

# sentences → an object with "log_likelihood" for each
Score = Callable[[Sequence[str]], Sequence[Any]]


class Pairs(NamedTuple):
    """Sentences that differ in acceptability only.

    groups: the field, phenomenon and paradigm of each pair.
    good, bad: its sentences.
    """

    groups: list[tuple[str, str, str]]
    good: list[str]
    bad: list[str]


def read_pairs(path: str) -> Pairs:
    """Read a table of `COLUMNS`, separated by tabs, named *.tsv or *.tsv.gz.

    Raises:
        UserError: there is no such file, or its name ends differently.
        DataError: a column is missing, or a field is empty; the message names file and
            line.
    """
    file = epath.Path(path)
    stem = file.name.removesuffix(".gz")
    if not stem.endswith(".tsv"):
        raise UserError(
            f"--input={path}: must be a table of tab-separated values, "
            "named *.tsv or *.tsv.gz, e.g. blimp.tsv.gz"
        )
    if not files.exists(file):
        raise UserError(f"--input={path}: there is no such file; correct the path")
    source = tsv_file(file.parent, stem.removesuffix(".tsv"), COLUMNS)
    for i, row in enumerate(source):
        for name, text in row.items():
            if not text.strip():
                raise DataError(
                    f"{source.place(i)} has an empty {name}: "
                    "write the text there, or remove the line"
                )
    field, phenomenon, paradigm, good, bad = (
        list(source.column(name)) for name in COLUMNS
    )
    groups = list(zip(field, phenomenon, paradigm, strict=True))
    return Pairs(groups, good, bad)


def log_likelihoods(sentences: Sequence[str], score: Score) -> np.ndarray:
    """Return the log-likelihood of each sentence (n,). Equal ones are scored once."""
    distinct = list(dict.fromkeys(sentences))
    values: dict[str, float] = {}
    for start in range(0, len(distinct), CHUNK):
        chunk = distinct[start : start + CHUNK]
        for sentence, scores in zip(chunk, score(chunk), strict=True):
            values[sentence] = scores["log_likelihood"]
    return np.array([values[sentence] for sentence in sentences])


def accuracies(pairs: Pairs, good: np.ndarray, bad: np.ndarray) -> dict[str, Any]:
    """Return the accuracies, given the log-likelihoods of the sentences (n,).

    A pair is right if the good sentence has the higher one. A tie, i.e. a difference
    within rounding, is wrong. Accuracies are from 0 to 1.

    Returns:
        "accuracy": the mean over paradigms; "pairs" and "ties": their numbers; and
        "fields", "phenomena", "paradigms": {name: accuracy}, of fields and phenomena
        the mean over their paradigms.
    """
    is_tie = np.isclose(good, bad, rtol=ROUNDING, atol=0)
    right = (good > bad) & ~is_tie
    by_paradigm = defaultdict[tuple[str, str, str], list[bool]](list)
    for group, is_right in zip(pairs.groups, right.tolist(), strict=True):
        by_paradigm[group].append(is_right)
    of_paradigm = {group: float(np.mean(x)) for group, x in by_paradigm.items()}
    return {
        "accuracy": float(np.mean([*of_paradigm.values()])),
        "pairs": len(pairs.groups),
        "ties": int(is_tie.sum()),
        "fields": _means(of_paradigm, 0),
        "phenomena": _means(of_paradigm, 1),
        "paradigms": _means(of_paradigm, 2),
    }


def _means(
    of_paradigm: Mapping[tuple[str, str, str], float], part: int
) -> dict[str, float]:
    """Return the mean accuracy of the paradigms with the same name as `part`."""
    grouped = defaultdict[str, list[float]](list)
    for group, accuracy in of_paradigm.items():
        grouped[group[part]].append(accuracy)
    return {name: float(np.mean(values)) for name, values in grouped.items()}


def readable(scores: Mapping[str, Any]) -> str:
    """Return the accuracies in percent as lines of text: phenomena, fields and the
    mean.
    """
    rows = [*scores["phenomena"].items(), *scores["fields"].items()]
    rows.append((f"mean of {len(scores['paradigms'])} paradigms", scores["accuracy"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {100 * value:5.1f}" for name, value in rows]
    ties = (
        f"{scores['ties']:,} of {scores['pairs']:,} pairs are ties and count as wrong"
    )
    return "\n".join([*lines, ties])
