"""The training loop: steps, reports, evaluations, checkpoints, and exact resumption."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from transformer_jax.data.batching import Batches, prefetch
from transformer_jax.data.progress import counted, progress
from transformer_jax.training import (
    processes,
    profiling,
    scoring,
    settings,
    signals,
)
from transformer_jax.training.checkpoint import Checkpoints, check_fingerprint
from transformer_jax.training.divergence import Diverged, check_loss, is_good, remedy
from transformer_jax.training.engine import Engine, compiling_ahead
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.interruption import Interrupted, Stopping, compile_unless
from transformer_jax.training.keeping import Keeper, Metrics, Preempted
from transformer_jax.training.learning import Learning
from transformer_jax.training.location import Location
from transformer_jax.training.logging import (
    Display,
    Listener,
    MetricsWriter,
    Pace,
    clock,
)
from transformer_jax.training.metric import label
from transformer_jax.training.sharding import (
    abstract_batch,
    batch_sharding,
    check_rows,
    feed,
    rows_here,
    shown,
)
from transformer_jax.training.task import Params, Work

log = logging.getLogger(__name__)

MAX_SKIPPED = 10  # consecutive skipped steps after which a run fails
AHEAD = 2  # steps dispatched before the preceding ones are computed


def train(
    engine: Engine,
    workdir: epath.PathLike,
    *,
    initial: Params | None = None,
    trace: range = range(0),
    listeners: Sequence[Listener] = (),
    ready: Callable[[], None] = lambda: None,
) -> TrainState:
    """Train to `training.steps`, from the newest valid checkpoint of `workdir` on.

    Validation scores are those of the moving average if evaluation.checkpoint is "ema",
    otherwise of the parameters.

    Args:
        engine: the engine of the task to train.
        workdir: the folder of the run.
        initial: the parameters that a new run begins with, whose memory it takes over.
            None: they are drawn.
        trace: steps to profile; the profile is written to `workdir`/profile.
        listeners: called with every row of metrics.jsonl.
        ready: called in the first process before the first step, once mesh, data and
            checkpoints were checked.

    Raises:
        ValueError: the data, the mesh or a config key cannot be used.
        CheckpointError: a checkpoint belongs to other data or tokenizers, or cannot be
            written.
        Diverged: the loss or the gradient was not finite for MAX_SKIPPED consecutive
            steps, or the validation loss or a parameter is not finite.
        Preempted: the run was stopped by SIGTERM or Ctrl-C. The state is saved, except
            after a step that diverged.
        signals.Stopped: the run was stopped before its first step, when there was
            nothing to save.
    """
    task = engine.task
    config = task.config
    training = config.training
    workdir = epath.Path(workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint, task.metrics)
    with signals.StopRequest() as request, contextlib.ExitStack() as opened:
        stop = Stopping(request)
        batches, evaluator, meta, meaning, state = _start(engine, checkpoints, initial)
        first = int(state.step)
        pending = first > 0 and processes.first_says(
            lambda: checkpoints.is_pending(first)
        )
        if stop() and (pending or first < training.steps):
            raise Preempted(
                f"stopped before step {first + 1}: "
                "run the same command again to continue"
            )
        if first < training.steps:
            processes.first(ready)
        _announce(first, training.steps, trace)
        compiled = _Compilations(engine.step, len(batches.plan.shapes))
        learning = Learning(batches, training.steps)
        again = config.data.validation_split if pending else ""
        writer = opened.enter_context(
            contextlib.closing(MetricsWriter(workdir, first, listeners, again))
        )
        location = opened.enter_context(contextlib.closing(Location(workdir)))
        keeper = Keeper(checkpoints, location, config, meta, meaning, first)
        examiner = _Examiner(evaluator, writer, keeper, stop)
        if pending:
            examiner.make_up(first, state)
        metrics: Metrics = None
        profile = opened.enter_context(
            contextlib.closing(profiling.Trace(workdir / "profile", trace))
        )
        loaded = opened.enter_context(
            contextlib.closing(prefetch(_load(engine, batches, first)))
        )
        report = _Report(
            engine,
            batches,
            checkpoints,
            writer,
            compiled,
            first,
            first - engine.updates(state),
        )
        opened.callback(report.close)
        for step, (batch, work) in zip(
            range(first + 1, training.steps + 1), loaded, strict=True
        ):
            start = time.perf_counter()
            begun = profile.before(step, state)
            try:
                if compiled.compile(state, batch, stop) or begun:
                    report.pace.leave_out(start)
            except Interrupted:
                report.write_rest(step - 1)
                raise keeper.stopped(step - 1, state, metrics) from None
            state, metrics = engine.step(state, batch)
            compiled.check()
            start = time.perf_counter()
            if profile.after(step, state):
                report.pace.leave_out(start)
            report.add(step, metrics, work)
            last = step == training.steps
            stopping = stop()
            evaluating = last or step % training.evaluate_every == 0
            regular = keeper.is_regular(step)
            logging_now = last or stopping or step % training.log_every == 0
            if logging_now or evaluating or regular:
                keeper.check_place(step, state, metrics)
            if logging_now:
                report.write(step)
            if evaluating or regular:
                jax.block_until_ready(state)  # dispatched steps still count as training
            start, scores = time.perf_counter(), None
            if evaluating and not stopping:
                scores = examiner.scores(step, state, metrics)
                stopping = scores is None
            if stopping:
                raise keeper.stopped(step, state, metrics, pending=evaluating)
            if scores is not None:
                learning.check(step, scores)
            if regular and (evaluating or is_good(step, metrics)):
                keeper.save(step, state, scores)
            if evaluating or regular:
                report.pace.leave_out(start, recurring=True)
    return state


def _start(
    engine: Engine,
    checkpoints: Checkpoints,
    initial: Params | None,
) -> tuple[Batches, Evaluator, dict[str, Any], dict[str, Any], TrainState]:
    """Open the data while the first programs compile; restore or create the state.

    Also return what is stored with every checkpoint: what the run depends on, and what
    its scores depend on.
    """
    task, config = engine.task, engine.config
    newest = checkpoints.newest()
    now = settings.current()
    processes.agree("settings of JAX", lambda: settings.shared(now))
    if newest is not None:
        settings.check(
            checkpoints.meta(newest).get("settings", {}),
            now,
            checkpoints.directory / str(newest),
        )
    with (
        compiling_ahead() as compile_ahead,
        progress("preparing the training data and compiling"),
    ):
        # the first process trains them
        processes.first_then_others(lambda: task.fingerprint(training=False))
        meta = None if newest is None else checkpoints.meta(newest)
        stored = None if meta is None else meta["fingerprint"].keys()
        fingerprint = task.fingerprint(training=True, stored=stored)
        processes.agree("tokenizers or training data", lambda: fingerprint)
        if meta is not None:
            check_fingerprint(fingerprint, meta, checkpoints.directory)
        evaluator = Evaluator(task, engine.mesh)
        held_out = evaluator.open(config.data.validation_split)
        meaning = scoring.of(task, held_out)
        processes.agree("validation data", lambda: meaning)
        if newest is not None:
            scoring.compare(checkpoints.scoring(newest), meaning, newest)
        key = jax.random.key(config.training.seed)
        init_compiled = None
        if newest is None and initial is None:
            init_compiled = compile_ahead(engine.init, key)
        batches = task.batches(config.data.train_split, config.training.seed)
        check_rows(
            (rows for rows, *_ in batches.plan.shapes),
            engine.mesh,
            config.training.microbatches,
        )
        if (first := newest or 0) < config.training.steps:
            arrays = batches.load(batches.plan.batch(first))
            log.info("%s", _compiling(arrays, 1, len(batches.plan.shapes)))
            compile_ahead(
                engine.step, engine.abstract_state, abstract_batch(arrays, engine.mesh)
            )
            for line in task.preview(arrays):
                log.info("%s", line)
        if init_compiled is not None:
            init_compiled.result()
        state = engine.restore_or_init(checkpoints, newest, initial)
        count = sum(x.size for x in jax.tree.leaves(state.params))
        log.info("%s on %s", counted(count, "parameter"), _devices(engine.mesh))
    meta = {"fingerprint": fingerprint, "scored": scoring.part(task), "settings": now}
    return batches, evaluator, meta, meaning, state


def _devices(mesh: Mesh) -> str:
    """Return the devices of a mesh in words, e.g. "1 device (cpu)"."""
    return f"{shown(mesh.shape)} ({mesh.devices.flat[0].device_kind})"


def _announce(first: int, steps: int, trace: range) -> None:
    """Warn if there is nothing to train or nothing to trace."""
    if first >= steps:
        log.warning(
            "nothing to train: the newest checkpoint is step %d, training.steps is %d. "
            "To continue, set a larger --config.training.steps; "
            "to start over, set another --workdir",
            first,
            steps,
        )
    if trace and trace.start not in range(first + 1, steps + 1):
        log.warning(
            "no profile: step %d is not among the remaining steps, %d to %d",
            trace.start,
            first + 1,
            steps,
        )


def _load(
    engine: Engine, batches: Batches, first: int
) -> Iterator[tuple[Mapping[str, jax.Array], Work]]:
    """Yield the placed batches from number `first` to the end of the run.

    Each comes with the work of a step on it.
    """
    for batch, arrays, placed in feed(
        batches, range(first, engine.config.training.steps), engine.mesh
    ):
        work = engine.task.work(arrays)
        own = batch.indices[rows_here(batch_sharding(engine.mesh), len(batch.indices))]
        # The processes have about equal work.
        share = int((batch.indices >= 0).sum()) / max(int((own >= 0).sum()), 1)
        yield placed, Work(round(work.tokens * share), work.flops * share)


class _Report:
    """Collects the metrics of the steps since the last row of metrics.jsonl.

    It also shows the progress.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        compiled: "_Compilations",
        first: int,
        skipped: int,
    ):
        """`first` is the number of steps done before.

        `skipped` is the number of those that were skipped.
        """
        steps = engine.config.training.steps
        self.pace, self._display = Pace(first, steps), Display(first, steps)
        self._engine = engine
        self._writer = writer
        self._guard = _Guard(batches, checkpoints, skipped)
        self._first, self._last, self._compiled = first, steps, compiled
        self._peak: tuple[str, float] | None = None
        self._begin_row()

    def _begin_row(self) -> None:
        self._since = self.pace.seconds()
        self._pending: list[Mapping[str, jax.Array]] = []
        self._work = Work(0, 0.0)

    def close(self) -> None:
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
        steps = jax.device_get(self._pending)
        finite = self._guard.check(step, steps)
        work, elapsed = self._work, self.pace.seconds() - self._since
        if step == self._last:
            self._show(step, _mean_loss(steps), work, elapsed)
        if self._peak is None:
            start = time.perf_counter()
            self._peak = profiling.peak_flops(self._engine.config.model.dtype)
            self.pace.leave_out(start)
        utilization, peak = self._peak
        own = {} if steps[-1]["skipped"] else steps[-1]
        values = {
            name: float(value)
            for name, value in own.items()
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
        }
        self._writer.write(step, "train", values)
        self._begin_row()

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


