"""The result of a claim: its verdict, the table of it, and the JSON."""

import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.claims import statistics
from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.running import Measured, json_number
from transformer_jax.claims.statistics import FAILS, HOLDS, UNDECIDED, Difference

# condition → what was measured, one entry for each seed
Measurements = Mapping[str, Sequence[Measured]]


class Outcome(NamedTuple):
    """The result of a rule.

    seeds_needed: how many seeds would decide it; None if it is decided, or unknown.
    """

    rule: Expected
    difference: Difference
    verdict: str
    seeds_needed: int | None

    @property
    def is_as_guessed(self) -> bool:
        """True if the mean difference lies in the range that was written down first."""
        low, high = self.rule.guess
        return low <= self.difference.mean <= high


class Result(NamedTuple):
    """The verdict on a claim.

    It holds if all of its rules do, it does not if one does not, and else it is
    undecided.
    """

    claim: Claim
    measured: Measurements
    outcomes: tuple[Outcome, ...]

    @property
    def verdict(self) -> str:
        """The verdict on the claim: `FAILS`, `UNDECIDED` or `HOLDS`."""
        verdicts = {outcome.verdict for outcome in self.outcomes}
        return next(word for word in (FAILS, UNDECIDED, HOLDS) if word in verdicts)

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would decide, if each undecided rule has one."""
        numbers = [
            outcome.seeds_needed
            for outcome in self.outcomes
            if outcome.verdict == UNDECIDED
        ]
        known = [number for number in numbers if number is not None]
        return max(known) if known and len(known) == len(numbers) else None


def judge(claim: Claim, measured: Measurements) -> Result:
    """Apply the rules of a claim to what its conditions measured."""
    return Result(
        claim, measured, tuple(_outcome(rule, measured) for rule in claim.expected)
    )


def _outcome(rule: Expected, measured: Measurements) -> Outcome:
    first = _values(measured[rule.condition], rule.measure)
    second = _values(measured[rule.minus], rule.measure) if rule.minus else []
    if rule.paired:
        first = [a - b for a, b in zip(first, second, strict=True)]
        second = []
    found = statistics.difference(first, second)
    verdict = statistics.verdict(found, rule.least, rule.most)
    needed = None
    if verdict == UNDECIDED:
        needed = statistics.seeds_needed(first, second, rule.least, rule.most)
    return Outcome(rule, found, verdict, needed)


def _values(runs: Sequence[Measured], measure: str) -> list[float]:
    return [run.values[measure] for run in runs]


def by_measure(result: Result) -> dict[str, dict[str, list[float]]]:
    """Return {measurement: {condition: values}} for what the rules are about.

    A condition without a measurement has no values.
    """
    names = dict.fromkeys(rule.measure for rule in result.claim.expected)
    return {
        name: {
            condition: [run.values[name] for run in runs if name in run.values]
            for condition, runs in result.measured.items()
        }
        for name in names
    }


def as_text(result: Result) -> str:
    """Return the result as text: Markdown tables of conditions and rules."""
    claim = result.claim
    names = list(by_measure(result))
    lines = [
        f"{claim.statement} ({claim.source})",
        "",
        f"Verdict: **{result.verdict}**{_what_decides(result)}",
        "",
        f"| condition | seeds | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for condition, runs in result.measured.items():
        cells = [summary(runs, name) for name in names]
        lines.append(f"| {condition} | {len(runs)} | {' | '.join(cells)} |")
    lines += [
        "",
        "| rule | found | 95 % interval | effect (SD) | p | verdict | guess |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in result.outcomes:
        found = outcome.difference
        low, high = outcome.rule.guess
        guess = f"{low:g} to {high:g}, {'yes' if outcome.is_as_guessed else 'no'}"
        test = ("–", "–", "–")  # one seed, or a value that is not finite
        if math.isfinite(found.low):
            interval = f"{found.low:.4g} to {found.high:.4g}"
            test = (interval, "–", "–")
            if outcome.rule.minus:  # else nothing is compared
                test = (interval, f"{found.effect:.3g}", f"{found.p:.2g}")
        row = (
            outcome.rule.words,
            f"{found.mean:.4g}",
            *test,
            outcome.verdict,
            guess if math.isfinite(low) or math.isfinite(high) else "–",
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _what_decides(result: Result) -> str:
    if result.verdict != UNDECIDED:
        return ""
    if result.seeds_needed is not None:
        return f"; about {result.seeds_needed} seeds would decide"
    if any(len(runs) < 2 for runs in result.measured.values()):
        return "; one seed has no interval, run at least two"
    values = by_measure(result).values()
    if not np.isfinite([x for of in values for i in of.values() for x in i]).all():
        return "; a measurement is not finite"
    return f"; more than {statistics.MOST_SEEDS} seeds would be needed"


def summary(runs: Sequence[Measured], name: str) -> str:
    """Return mean and standard deviation of a measurement, or "–" if it is missing."""
    if any(name not in run.values for run in runs):
        return "–"
    values = _values(runs, name)
    if len(values) == 1 or not np.isfinite(values).all():
        return f"{np.mean(values):.4g}"
    return f"{np.mean(values):.4g} ± {np.std(values, ddof=1):.2g}"


def to_json(name: str, result: Result, recipes: Path) -> dict[str, Any]:
    """Return the result with all measurements, and what it was made with."""
    return {
        "claim": name,
        "statement": result.claim.statement,
        "source": result.claim.source,
        "verdict": result.verdict,
        "seeds_needed": result.seeds_needed,
        "rules": [
            {
                "rule": outcome.rule.words,
                **_numbers(outcome),
                "guess": [json_number(value) for value in outcome.rule.guess],
                "verdict": outcome.verdict,
                "seeds_needed": outcome.seeds_needed,
            }
            for outcome in result.outcomes
        ],
        "conditions": {
            condition: {
                "design": dict(result.claim.conditions[condition].design),
                "runs": [
                    {key: json_number(value) for key, value in run.values.items()}
                    for run in runs
                ],
                "seconds": [run.seconds for run in runs],
            }
            for condition, runs in result.measured.items()
        },
        "commit": commit(recipes),
        "versions": versions(),
        "processor": processor(),
    }


def _numbers(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of the difference; effect and p are None if nothing is
    compared.
    """
    numbers: dict[str, Any] = {
        key: json_number(value) for key, value in outcome.difference._asdict().items()
    }
    if not outcome.rule.minus:
        numbers["effect"] = numbers["p"] = None
    return numbers


def commit(folder: Path) -> str:
    """Return the git commit of a folder, with "+" if files differ from it, or ""."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def processor() -> str:
    """Return the name of the processor, or of the machine if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
