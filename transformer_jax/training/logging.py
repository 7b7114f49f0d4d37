"""Report the progress of a run: metrics.jsonl, TensorBoard events, and progress
lines.
"""

import contextlib
import functools
import json
import logging
import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from transformer_jax import files
from transformer_jax.errors import UserError
from transformer_jax.training import processes
from transformer_jax.training.location import identity

log = logging.getLogger(__name__)

Listener = Callable[[int, str, Mapping[str, float | str]], None]  # step, split, values


class MetricsWriter:
    """Writes `metrics.jsonl` (one JSON object per line: step, split, values) and
    TensorBoard events to `workdir`.

    When a run resumes at `step`, later rows are removed, as is a last line truncated by
    a kill. Only the first process writes and calls the listeners.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        step: int,
        listeners: Sequence[Listener] = (),
        again: str = "",
    ):
        """`again` is a split whose row of `step` will be written again."""
        self._workdir = str(workdir)
        self._step = step
        self._listeners = listeners
        if processes.is_first():
            self._path = epath.Path(workdir) / "metrics.jsonl"
            self._kept = [
                line
                for line, row in read_rows(self._path)
                if row["step"] < step
                or (row["step"] == step and row.get("split") != (again or None))
            ]
            self._rewrite()

    @functools.cached_property
    def _events(self) -> Any:
        # a slow import, not needed before the first row
        from tensorboardX import SummaryWriter

        return SummaryWriter(self._workdir, purge_step=self._step + 1)

    def _rewrite(self) -> None:
        """Write all rows and replace the file atomically."""
        files.write(self._path, "".join(line + "\n" for line in self._kept).encode())

    def write(self, step: int, split: str, values: Mapping[str, float | str]) -> None:
        """Write the values of a step to the files, and pass them to the listeners."""
        if not processes.is_first():
            return
        with self._explained():
            self._write(step, split, values)
        for listener in self._listeners:
            listener(step, split, values)

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return files.explained(
            f"metrics cannot be written to {self._workdir}",
            "free some space, or grant the permission, "
            "and run the same command to continue",
        )

    def _write(self, step: int, split: str, values: Mapping[str, float | str]) -> None:
        line = json_line({"step": step, "split": split, **values})
        self._kept.append(line)
        if "://" in str(self._path):  # object stores cannot append to a file
            self._rewrite()
        else:
            with self._path.open("a") as file:
                file.write(line + "\n")
        for name, value in values.items():
            if not isinstance(value, str):
                self._events.add_scalar(f"{split}/{name}", value, step)
        self._events.flush()

    def close(self) -> None:
        """Close the file of events, if it is open."""
        if "_events" in self.__dict__:
            with self._explained():
                self._events.close()


def json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON. NaN and infinities, which JSON lacks, become null."""
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in values.items()
    }
    return json.dumps(finite, allow_nan=False)


def absolute(path: epath.PathLike) -> epath.Path:
    """Return the absolute path.

    Paths with a scheme are unchanged: epath's `resolve` would treat gs:// as a folder.
    """
    path = epath.Path(path)
    return path if "://" in str(path) else path.resolve()


def read_rows(path: epath.PathLike) -> list[tuple[str, dict]]:
    """Return (line, parsed) for every row.

    Truncated and other invalid lines are skipped with a warning.

    Raises UserError if the user must act before the file can be read, or OSError if the
    disk fails.
    """
    path = epath.Path(path)
    rows = []
    try:
        with files.explained(
            f"{path} cannot be read", "check its name and its permissions"
        ):
            content = path.read_bytes()
    except FileNotFoundError:
        return []
    for line in content.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise UserError("not a row")
            rows.append((line, row))
        except ValueError:
            log.warning("%s: skipped an invalid line: %.40s", path, line)
    return rows


class Pace:
    """Measures the training time and estimates the time left.

    The training time has no compiling, evaluating and saving. In the estimate, the last
    two count as often as they did so far.
    """

    def __init__(self, step: int, steps: int):
        self._first = step
        self._steps = steps
        self._start = time.perf_counter()
        self._between = 0.0

    def leave_out(self, since: float, recurring: bool = False) -> None:
        """Exclude the time from `since` (a value of time.perf_counter) to now.

        `recurring`: the rest of the run will spend time in this way too.
        """
        elapsed = time.perf_counter() - since
        self._start += elapsed
        self._between += elapsed if recurring else 0.0

    def seconds(self) -> float:
        """Return the training time so far, in seconds."""
        return time.perf_counter() - self._start

    def left(self, step: int) -> float:
        """Return the estimated time after `step`, in seconds, without compilations."""
        so_far = self.seconds() + self._between
        return so_far / (step - self._first) * (self._steps - step)


class Display:
    """Shows the progress of a run: a bar on a terminal, log lines elsewhere.

    The bar is redrawn every second, below new log messages. The first line comes after
    the first step. Further lines come every ten seconds at first and every minute
    later, independent of the number of steps.
    """

    def __init__(self, first: int, steps: int):
        self._steps = steps
        self._start = time.monotonic()
        self._next = 0.0
        self._bar = None
        self._open = contextlib.ExitStack()
        if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._open.enter_context(logging_redirect_tqdm())
            bar = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}"
            self._bar = self._open.enter_context(
                tqdm(initial=first, total=steps, bar_format=bar, dynamic_ncols=True)
            )

    def is_due(self) -> bool:
        """Return True if it is time for the next line."""
        return time.monotonic() >= self._next

    def show(self, step: int, text: str) -> None:
        """Show a line of text, or update the bar, for a step."""
        now = time.monotonic()
        if self._bar is None:
            log.info("step %d/%d  %s", step, self._steps, text)
            self._next = now + min(max(10.0, (now - self._start) / 10), 60.0)
        else:
            self._bar.n = step
            self._bar.set_postfix_str(text)  # draws the bar
            self._next = now + 1.0

    def close(self) -> None:
        """Remove the bar, if there is one."""
        self._open.close()


def clock(seconds: float) -> str:
    """Format a duration in seconds, e.g. 75 as "1:15"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _stored_id(path: epath.Path) -> dict[str, Any]:
    """Return the content of wandb.json, or {} if there is none.

    Raises UserError if it is damaged.
    """
    with files.explained(f"{path} cannot be read", "check its permissions"):
        if not files.exists(path):
            return {}
        text = path.read_text()
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it, or remove it for a new W&B run"
        ) from error


def wandb_listener(
    project: str, workdir: epath.PathLike, config: Mapping[str, Any]
) -> Listener:
    """Return a listener that logs every row to Weights & Biases.

    The id of the run is random and kept in `workdir`/wandb.json from the first row on,
    so that restarts in the same workdir continue the same run. A copy of the workdir is
    another run. Raises ValueError if wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"--wandb_project={project} needs wandb: "
            "run pip install wandb, or omit the option"
        ) from error
    path = epath.Path(workdir) / "wandb.json"
    stored = _stored_id(path)
    if stored and stored.get("folder") != identity(workdir):
        log.info(
            "%s was copied from another workdir: this run gets an id of its own", path
        )
        stored = {}
    run_id = stored.get("id") or secrets.token_hex(8)
    run = wandb.init(
        project=project,
        id=run_id,
        name=str(absolute(workdir)),
        config=dict(config),
        resume="allow",
    )

    def tell(step: int, split: str, values: Mapping[str, float | str]) -> None:
        if not stored:
            stored.update(id=run_id, folder=identity(workdir))
            files.write(path, json_line(stored).encode())
        run.log({f"{split}/{key}": value for key, value in values.items()}, step=step)

    return tell