class _Guard:
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


class _Examiner:
    """Evaluates the state on the validation split.

    It writes the row and checks the loss.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        writer: MetricsWriter,
        keeper: Keeper,
        stop: Stopping,
    ):
        self._evaluator = evaluator
        self._writer = writer
        self._keeper = keeper
        self._stop = stop

    def scores(
        self, step: int, state: TrainState, metrics: Metrics
    ) -> dict[str, float] | None:
        """Return the numbers among the scores.

        None: the run should stop, and is evaluated later.
        """
        task, start = self._evaluator.task, time.perf_counter()
        split = task.config.data.validation_split
        try:
            scores = self._evaluator.evaluate(
                getattr(state, scoring.part(task)), split, greedy=True, stop=self._stop
            )
        except Interrupted:
            return None
        numbers = {
            name: value for name, value in scores.items() if not isinstance(value, str)
        }
        self._keeper.check_place(step, state, metrics)
        self._writer.write(step, split, scores)
        shown = "  ".join(
            f"{label(task.metrics, name)} {value:.4g}"
            for name, value in numbers.items()
        )
        log.info(
            "step %d  %s: %s  (%.1f s)", step, split, shown, time.perf_counter() - start
        )
        check_loss(self._keeper.checkpoints, step, numbers)
        return numbers

    def make_up(self, step: int, state: TrainState) -> None:
        """Evaluate a step that was saved before its evaluation.

        The run had been asked to stop.
        """
        log.info("step %d is evaluated first: the run was stopped before", step)
        scores = self.scores(step, state, metrics=None)
        if scores is None:
            raise Preempted(
                f"stopped before step {step} was evaluated: "
                "run the same command again to continue"
            )
        self._keeper.complete(step, scores)


def _compiling(batch: Mapping[str, Any], number: int, shapes: int) -> str:
    """Return the log line before a compilation."""
    arrays = {name: array.shape for name, array in batch.items() if array.ndim > 1}
    shape = ", ".join(f"{name} {' × '.join(map(str, x))}" for name, x in arrays.items())
    of = f", shape {number} of at most {shapes}" if shapes > 1 else ""
    patience = ": seconds to minutes" if number == 1 else ""
    return f"compiling the training step for batches of {shape}{of}{patience}"


class _Compilations:
    """Compiles the step before its first call with each batch shape.

    So compilation can be timed separately. `shapes` is the number of batch shapes, and
    thus the expected maximum. The first one was announced, and perhaps compiled,
    before.
    """

    def __init__(self, step: Any, shapes: int):
        self._step = step
        self._shapes = shapes
        self._compiled = set[tuple]()
        self._count = 0
        self._seconds: list[float] = []  # of each compilation after the first

    def compile(
        self,
        state: TrainState,
        batch: Mapping[str, jax.Array],
        stop: Stopping | None = None,
    ) -> bool:
        """Compile the step for this batch.

        Return False if it was compiled for the shape before.

        Raises Interrupted if the run should stop meanwhile.
        """
        shapes = tuple(array.shape for array in batch.values())
        if shapes in self._compiled:
            return False
        if later := bool(self._compiled):
            log.info("%s", _compiling(batch, len(self._compiled) + 1, self._shapes))
        start = time.perf_counter()
        compile_unless(stop, self._step.lower(state, batch))
        self._seconds += [time.perf_counter() - start] * later
        self._compiled.add(shapes)
        return True

    def left(self) -> float | None:
        """Return the estimated seconds of the compilations to come, None if unknown."""
        missing = max(self._shapes - len(self._compiled), 0)
        if missing and not self._seconds:
            return None
        return missing * float(np.mean(self._seconds or [0.0]))

    def check(self) -> None:
        """Warn if the step was compiled more often than there are batch shapes."""
        count, self._count = self._count, self._step._cache_size()
        if self._count > max(count, self._shapes):
            message = (
                "compiled the step %d times for %d batch shapes: "
                "check what else changes"
            )
            log.warning(message, self._count, self._shapes)
