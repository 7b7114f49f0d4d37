"""Run the conditions of a claim, each with several seeds, and keep what was measured.

A run of a condition with one seed has a folder, WORKDIR/CLAIM/CONDITION/SEED. Its
measurements are in `result.json` there, so a claim that was stopped goes on where it
was.
"""

import gc
import json
import logging
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from transformer_jax import files
from transformer_jax.claims.claim import Claim, Setting
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks at the processes

# Starts a process that runs a condition, given its name, a seed, and the file for what
# it prints.
Start = Callable[[str, int, IO[bytes]], subprocess.Popen[bytes]]


class Measured(NamedTuple):
    """The measurements of one run of a condition, and its duration."""

    values: dict[str, float]
    seconds: float


def folder_name(words: str) -> str:
    """Return a name for a folder: letters, digits, "." and "-" of `words`."""
    return re.sub(r"[^\w.-]+", "-", words).strip("-")


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: as a string if it is not finite."""
    return value if math.isfinite(value) else str(value)


def measured(claim: Claim, condition: str, setting: Setting) -> Measured | None:
    """Return what an earlier run of a condition measured, or None.

    Raises:
        UserError: the result is unreadable, or of another design.
    """
    path = setting.workdir / "result.json"
    if not path.exists():
        return None
    stored = files.read_object(path)
    needed = design(claim, condition, setting)
    if stored.get("design") != needed:
        raise UserError(
            f"{path} was measured with {json.dumps(stored.get('design'))}, and not "
            f"with {json.dumps(needed)}: name another --workdir, or remove its folder"
        )
    values = {name: float(value) for name, value in stored["values"].items()}
    return Measured(values, stored["seconds"])


def measure(claim: Claim, condition: str, setting: Setting) -> Measured:
    """Run a condition, unless it was run before, and return what was measured.

    Raises:
        UserError: see `measured`; or the condition did not measure what the claim's
            rules need.
    """
    if found := measured(claim, condition, setting):
        return found
    setting.workdir.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    values = dict(claim.conditions[condition](setting))
    needed = {
        rule.measure
        for rule in claim.expected
        if condition in (rule.condition, rule.minus)
    }
    if missing := sorted(needed - set(values)):
        raise UserError(
            f"the condition {condition!r} measured {', '.join(values) or 'nothing'}, "
            f"and not {', '.join(missing)}, which a rule of the claim needs"
        )
    seconds = round(time.monotonic() - start, 1)
    result = {
        "design": design(claim, condition, setting),
        "values": {name: json_number(value) for name, value in values.items()},
        "seconds": seconds,
    }
    text = json.dumps(result, indent=1, allow_nan=False)
    files.write(setting.workdir / "result.json", text.encode())
    return Measured(values, seconds)


def design(claim: Claim, condition: str, setting: Setting) -> dict[str, Any]:
    """Return the settings that define the measurements of a run, as JSON."""
    settings = {**claim.conditions[condition].design, "quick": setting.quick}
    return json.loads(json.dumps(settings))


def measure_all(
    claim: Claim, tasks: Sequence[tuple[str, Setting]], start: Start, jobs: int
) -> dict[str, list[Measured]]:
    """Run conditions, `jobs` at a time, and return what they measured, by condition.

    With one job, they run in this process. Raises the errors of `measured`, `measure`
    and `measure_apart`.
    """
    if jobs > 1:
        open_tasks = [
            (condition, setting)
            for condition, setting in tasks
            if measured(claim, condition, setting) is None
        ]
        measure_apart(open_tasks, start, jobs)
    values: dict[str, list[Measured]] = {}
    for number, (condition, setting) in enumerate(tasks, 1):
        of_all = f"run {number} of {len(tasks)}"
        log.info("%s, seed %d: %s", condition, setting.seed, of_all)
        values.setdefault(condition, []).append(measure(claim, condition, setting))
        # Compiled programs are in reference cycles, and scripts collect garbage seldom.
        # After some 20 runs, Linux would allow no more mappings of memory.
        gc.collect()
    return values


def measure_apart(
    tasks: Sequence[tuple[str, Setting]], start: Start, jobs: int
) -> None:
    """Run conditions in processes of their own, `jobs` at a time.

    Each gets an equal part of the processors. What they print goes to `log.txt` in
    their folders. If this function is interrupted, it stops them.

    Raises:
        UserError: a process ended with an error.
    """
    waiting = list(tasks)
    shares = _shares(jobs)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and shares:
                task = waiting.pop(0)
                running.append(_started(task, start, shares.pop()))
            time.sleep(POLL)
            for one in running.copy():
                if one.process.poll() is None:
                    continue
                running.remove(one)
                shares.append(one.processors)
                _check(one)
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.wait()


class _Running(NamedTuple):
    """A process that runs a condition."""

    condition: str
    setting: Setting
    process: subprocess.Popen[bytes]
    processors: set[int]


def _started(task: tuple[str, Setting], start: Start, processors: set[int]) -> _Running:
    condition, setting = task
    setting.workdir.mkdir(parents=True, exist_ok=True)
    with (setting.workdir / "log.txt").open("ab") as output:
        process = start(condition, setting.seed, output)
    if processors:
        os.sched_setaffinity(process.pid, processors)
    return _Running(condition, setting, process, processors)


def _check(one: _Running) -> None:
    code = one.process.returncode
    if code:
        raise UserError(
            f"{one.condition}, seed {one.setting.seed}, ended with exit code {code}: "
            f"{one.setting.workdir / 'log.txt'} says why; the same command goes on"
        )
    log.info("%s, seed %d: done", one.condition, one.setting.seed)


def _shares(jobs: int) -> list[set[int]]:
    """Return the processors of each job; empty sets where the system has no choice."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    processors = sorted(os.sched_getaffinity(0))
    return [set(processors[i::jobs] or processors) for i in range(jobs)]


def settings_of(
    claim: Claim, folder: Path, seeds: Sequence[int], setting: Setting
) -> list[tuple[str, Setting]]:
    """Return each condition with each seed, and its setting.

    folder: that of the claim. `setting` has everything but the seed and the workdir.
    Seeds are in the outer loop, so that all conditions have been run once soon.
    """
    names = {name: folder_name(name) for name in claim.conditions}
    if len(set(names.values())) < len(names):
        raise UserError(
            f"conditions {', '.join(names)} share a folder: "
            "give them names that differ in more than signs"
        )
    return [
        (
            condition,
            setting._replace(seed=seed, workdir=folder / name / str(seed)),
        )
        for seed in seeds
        for condition, name in names.items()
    ]
