"""The parts of a record: what is fixed, how a run is measured, and its rules."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from ml_collections import ConfigDict

from transformer_jax.claims.claim import Measurements, Setting
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor
from transformer_jax.training.logging import read_rows

MISSING = "(missing)"
# what is fixed where the data are the splits train and val of one pair of text files
ONE_PAIR_OF_FILES: Mapping[str, Any] = {
    "data.source": "files",
    "data.train_split": "train",
    "data.validation_split": "val",
    "data.table": "",
    "data.directions": (),
    "data.mixture": (),
    "input.modality": "tokens",
    "source_vectors.file": "",
    "target_vectors.file": "",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """The range, from `least` to `most`, of a measurement of each run of an entry."""

    measure: str
    least: float = -math.inf
    most: float = math.inf

    def __post_init__(self) -> None:
        if self.least == -math.inf and self.most == math.inf:
            raise UserError(
                f"the rule about {self.measure} cannot be broken: set `least` or `most`"
            )

    @property
    def words(self) -> str:
        """The rule, e.g. "minutes ≤ 22"."""
        limits = []
        if self.least > -math.inf:
            limits.append(f"{self.measure} ≥ {self.least:g}")
        if self.most < math.inf:
            limits.append(f"{self.measure} ≤ {self.most:g}")
        return " and ".join(limits)

    def is_kept(self, values: Measurements) -> bool:
        """Return True if a run keeps the rule. NaN does not."""
        return self.least <= values[self.measure] <= self.most


class Finished(NamedTuple):
    """A run that is to be measured.

    predictor: the trained model.
    workdir: the folder of the run, e.g. with metrics.jsonl.
    seconds: the time from the start of the run to each row of metrics.jsonl, by step
        and split.
    setting: what the run was given.
    """

    predictor: Predictor
    workdir: Path
    seconds: Mapping[tuple[int, str], float]
    setting: Setting


@dataclasses.dataclass(frozen=True)
class Record:
    """A record: what an entry may not change, and what decides.

    title: what is compared, in one phrase.
    measure: the measurement whose mean over seeds decides, e.g. "minutes".
    better: which of two means is better.
    rules: what each run of a valid entry must measure.
    fixed: the values of keys that all entries have, e.g. {"data.max_length": 64}. Keys
        of sections that the task of an entry does not have do not count.
    processors: the most processors that a run may use.
    data: folder of the data below that of all data sets, or a function that writes data
        and returns their folder.
    recipe: name and argument of the best entry's recipe, e.g. "scan.py:cut26".
    keys: the values of keys in which the best entry differs from its recipe.
    measured: returns what was measured in a run, at least `measure` and what the rules
        are about.
    cost: how long one seed of the best entry takes, and on what.
    seeds: the least number of seeds.
    quick: further keys of a quick run.
    """

    title: str
    measure: str
    better: Literal["higher", "lower"]
    rules: tuple[Rule, ...]
    fixed: Mapping[str, Any]
    processors: int
    data: str | Callable[[Setting], Path]
    recipe: str
    keys: Mapping[str, Any]
    measured: Callable[[Finished], Measurements]
    cost: str
    seeds: int = 3
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, config: ConfigDict) -> None:
        """Raise UserError if the config of an entry changes what is fixed."""
        problems = []
        for key, value in {"init_from": "", **self.fixed}.items():
            found = value_of(config, key)
            if found != value and not is_elsewhere(config, key):
                problems.append(
                    f"config.{key} = {found!r}: must be {value!r} in this record"
                )
        if problems:
            raise UserError("\n".join(problems))

    def broken(self, runs: Sequence[Measurements]) -> list[str]:
        """Return what is wrong with the runs of an entry, one for each seed, or
        nothing.
        """
        problems = []
        if len(runs) < self.seeds:
            problems.append(f"{len(runs)} of at least {self.seeds} seeds")
        for rule in (*self.rules, Rule("processors", most=self.processors)):
            broken = [seed for seed, run in enumerate(runs) if not rule.is_kept(run)]
            if broken:
                values = ", ".join(f"{runs[i][rule.measure]:.4g}" for i in broken)
                problems.append(f"not {rule.words}: {values}")
        return problems


def value_of(config: ConfigDict, key: str) -> Any:
    """Return the value of a dotted key, or MISSING."""
    value: Any = config
    for name in key.split("."):
        if name not in value:
            return MISSING
        value = value[name]
    return value


def is_elsewhere(config: ConfigDict, key: str) -> bool:
    """Return True if the task of a config does not have the section of a key."""
    section, dot, _ = key.partition(".")
    return bool(dot) and section not in config


def validations(finished: Finished, measure: str) -> dict[int, float]:
    """Return a measurement of each validation during training, by step."""
    split = finished.predictor.config.data.validation_split
    return {
        row["step"]: row[measure]
        for _, row in read_rows(finished.workdir / "metrics.jsonl")
        if row.get("split") == split and row.get(measure) is not None
    }


def first_time(finished: Finished, measure: str, most: float) -> float:
    """Return the minutes until the first validation at which a measurement was at most
    `most`, or infinity.
    """
    split = finished.predictor.config.data.validation_split
    for step, value in validations(finished, measure).items():
        if value <= most:
            return finished.seconds[step, split] / 60
    return math.inf


def lowest(finished: Finished, measure: str) -> float:
    """Return the lowest measurement of the validations during training, or NaN."""
    return min(validations(finished, measure).values(), default=math.nan)


def total_time(finished: Finished) -> float:
    """Return the minutes until the last row of metrics.jsonl: with reading the data,
    compilations, and evaluations.
    """
    return max(finished.seconds.values(), default=math.nan) / 60


def number_of_parameters(predictor: Predictor) -> float:
    """Return the number of parameters of a model."""
    return float(sum(leaf.size for leaf in jax.tree.leaves(predictor.params)))
