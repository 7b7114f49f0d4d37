"""Reports of training steps: rows of metrics.jsonl, and the progress."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.data.batching import Batches
from transformer_jax.training import profiling
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.compilations import Compilations
from transformer_jax.training.divergence import Diverged, remedy
from transformer_jax.training.engine import Engine
from transformer_jax.training.logging import Display, MetricsWriter, Pace, clock
from transformer_jax.training.task import Work

log = logging.getLogger(__name__)

MAX_SKIPPED = 10  # consecutive skipped steps after which a run fails
AHEAD = 2  # steps dispatched before the preceding ones are computed


class Report:
    """Collects the metrics of the steps since the last row of metrics.jsonl.

    It also shows the progress. `watched` is what was measured of the last step, if it
    is watched.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        compiled: Compilations,
        first: int,
        skipped: int,
    ):
        """`first` is the number of steps done before.

        `skipped` is the number of those that were skipped.
        """
        steps = engine.config.training.steps
        self.pace = Pace(first, steps)
        self._display = Display(first, steps)
        self._engine = engine
        self._writer = writer
        self._guard = Guard(batches, checkpoints, skipped)
        self._first = first
        self._last = steps
        self._compiled = compiled
        self._peak: tuple[str, float] | None = None
        self._begin_row()

    def _begin_row(self) -> None:
        self._since = self.pace.seconds()
        self._pending: list[Mapping[str, jax.Array]] = []
        self._work = Work(0, 0.0)
        self.watched: Mapping[str, float] = {}

    def close(self) -> None:
        """Close the display."""
        self._display.close()

    def add(self, step: int, metrics: Mapping[str, jax.Array], work: Work) -> None:
        """Add a step's metrics, and wait until at most AHEAD steps are pending.

        A few pending steps keep the devices busy. Without a limit, hundreds would queue
        up and delay a stop.
        """
        self._pending.append(metrics)
        self._work = Work(
            self._work.tokens + work.tokens, self._work.flops + work.flops
        )
        first = step == self._first + 1
        jax.block_until_ready(
            self._pending[:-AHEAD][-1:] if not first else self._pending
        )
        if (
            (first or len(self._pending) > AHEAD)
            and step < self._last
            and self._display.is_due()
        ):
            done = jax.device_get(self._pending if first else self._pending[:-AHEAD])
            self._show(
                step, _mean_loss(done), self._work, self.pace.seconds() - self._since
            )

    def write_rest(self, step: int) -> None:
        """Write a row, unless the last row was that of `step`."""
        if self._pending:
            self.write(step)

    def write(self, step: int) -> None:
        """Wait for the pending steps, and log their means as those of `step`."""
        steps = jax.device_get(self._pending)
        finite = self._guard.check(step, steps)
        work = self._work
        elapsed = self.pace.seconds() - self._since
        if step == self._last:
            self._show(step, _mean_loss(steps), work, elapsed)
        if self._peak is None:
            start = time.perf_counter()
            self._peak = profiling.peak_flops(self._engine.config.model.dtype)
            self.pace.leave_out(start)
        utilization, peak = self._peak
        last = {} if steps[-1]["skipped"] else steps[-1]
        values = {
            name: float(value)
            for name, value in last.items()
            if name not in ("weight", "skipped")
        }
        if finite:
            values["mean_loss"] = _mean_loss(finite)
        values |= {
            "learning_rate": float(
                self._engine.schedule(step - 1 - self._guard.skipped)
            ),
            "tokens_per_s": round(work.tokens / elapsed, 1),
            utilization: round(work.flops / elapsed / peak, 4),
            **profiling.device_memory(),
            **self._clipped(finite),
            **self.watched,
        }
        self._writer.write(step, "train", values)
        self._begin_row()

    def _clipped(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the share of steps that were clipped, for a run that is watched."""
        config = self._engine.config
        if not (config.training.watch_every and config.optimizer.clip_norm and steps):
            return {}
        norms = np.array([values["gradient_norm"] for values in steps])
        return {"clipped": float(np.mean(norms >= config.optimizer.clip_norm))}

    def _show(self, step: int, loss: float, work: Work, elapsed: float) -> None:
        shown = [
            f"{self._engine.config.training.loss_label} {loss:.3f}",
            f"{work.tokens / elapsed:,.0f} tokens/s",
        ]
        if self._peak is not None:
            name, peak = self._peak
            shown.append(f"{name.replace('_', ' ')} {work.flops / elapsed / peak:.2f}")
        compiling = self._compiled.left()
        if compiling is None:
            shown.append("ETA: not known before more shapes are compiled")
        else:
            shown.append(f"ETA {clock(self.pace.left(step) + compiling)}")
        self._display.show(step, "  ".join(shown))


def _mean_loss(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the weighted mean loss over the steps that were not skipped.

    It is less noisy than the loss of a single step, which varies with the length of its
    examples.
    """
    finite = [metrics for metrics in steps if not metrics["skipped"]]
    weights = np.array([metrics["weight"] for metrics in finite], np.float64)
    return (
        float(np.average([metrics["loss"] for metrics in finite], weights=weights))
        if finite
        else math.nan
    )


class Guard:
    """Logs skipped steps, and raises Diverged after too many in a row."""

    def __init__(self, batches: Batches, checkpoints: Checkpoints, skipped: int):
        self._batches = batches
        self._checkpoints = checkpoints
        self._in_a_row = 0
        self.skipped = skipped

    def check(self, last: int, metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the metrics of the steps that were not skipped.

        `last` is the number of the last step.
        """
        for step, values in enumerate(metrics, last - len(metrics) + 1):
            self._in_a_row = self._in_a_row + 1 if values["skipped"] else 0
            if values["skipped"]:
                self.skipped += 1
                epoch, batch = divmod(step - 1, len(self._batches.plan))
                where = f"step {step} (epoch {epoch}, batch {batch}; both from 0)"
                log.warning(
                    "%s skipped: loss %s, gradient norm %s",
                    where,
                    values["loss"],
                    values["gradient_norm"],
                )
            if self._in_a_row == MAX_SKIPPED:
                raise Diverged(
                    f"{where} is the {MAX_SKIPPED}th consecutive step with a loss "
                    f"or gradient that is not finite. {remedy(self._checkpoints)}"
                )
        return [values for values in metrics if not values["skipped"]]
