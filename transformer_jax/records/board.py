"""The result of an entry: whether it is valid, its row on the board, and the JSON."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from transformer_jax.claims import results
from transformer_jax.claims.claim import Measurements
from transformer_jax.claims.running import json_number
from transformer_jax.data.progress import counted
from transformer_jax.records.entry import without_places
from transformer_jax.records.record import Record


class Result(NamedTuple):
    """The runs of an entry, one for each seed from 0.

    words: what the entry is, e.g. its recipe.
    """

    name: str
    record: Record
    words: str
    config: ConfigDict
    runs: Sequence[Measurements]

    def values(self, measure: str) -> list[float]:
        """The values of a measurement, by seed."""
        return [run[measure] for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean that decides."""
        return statistics.fmean(self.values(self.record.measure))

    @property
    def deviation(self) -> float:
        """The standard deviation between seeds, 0 for one seed, and NaN if one of the
        values is not finite.
        """
        values = self.values(self.record.measure)
        if not all(map(math.isfinite, values)):
            return math.nan
        return statistics.stdev(values) if len(values) > 1 else 0.0


def as_text(result: Result, folder: Path) -> str:
    """Return the result as text: the verdict, a table of the runs, and the row for the
    board. `folder` is in the repository, whose commit is in the row.
    """
    record = result.record
    names = list(result.runs[0])
    problems = record.broken(result.runs)
    verdict = f"not valid ({'; '.join(problems)})" if problems else "valid"
    lines = [
        f"{result.name}: {record.title}",
        "",
        f"{record.measure}: {summary(result)} ({record.better} is better), "
        f"{counted(len(result.runs), 'seed')}; "
        f"the entry is **{verdict}**",
        "",
        f"| seed | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for seed, run in enumerate(result.runs):
        cells = [shown(run[name]) for name in names]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", row(result, folder)]) + "\n"


def shown(value: float) -> str:
    """Return a number with four digits, or all digits of a large whole number."""
    if abs(value) >= 1000 and value.is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


def summary(result: Result) -> str:
    """Return mean and standard deviation, e.g. "38.1 ± 0.23"."""
    return f"{shown(result.mean)} ± {result.deviation:.2g}"


def row(result: Result, folder: Path) -> str:
    """Return the row of the board in docs/records.md."""
    cells = [
        summary(result),
        ", ".join(map(shown, result.values(result.record.measure))),
        f"`{result.words}`",
        results.commit(folder)[:12] or "–",
        results.processor(),
    ]
    return f"| {' | '.join(cells)} |"


def to_json(result: Result, folder: Path) -> dict[str, Any]:
    """Return the result with all measurements, and what it was made with."""
    return {
        "record": result.name,
        "title": result.record.title,
        "measure": result.record.measure,
        "mean": json_number(result.mean),
        "deviation": json_number(result.deviation),
        "problems": result.record.broken(result.runs),
        "rules": [rule.words for rule in result.record.rules],
        "entry": result.words,
        "runs": [_finite(run) for run in result.runs],
        "config": without_places(result.config),
        "commit": results.commit(folder),
        "versions": results.versions(),
        "processor": results.processor(),
    }


def _finite(run: Measurements) -> dict[str, float | str]:
    return {name: json_number(value) for name, value in run.items()}
