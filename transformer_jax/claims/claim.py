"""The parts of a claim: its conditions, and what is expected of their measurements."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transformer_jax.errors import UserError

Measurements = Mapping[str, float]  # name → value


class Setting(NamedTuple):
    """The input of one run of a condition.

    seed: from 0; runs with different seeds are independent.
    workdir: folder for the files of this run.
    runs: folder of the trainings, which conditions share if they train the same.
    data: folder of the data sets, e.g. with the folder multi30k.
    recipes: folder of the recipes, e.g. configs.
    quick: the run is to take seconds, whatever it then measures.
    """

    seed: int
    workdir: Path
    runs: Path
    data: Path
    recipes: Path
    quick: bool = False


class Condition(Protocol):
    """One of the things that a claim compares."""

    @property
    def design(self) -> Mapping[str, Any]:
        """The settings that define the measurements, apart from `Setting`, as JSON."""

    def __call__(self, setting: Setting) -> Measurements:
        """Run the condition once, and return what was measured."""


@dataclasses.dataclass(frozen=True)
class Computed:
    """A condition that is computed without training.

    function: takes the seed and whether it is to take seconds only.
    design: what defines the measurements, as JSON.
    """

    function: Callable[[int, bool], Measurements]
    design: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, setting: Setting) -> Measurements:
        return self.function(setting.seed, setting.quick)


@dataclasses.dataclass(frozen=True)
class Expected:
    """A rule for the verdict, written before the run.

    The rule: the mean of `measure` in `condition`, minus that in `minus`, is from
    `least` to `most`. For a test of the sign, one of them is 0 and the other infinite.

    measure: name of a measurement.
    condition: name of a condition.
    minus: name of another condition, or "": nothing is subtracted.
    guess: where we expect the difference. It does not decide.
    paired: the difference is taken seed by seed. For conditions that score the same
        training in two ways: what its seed adds to both cancels.
    """

    measure: str
    condition: str
    minus: str = ""
    least: float = -math.inf
    most: float = math.inf
    guess: tuple[float, float] = (-math.inf, math.inf)
    paired: bool = False

    @property
    def words(self) -> str:
        """The rule, e.g. "bleu: pre-LN − post-LN ≥ 5"."""
        difference = f"{self.condition} − {self.minus}" if self.minus else ""
        subject = f"{self.measure}: {difference or self.condition}"
        if self.least == -math.inf:
            return f"{subject} ≤ {self.most:g}"
        if self.most == math.inf:
            return f"{subject} ≥ {self.least:g}"
        return f"{subject} from {self.least:g} to {self.most:g}"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of the literature, and how it is tested.

    statement: the claim, in one sentence.
    source: paper and section, or the text that repeats it.
    conditions: what is compared, by name.
    expected: the rules for the verdict.
    cost: how long one seed of all conditions takes, and on what.
    seeds: number of seeds by default.
    paper: commands of the same experiment in the size of the paper, if there is one.

    Raises:
        UserError: a rule names a condition that the claim does not have, or there is no
            rule.
    """

    statement: str
    source: str
    conditions: Mapping[str, Condition]
    expected: tuple[Expected, ...]
    cost: str
    seeds: int = 3
    paper: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.expected:
            raise UserError(f"{self.statement!r} has no rule: add one to `expected`")
        for rule in self.expected:
            for name in (rule.condition, rule.minus):
                if name and name not in self.conditions:
                    raise UserError(
                        f"the rule {rule.words!r} names {name!r}: "
                        f"choose from the conditions {', '.join(self.conditions)}"
                    )
            if rule.paired and not rule.minus:
                raise UserError(
                    f"the rule {rule.words!r} is paired and has one condition: "
                    "set `minus`, or paired to False"
                )
            if not rule.least <= rule.most:
                raise UserError(
                    f"the rule {rule.words!r} cannot be met: "
                    "`least` must not exceed `most`"
                )
            if rule.least == -math.inf and rule.most == math.inf:
                raise UserError(
                    f"the rule about {rule.measure} of {rule.condition} "
                    "cannot fail: set `least` or `most`"
                )
