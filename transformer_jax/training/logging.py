"""Write what a person reads of a run: metrics.jsonl, TensorBoard events, progress lines."""

import contextlib
import functools
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from transformer_jax.training import processes

log = logging.getLogger(__name__)

Listener = Callable[[int, str, Mapping[str, float | str]], None]  # step, split, values


class MetricsWriter:
    """Writes `metrics.jsonl` (one object a line: step, split, values) and TensorBoard events to `workdir`.

    When a run resumes at `step`, later rows are removed, and so is a last line that a kill cut short. Only the first
    process writes and calls the listeners.
    """

    def __init__(self, workdir: epath.PathLike, step: int, listeners: Sequence[Listener] = ()):
        self._workdir, self._step, self._listeners = str(workdir), step, listeners
        if processes.is_first():
            self._path = epath.Path(workdir) / "metrics.jsonl"
            self._kept = [line for line, row in read_rows(self._path) if row["step"] <= step]
            self._rewrite()

    @functools.cached_property
    def _events(self) -> Any:
        from tensorboardX import SummaryWriter  # imported for the first row: the first step need not wait for it

        return SummaryWriter(self._workdir, purge_step=self._step + 1)

    def _rewrite(self) -> None:
        """Replace the file atomically."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text("".join(line + "\n" for line in self._kept))
        temporary.replace(self._path)

    def write(self, step: int, split: str, values: Mapping[str, float | str]) -> None:
        if not processes.is_first():
            return
        line = json_line({"step": step, "split": split, **values})
        self._kept.append(line)
        if "://" in str(self._path):  # in a bucket nothing can be added to
            self._rewrite()
        else:
            with self._path.open("a") as file:
                file.write(line + "\n")
        for name, value in values.items():
            if not isinstance(value, str):
                self._events.add_scalar(f"{split}/{name}", value, step)
        self._events.flush()
        for listener in self._listeners:
            listener(step, split, values)

    def close(self) -> None:
        if "_events" in self.__dict__:
            self._events.close()


def json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON, which has no word for nan and the infinities: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, allow_nan=False)


def absolute(path: epath.PathLike) -> epath.Path:
    """Return the path, independent of the current directory. (epath's `resolve` takes gs:// for a folder.)"""
    path = epath.Path(path)
    return path if "://" in str(path) else path.resolve()


def read_rows(path: epath.PathLike) -> list[tuple[str, dict]]:
    """Return (line, parsed) of every row. Skips a torn line and what is no row, with a warning."""
    path = epath.Path(path)
    rows = []
    for line in path.read_bytes().decode(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("no row")
            rows.append((line, row))
        except ValueError:
            log.warning("%s: passed over a torn line: %.40s", path, line)
    return rows


class Pace:
    """Measures the time of training, and estimates the time left at this run's pace.

    Only training counts. Time spent compiling, evaluating and saving is left out.
    """

    def __init__(self, step: int, steps: int):
        self._first, self._steps, self._start = step, steps, time.perf_counter()

    def leave_out(self, since: float) -> None:
        """Leave out the time from `since` (time.perf_counter) to now."""
        self._start += time.perf_counter() - since

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.perf_counter() - self._start

    def left(self, step: int) -> float:
        """Return the seconds left after `step`."""
        return self.seconds() / (step - self._first) * (self._steps - step)


class Display:
    """Shows how far a run is: a bar on a terminal, else a line after the first step and then now and then.

    Lines come every ten seconds at first and every minute later on, however many steps that is. A bar is drawn anew
    every second, below what is logged meanwhile.
    """

    def __init__(self, first: int, steps: int):
        self._steps, self._start, self._next = steps, time.monotonic(), 0.0
        self._bar, self._open = None, contextlib.ExitStack()
        if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._open.enter_context(logging_redirect_tqdm())
            bar = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}"
            self._bar = self._open.enter_context(tqdm(initial=first, total=steps, bar_format=bar, dynamic_ncols=True))

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        if self._bar is None:
            log.info("step %d/%d  %s", step, self._steps, text)
            self._next = now + min(max(10.0, (now - self._start) / 10), 60.0)
        else:
            self._bar.n = step
            self._bar.set_postfix_str(text)  # draws the bar
            self._next = now + 1.0

    def close(self) -> None:
        self._open.close()


def clock(seconds: float) -> str:
    """Format seconds: 75 → "1:15"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def wandb_listener(project: str, workdir: epath.PathLike, config: Mapping[str, Any]) -> Listener:
    """Return a listener that logs every row to Weights & Biases. A workdir is one run there, also after a restart.

    Raises ValueError where wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"--wandb_project={project} needs wandb: pip install wandb, or leave the option out"
        ) from error
    name = str(absolute(workdir))
    run = wandb.init(
        project=project,
        id=hashlib.sha256(name.encode()).hexdigest()[:16],
        name=name,
        config=dict(config),
        resume="allow",
    )

    def tell(step: int, split: str, values: Mapping[str, float | str]) -> None:
        run.log({f"{split}/{key}": value for key, value in values.items()}, step=step)

    return tell
