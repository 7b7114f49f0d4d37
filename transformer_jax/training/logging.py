"""What a run leaves to read: metrics.jsonl, TensorBoard events, progress lines."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from transformer_jax.training import processes

log = logging.getLogger(__name__)

Listener = Callable[[int, str, Mapping[str, float | str]], None]  # step, split, values


class MetricsWriter:
    """`metrics.jsonl` (one object a line: step, split, values) and TensorBoard events in `workdir`.

    On resumption at `step`, later rows, and a last line that a kill cut short, are removed. Of several processes only
    the first writes, and tells the listeners.
    """

    def __init__(self, workdir: epath.PathLike, step: int, listeners: Sequence[Listener] = ()):
        self._events, self._listeners = None, listeners
        if not processes.is_first():
            return
        # Imported late: it costs 0.2 s, and prediction has no use for it.
        from tensorboardX import SummaryWriter

        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._kept = [line for line, row in read_rows(self._path) if row["step"] <= step]
        self._rewrite()
        self._events = SummaryWriter(str(workdir), purge_step=step + 1)

    def _rewrite(self) -> None:
        """At no moment is there less of the file than before."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text("".join(line + "\n" for line in self._kept))
        temporary.replace(self._path)

    def write(self, step: int, split: str, values: Mapping[str, float | str]) -> None:
        if self._events is None:
            return
        line = json.dumps({"step": step, "split": split, **values})
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
        if self._events is not None:
            self._events.close()


def absolute(path: epath.PathLike) -> epath.Path:
    """The same place whatever the current directory. (epath's `resolve` takes gs:// for a folder of that.)"""
    path = epath.Path(path)
    return path if "://" in str(path) else path.resolve()


def read_rows(path: epath.PathLike) -> list[tuple[str, dict]]:
    """(line, parsed) of every whole row; a torn line is passed over."""
    path = epath.Path(path)
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append((line, json.loads(line)))
        except json.JSONDecodeError:
            log.warning("%s: passed over a torn line: %.40s", path, line)
    return rows


class Progress:
    """The time since the last report, and the time left at the pace of this run so far.

    Only training counts: time spent compiling, evaluating and saving is left out.
    """

    def __init__(self, step: int, steps: int):
        self._first, self._steps = step, steps
        self._training = 0.0
        self._since = time.perf_counter()

    def leave_out(self, since: float) -> None:
        """What happened from `since` (time.perf_counter) to now was not training."""
        self._since += time.perf_counter() - since

    def report(self, step: int) -> tuple[float, float]:
        """(seconds of training since the last report, seconds left)."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self._training += elapsed
        return elapsed, self._training / (step - self._first) * (self._steps - step)


def clock(seconds: float) -> str:
    """75 → "1:15"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def wandb_listener(project: str, workdir: epath.PathLike, config: Mapping[str, Any]) -> Listener:
    """Tells Weights & Biases every row; a workdir is one run there, also after a restart.

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
