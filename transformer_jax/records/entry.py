"""An entry of a record: a config that is trained, timed and measured."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from transformer_jax import experiment
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import Trained
from transformer_jax.predictor import Predictor
from transformer_jax.records.record import Finished, Record

CONDITION = "entry"
# keys that may differ between two runs of an entry
PLACES = ("data.directory", "training.seed")


class Clock:
    """Measures the time from the start of a run to each row of metrics.jsonl.

    It is a listener of the training. The times are kept in `path`, a JSON object a
    line, so that a run that goes on after a stop has all of its time, including that
    of steps that are repeated. The time between the last row and a stop is lost.
    """

    def __init__(self, path: Path):
        self._path = path
        self._rows = []
        if path.exists():
            self._rows = [json.loads(line) for line in path.read_text().splitlines()]
        last = self._rows[-1]["seconds"] if self._rows else 0.0
        self._start = time.monotonic() - last

    def __call__(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        seconds = round(time.monotonic() - self._start, 2)
        row = {"step": step, "split": split, "seconds": seconds}
        self._rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def seconds(self) -> dict[tuple[int, str], float]:
        """The time to the last row of each step and split."""
        return {(row["step"], row["split"]): row["seconds"] for row in self._rows}


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A condition that trains the config of an entry, and measures the run.

    Beside what the record measures, it measures `processors`, the number that the run
    could use.
    """

    record: Record
    config: ConfigDict

    @property
    def design(self) -> Mapping[str, Any]:
        """The config, apart from folder and seed."""
        return {"config": without_places(self.config)}

    def config_of(self, setting: Setting) -> ConfigDict:
        """Return the config of a run."""
        copy = Trained(
            self.config.copy_and_resolve_references,
            data=self.record.data,
            quick=self.record.quick,
        )
        return copy.config(setting)

    def __call__(self, setting: Setting) -> Measurements:
        workdir = setting.workdir / "run"
        clock = Clock(setting.workdir / "clock.jsonl")
        config = self.config_of(setting)
        experiment.run(config, workdir, listeners=[clock])
        predictor = Predictor.load(workdir, {}, task=config.task)
        values = self.record.measured(
            Finished(predictor, workdir, clock.seconds, setting)
        )
        return {**values, "processors": float(processors())}


def without_places(config: ConfigDict) -> dict[str, Any]:
    """Return a config without what may differ between two runs of an entry."""
    values = config.to_dict()
    for key in PLACES:
        section, name = key.split(".")
        del values[section][name]
    return values


def as_claim(record: Record, config: ConfigDict) -> Claim:
    """Return an entry as a claim with one condition, so that `claims.running` runs it.

    Raises UserError if the config changes what is fixed.
    """
    record.check(config)
    needed = [record.measure, *(rule.measure for rule in record.rules)]
    # these rules only say what must be measured: `Record.broken` decides
    expected = tuple(Expected(measure, CONDITION, most=0) for measure in needed)
    return Claim(
        statement=record.title,
        source="docs/records.md",
        conditions={CONDITION: Entry(record, config)},
        expected=expected,
        cost=record.cost,
        seeds=record.seeds,
    )
