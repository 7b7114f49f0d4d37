"""Train a recipe with every combination of given values, and compare the results.

A run of the grid is an ordinary workdir, DIR/NAME. Runs that differ only in
`training.seed` belong to one condition, whose scores have a mean and a standard
deviation. `claims.running` runs them.
"""

import copy
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import experiment, files
from transformer_jax.claims import running
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.results import Measurements as Measured
from transformer_jax.claims.results import summary
from transformer_jax.config import ConfigError, override, parse
from transformer_jax.errors import UserError
from transformer_jax.tasks import task_class
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.divergence import Diverged

log = logging.getLogger(__name__)

SEED = "training.seed"
RESULT = "result.json"
# commas that are not in parentheses
COMMA = re.compile(r",(?![^()]*\))")
EXAMPLE = "--grid='optimizer.learning_rate=1e-3,3e-4;training.seed=0,1,2'"

Choices = dict[str, Any]  # dotted key → value


def parse_grid(text: str, config: ConfigDict) -> dict[str, list[Any]]:
    """Return {dotted key: values} for KEY=VALUE,VALUE;KEY=VALUE, with values of the
    types that the keys have in `config`.

    Raises ConfigError for a key that does not exist or comes twice, and for a value
    that is missing, of another type, or given twice.
    """
    grid: dict[str, list[Any]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        key, equals, values = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--grid: {part!r} is not KEY=VALUE,VALUE: {EXAMPLE}")
        if key in grid:
            raise ConfigError(
                f"--grid has {key} twice: write all of its values after one ="
            )
        grid[key] = [
            _value(key, value.strip(), config) for value in COMMA.split(values)
        ]
        for i, value in enumerate(grid[key]):
            if value in grid[key][:i]:
                raise ConfigError(f"--grid has {key} = {value!r} twice: remove one")
    if not grid:
        raise ConfigError(f"--grid is empty: name keys and their values, {EXAMPLE}")
    return grid


def _value(key: str, text: str, config: ConfigDict) -> Any:
    """Return a value with the type of the key."""
    if not text:
        raise ConfigError(
            f"--grid: {key} has an empty value: write KEY=VALUE,VALUE, "
            "without a comma at the end"
        )
    changed = with_choices(config, {key: text})
    section, _, name = key.rpartition(".")
    return changed[section][name] if section else changed[name]


def with_choices(config: ConfigDict, choices: Mapping[str, Any]) -> ConfigDict:
    """Return a copy of a config with other values, in which keys that follow
    training.steps still do.

    Raises ConfigError, see `config.override`.
    """
    changed = copy.deepcopy(config)
    override(changed, [f"--config.{key}={value}" for key, value in choices.items()])
    return changed


@dataclasses.dataclass(frozen=True)
class Point:
    """A condition that trains a config with the seed of the setting, in its workdir,
    and measures the scores on the validation split.

    They are those of the last step, or of the best one if evaluation.checkpoint is
    "best". If training diverges, checkpoint.best_metric is NaN.
    """

    config: ConfigDict

    @property
    def design(self) -> Mapping[str, Any]:
        """The config, apart from the seed."""
        values = self.config.to_dict()
        del values["training"]["seed"]
        return values

    def __call__(self, setting: Setting) -> Measurements:
        config = with_choices(self.config, {SEED: setting.seed})
        try:
            run = experiment.run(config, setting.workdir)
        except Diverged as error:
            log.warning("%s diverged: %s", setting.workdir, error)
            return {config.checkpoint.best_metric: math.nan}
        scores = run.scores
        metrics = task_class(config.task).metrics
        if run.task.config.evaluation.checkpoint == "best":
            checkpoints = Checkpoints(
                setting.workdir / "checkpoints", run.task.config.checkpoint, metrics
            )
            best = checkpoints.best()
            scores = scores if best is None else checkpoints.scores(best)
        return {name: scores[name] for name in metrics if name in scores}


class Run(NamedTuple):
    """A run of a sweep: its name, its condition and its setting."""

    name: str
    condition: str
    setting: Setting


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All runs of a grid.

    choices: the values of each condition, without the seed.
    """

    config: ConfigDict
    choices: Mapping[str, Choices]
    claim: Claim
    runs: tuple[Run, ...]

    @property
    def metric(self) -> str:
        """The score that the best condition is chosen by."""
        return self.config.checkpoint.best_metric

    @property
    def tasks(self) -> list[tuple[str, Setting]]:
        """Return the runs for `claims.running`."""
        return [(run.condition, run.setting) for run in self.runs]

    def open_runs(self) -> list[int]:
        """Return the places in `runs` of those that have no result yet."""
        return [
            i
            for i, run in enumerate(self.runs)
            if running.measured(self.claim, run.condition, run.setting) is None
        ]


def make_sweep(config: ConfigDict, text: str, workdir: Path) -> Sweep:
    """Return the sweep of a grid, with all of its configs checked. Results of other
    configs are removed: training then goes on, or refuses the workdir.

    Raises:
        UserError: the grid, or the config of a run, cannot be used.
    """
    grid = parse_grid(text, config)
    seeds = grid.pop(SEED, [config.training.seed])
    choices: dict[str, Choices] = {}
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        choices[_name(chosen) or "recipe"] = chosen
    if len(choices) < math.prod(map(len, grid.values())):
        raise UserError("--grid: the names of two runs are equal: write values apart")
    points = {}
    for name, chosen in choices.items():
        point = Point(with_choices(config, chosen))
        for seed in seeds:
            check(name, with_choices(point.config, {SEED: seed}))
        points[name] = point
    metric = config.checkpoint.best_metric
    claim = Claim(
        statement=f"sweep of {text}",
        source="a grid",
        conditions=points,
        expected=tuple(Expected(metric, name, most=0) for name in points),
        cost="",
        seeds=len(seeds),
    )
    runs = []
    for seed, condition in itertools.product(seeds, choices):
        name = _name({**choices[condition], SEED: seed})
        folder = workdir / name
        setting = Setting(seed, folder, workdir, workdir, workdir)
        _forget_other(folder / RESULT, claim, condition, setting)
        runs.append(Run(name, condition, setting))
    return Sweep(config, choices, claim, tuple(runs))


def _name(choices: Choices) -> str:
    """Return a readable name of a folder, e.g. "learning_rate-0.001_seed-0"."""
    last = [key.rpartition(".")[2] for key in choices]
    words = []
    for key, name in zip(choices, last, strict=True):
        label = name if last.count(name) == 1 else key
        value = str(choices[key]).replace("e+", "e")
        words.append(running.folder_name(f"{label} {value}"))
    return "_".join(words)


def check(name: str, config: ConfigDict) -> None:
    """Raise UserError if a run cannot be trained, before the first one starts."""
    try:
        data = parse(config).data
        folder = epath.Path(data.directory).expanduser()
        if data.source == "files" and not folder.is_dir():
            raise ConfigError(
                f"config.data.directory = {data.directory!r}: there is no such folder"
            )
    except ConfigError as error:
        raise ConfigError(f"--grid, {name}: {error}") from error


def _forget_other(path: Path, claim: Claim, condition: str, setting: Setting) -> None:
    """Remove a result of another config, e.g. of fewer steps."""
    if path.exists():
        stored = files.read_object(path).get("design")
        if stored != running.design(claim, condition, setting):
            log.info("%s is of another config: the run goes on", path)
            path.unlink()


def best(sweep: Sweep, measured: Measured) -> str | None:
    """Return the condition with the best mean of the score. Those with a run that
    diverged are left out.
    """
    metric = task_class(sweep.config.task).metrics[sweep.metric]
    merits = {}
    for condition, runs in measured.items():
        merit = metric.merit(float(np.mean([run.values[sweep.metric] for run in runs])))
        if math.isfinite(merit):
            merits[condition] = merit
    return max(merits, key=merits.__getitem__) if merits else None


def as_text(sweep: Sweep, measured: Measured) -> str:
    """Return a Markdown table with a row for each condition: mean and standard
    deviation of each score over the seeds that did not diverge. The row with the best
    mean of `Sweep.metric` is marked.
    """
    keys = list(next(iter(sweep.choices.values())))
    scores = [
        name
        for name in task_class(sweep.config.task).metrics
        if any(name in run.values for runs in measured.values() for run in runs)
    ]
    marked = best(sweep, measured)
    heads = [*keys, "seeds", "diverged", *scores, f"best {sweep.metric}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for condition, runs in measured.items():
        good = [run for run in runs if math.isfinite(run.values[sweep.metric])]
        cells = [str(sweep.choices[condition][key]) for key in keys]
        cells += [str(len(runs)), str(len(runs) - len(good))]
        cells += [summary(good, name) if good else "–" for name in scores]
        lines.append(f"| {' | '.join(cells)} | {'*' * (condition == marked)} |")
    return "\n".join(lines) + "\n"


def to_json(sweep: Sweep, measured: Measured) -> dict[str, Any]:
    """Return the conditions with all measurements, and the best one."""
    return {
        "metric": sweep.metric,
        "best": best(sweep, measured),
        "conditions": {
            condition: {
                "keys": sweep.choices[condition],
                "runs": [
                    {
                        key: running.json_number(value)
                        for key, value in run.values.items()
                    }
                    for run in runs
                ],
                "workdirs": [
                    run.name for run in sweep.runs if run.condition == condition
                ],
            }
            for condition, runs in measured.items()
        },
    }


def single(runs: Sequence[Run], name: str) -> Run:
    """Return the run with a name.

    Raises UserError if there is none.
    """
    for run in runs:
        if run.name == name:
            return run
    names = ", ".join(run.name for run in runs)
    raise UserError(f"--run={name}: choose one of {names}")
