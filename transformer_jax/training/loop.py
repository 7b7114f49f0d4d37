"""The training loop: steps, reports, evaluations, checkpoints, and exact resumption."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh

from transformer_jax.data.batching import Batches, prefetch
from transformer_jax.data.progress import progress
from transformer_jax.training import (
    freezing,
    processes,
    profiling,
    scoring,
    settings,
    signals,
)
from transformer_jax.training.checkpoint import Checkpoints, check_fingerprint
from transformer_jax.training.compilations import Compilations, announcement
from transformer_jax.training.divergence import check_loss, is_good
from transformer_jax.training.engine import Engine, compiling_ahead
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.interruption import Interrupted, Stopping
from transformer_jax.training.keeping import Keeper, Metrics, Preempted
from transformer_jax.training.learning import Learning
from transformer_jax.training.location import Location
from transformer_jax.training.logging import Listener, MetricsWriter
from transformer_jax.training.metric import label
from transformer_jax.training.reporting import Report
from transformer_jax.training.sharding import (
    abstract_batch,
    batch_sharding,
    check_rows,
    feed,
    rows_here,
    shown,
)
from transformer_jax.training.task import Params, Task, Work
from transformer_jax.training.watching import Watch

log = logging.getLogger(__name__)


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
    with signals.StopRequest() as request, contextlib.ExitStack() as resources:
        stop = Stopping(request)
        opened, state = _start(engine, checkpoints, initial)
        batches = opened.batches
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
        compiled = Compilations(engine.step, len(batches.plan.shapes))
        learning = Learning(batches, training.steps)
        again = config.data.validation_split if pending else ""
        writer = resources.enter_context(
            contextlib.closing(MetricsWriter(workdir, first, listeners, again))
        )
        location = resources.enter_context(contextlib.closing(Location(workdir)))
        keeper = Keeper(
            checkpoints, location, config, opened.meta, opened.meaning, first
        )
        examiner = _Examiner(engine, opened.evaluator, writer, keeper, stop)
        if pending:
            examiner.make_up(first, state)
        metrics: Metrics = None
        profile = resources.enter_context(
            contextlib.closing(profiling.Trace(workdir / "profile", trace))
        )
        loaded = resources.enter_context(
            contextlib.closing(prefetch(_load(engine, batches, first)))
        )
        report = Report(
            engine,
            batches,
            checkpoints,
            writer,
            compiled,
            first,
            first - engine.updates(state),
        )
        resources.callback(report.close)
        run = _Run(
            engine,
            stop,
            compiled,
            Watch(engine),
            profile,
            report,
            keeper,
            examiner,
            learning,
        )
        for step, (batch, work) in zip(
            range(first + 1, training.steps + 1), loaded, strict=True
        ):
            state, metrics = run.advance(step, state, metrics, batch, work)
            run.look_after(step, state, metrics)
    return state


@dataclasses.dataclass(frozen=True)
class _Run:
    """The parts of a run that `train` has opened."""

    engine: Engine
    stop: Stopping
    compiled: Compilations
    watch: Watch
    profile: profiling.Trace
    report: Report
    keeper: Keeper
    examiner: "_Examiner"
    learning: Learning

    def advance(
        self,
        step: int,
        state: TrainState,
        metrics: Metrics,
        batch: Mapping[str, jax.Array],
        work: Work,
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        """Take a step, compiling it first if its batch has a new shape, and watching it
        if it is time for that.

        `metrics` are those of the step before.
        """
        start = time.perf_counter()
        begun = self.profile.before(step, state)
        try:
            if self.compiled.compile(state, batch, self.stop) or begun:
                self.report.pace.leave_out(start)
            if self.watch.is_due(step):
                jax.block_until_ready(state)  # dispatched steps count as training
                start = time.perf_counter()
                self.report.watched = self.watch.measure(state, batch, self.stop)
                self.report.pace.leave_out(start, recurring=True)
        except Interrupted:
            self.report.write_rest(step - 1)
            raise self.keeper.stopped(step - 1, state, metrics) from None
        state, new = self.engine.step(state, batch)
        self.compiled.check()
        start = time.perf_counter()
        if self.profile.after(step, state):
            self.report.pace.leave_out(start)
        self.report.add(step, new, work)
        return state, new

    def look_after(
        self, step: int, state: TrainState, metrics: Mapping[str, jax.Array]
    ) -> None:
        """Log, evaluate and save after a step, as far as it is time for each of them.

        Raises Preempted if the run was asked to stop.
        """
        training = self.engine.config.training
        last = step == training.steps
        stopping = self.stop()
        evaluating = last or step % training.evaluate_every == 0
        regular = self.keeper.is_regular(step)
        logging_now = (
            last
            or stopping
            or step % training.log_every == 0
            or self.watch.is_due(step)
        )
        if logging_now or evaluating or regular:
            self.keeper.check_place(step, state, metrics)
        if logging_now:
            self.report.write(step)
        if evaluating or regular:
            jax.block_until_ready(state)  # dispatched steps still count as training
        start = time.perf_counter()
        scores = None
        if evaluating and not stopping:
            scores = self.examiner.scores(step, state, metrics)
            stopping = scores is None
        if stopping:
            raise self.keeper.stopped(step, state, metrics, pending=evaluating)
        if scores is not None:
            self.learning.check(step, scores)
        if regular and (evaluating or is_good(step, metrics)):
            self.keeper.save(step, state, scores)
        if evaluating or regular:
            self.report.pace.leave_out(start, recurring=True)


class _Opened(NamedTuple):
    """The data of a run, and what is stored with each of its checkpoints.

    batches: the batches of the training split.
    evaluator: scores parameters on the validation split, which is open.
    meta: what the run depends on: data, tokenizers and settings of JAX.
    meaning: what its scores depend on, see `scoring.of`.
    """

    batches: Batches
    evaluator: Evaluator
    meta: dict[str, Any]
    meaning: dict[str, Any]


def _start(
    engine: Engine, checkpoints: Checkpoints, initial: Params | None
) -> tuple[_Opened, TrainState]:
    """Open the data while the first programs compile; restore or create the state."""
    task = engine.task
    newest = checkpoints.newest()
    first = newest or 0
    now = _checked_settings(checkpoints, newest)
    with (
        compiling_ahead() as compile_ahead,
        progress("preparing the training data and compiling"),
    ):
        fingerprint = _checked_fingerprint(task, checkpoints, newest)
        evaluator = Evaluator(task, engine.mesh)
        meaning = _checked_meaning(evaluator, checkpoints, newest)
        init_compiled = None
        if newest is None and initial is None:
            key = jax.random.key(engine.config.training.seed)
            init_compiled = compile_ahead(engine.init, key)
        batches = _training_batches(engine)
        if first < engine.config.training.steps:
            _show_and_compile(engine, batches, first, compile_ahead)
        if init_compiled is not None:
            init_compiled.result()
        state = engine.restore_or_init(checkpoints, newest, initial)
        size = freezing.in_words(state.params, engine.config.frozen, state.base)
        log.info("%s on %s", size, _devices(engine.mesh))
    meta = {"fingerprint": fingerprint, "scored": scoring.part(task), "settings": now}
    return _Opened(batches, evaluator, meta, meaning), state


def _checked_settings(checkpoints: Checkpoints, newest: int | None) -> dict[str, Any]:
    """Return the settings of JAX.

    Raises UserError if numbers would not mean what they did at the step `newest`.
    """
    now = settings.current()
    processes.agree("settings of JAX", lambda: settings.shared(now))
    if newest is not None:
        stored = checkpoints.meta(newest).get("settings", {})
        settings.check(stored, now, checkpoints.directory / str(newest))
    return now


def _checked_fingerprint(
    task: Task, checkpoints: Checkpoints, newest: int | None
) -> dict[str, str]:
    """Return the hashes of the tokenizers and the training data.

    Raises CheckpointError if they are not those of the step `newest`.
    """
    # the first process trains the tokenizers
    processes.first_then_others(lambda: task.fingerprint(training=False))
    meta = None if newest is None else checkpoints.meta(newest)
    stored = None if meta is None else meta["fingerprint"].keys()
    fingerprint = task.fingerprint(training=True, stored=stored)
    processes.agree("tokenizers or training data", lambda: fingerprint)
    if meta is not None:
        check_fingerprint(fingerprint, meta, checkpoints.directory)
    return fingerprint


def _checked_meaning(
    evaluator: Evaluator, checkpoints: Checkpoints, newest: int | None
) -> dict[str, Any]:
    """Open the validation split, and return what scores on it depend on.

    Warn if its data are not those of the step `newest`.
    """
    task = evaluator.task
    held_out = evaluator.open(task.config.data.validation_split)
    meaning = scoring.of(task, held_out)
    processes.agree("validation data", lambda: meaning)
    if newest is not None:
        scoring.compare(checkpoints.scoring(newest), meaning, newest)
    return meaning


def _training_batches(engine: Engine) -> Batches:
    """Return the batches of the training split.

    Raises UserError if they cannot be divided among the devices.
    """
    config = engine.config
    batches = engine.task.batches(config.data.train_split, config.training.seed)
    check_rows(
        (rows for rows, *_ in batches.plan.shapes),
        engine.mesh,
        config.training.microbatches,
    )
    return batches


def _show_and_compile(
    engine: Engine, batches: Batches, first: int, compile_ahead: Callable[..., Any]
) -> None:
    """Log the first batch, number `first`, while the step compiles for its shape."""
    arrays = batches.load(batches.plan.batch(first))
    log.info("%s", announcement(arrays, 1, len(batches.plan.shapes)))
    compile_ahead(
        engine.step, engine.abstract_state, abstract_batch(arrays, engine.mesh)
    )
    for line in engine.task.preview(arrays):
        log.info("%s", line)


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
    numbers = range(first, engine.config.training.steps)
    for batch, arrays, placed in feed(batches, numbers, engine.mesh):
        work = engine.task.work(arrays)
        rows = rows_here(batch_sharding(engine.mesh), len(batch.indices))
        examples = int((batch.indices >= 0).sum())
        examples_here = int((batch.indices[rows] >= 0).sum())
        # The processes have about equal work.
        share = examples / max(examples_here, 1)
        yield placed, Work(round(work.tokens * share), work.flops * share)


class _Examiner:
    """Evaluates the state on the validation split.

    It writes the row and checks the loss.
    """

    def __init__(
        self,
        engine: Engine,
        evaluator: Evaluator,
        writer: MetricsWriter,
        keeper: Keeper,
        stop: Stopping,
    ):
        self._engine = engine
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
        task = self._evaluator.task
        start = time.perf_counter()
        split = task.config.data.validation_split
        try:
            params = self._engine.parameters(state, scoring.part(task))
            scores = self._evaluator.evaluate(
                params, split, greedy=True, stop=self._stop
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
