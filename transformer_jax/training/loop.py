"""The training loop: one jitted step, state donated; evaluation, checkpoints, progress; exact resumption."""

import functools
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from transformer_jax.data.batching import prefetch
from transformer_jax.training import optimizer as optimizers
from transformer_jax.training.checkpoint import CheckpointConfig, Checkpoints
from transformer_jax.training.evaluation import EvaluationConfig, Evaluator, check_identity
from transformer_jax.training.logging import MetricsWriter, Progress, clock
from transformer_jax.training.optimizer import OptimizerConfig
from transformer_jax.training.sharding import MeshConfig, batch_sharding, check_rows, make_mesh, shardings
from transformer_jax.training.task import Arrays, Batches, Params, Task, TrainingConfig

log = logging.getLogger(__name__)

MAX_SKIPPED = 10  # steps in a row, before a run is given up


class EngineConfig(NamedTuple):
    """The sections that the engine reads."""

    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig


class TrainState(NamedTuple):
    """What a checkpoint holds. `step` counts updates, and batches of the plan: it is the position in the data."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    ema: Params | None = None  # their moving average; None, which is no array, when training.ema_decay is 0


TrainStep = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]


def init_state(
    task: Task, optimizer: optax.GradientTransformation, key: jax.Array, ema_decay: float = 0.0
) -> TrainState:
    """Leaves carry their logical axis names; `nn.unbox` takes them off."""
    params = task.init(key)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), params if ema_decay else None)


def moving_average(average: Params, params: Params, n: jax.Array, decay: float) -> Params:
    """The average after update n = 1, 2, …: d · average + (1 - d) · params, d = min(decay, (1 + n) / (10 + n)).

    Averaging of iterates (Polyak and Juditsky 1992) with weights that fall off exponentially. The warm-up of d is that
    of TensorFlow's ExponentialMovingAverage: the initial parameters, where it starts, are soon forgotten, and the
    average is one at every step, with nothing to correct. In float32, as parameters are.
    """
    d = jnp.minimum(decay, (1.0 + n) / (10.0 + n))
    return jax.tree.map(lambda a, p: d * a + (1 - d) * p, average, params)


def make_train_step(
    task: Task, optimizer: optax.GradientTransformation, *, seed: int, microbatches: int, ema_decay: float = 0.0
) -> TrainStep:
    """step(state, batch) → (state, {"loss", "weight", "gradient_norm", "skipped"}), not yet jitted.

    The batch's rows are cut into microbatches whose sums, weights and gradients add up and are divided once.
    The step's key is folded from seed and step, a microbatch's from that and its number.
    Where the loss or the gradient is not finite, nothing but the step's number changes, and "skipped" is 1.
    """

    def sums(params: Params, batch: Mapping[str, jax.Array], key: jax.Array) -> tuple:
        def total(params: Params) -> tuple[jax.Array, tuple]:
            loss, weight, auxiliary = task.loss(params, batch, key)
            return loss, (loss, weight, auxiliary)

        gradient, (loss, weight, auxiliary) = jax.grad(total, has_aux=True)(params)
        return gradient, loss, weight, auxiliary

    def accumulate(params: Params, batch: Mapping[str, jax.Array], key: jax.Array) -> tuple:
        if microbatches == 1:
            return sums(params, batch, key)
        # Every m-th row: each device has its share of every microbatch.
        parts = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(so_far: tuple, part: tuple) -> tuple[tuple, None]:
            number, rows = part
            return jax.tree.map(jnp.add, so_far, sums(params, rows, jax.random.fold_in(key, number))), None

        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, params, batch, key))
        return jax.lax.scan(add, first, (jnp.arange(microbatches), parts))[0]

    def train_step(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient, loss, weight, auxiliary = accumulate(state.params, batch, key)
        gradient = jax.tree.map(lambda g: g / weight, gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss / weight, "weight": weight, "gradient_norm": optax.tree.norm(gradient)}
        metrics |= {name: value / weight for name, value in auxiliary.items()}
        ema = moving_average(state.ema, params, state.step + 1, ema_decay) if ema_decay else None
        after, skipped = TrainState(state.step + 1, params, opt_state, ema), state._replace(step=state.step + 1)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
        metrics["skipped"] = (~finite).astype(jnp.float32)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, skipped), metrics

    return train_step


class Engine:
    """A task's state and compiled step on a mesh."""

    def __init__(self, task: Task, config: EngineConfig):
        self.task, self.config = task, config
        self.mesh = make_mesh(config.mesh)
        self.schedule = optimizers.schedule(config.optimizer, task.d_model)
        self.optimizer = optimizers.make_optimizer(config.optimizer, task.d_model)
        init = functools.partial(init_state, task, self.optimizer, ema_decay=config.training.ema_decay)
        boxed = jax.eval_shape(init, jax.random.key(0))
        self.state_sharding = shardings(boxed, self.mesh)
        self.batch_sharding = batch_sharding(self.mesh)
        self.abstract_state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            nn.unbox(boxed),
            self.state_sharding,
        )
        self.init = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=self.state_sharding)
        step = make_train_step(
            task,
            self.optimizer,
            seed=config.training.seed,
            microbatches=config.training.microbatches,
            ema_decay=config.training.ema_decay,
        )
        self.step = jax.jit(step, donate_argnums=0, out_shardings=(self.state_sharding, None))

    def restore_or_init(self, checkpoints: Checkpoints, identity: dict[str, str]) -> TrainState:
        """The newest good checkpoint's state, or a new one. What is newer than that checkpoint is removed."""
        step = checkpoints.newest()
        if step is None:
            checkpoints.discard_after(None)
            return self.init(jax.random.key(self.config.training.seed))
        check_identity(identity, checkpoints.meta(step), checkpoints.directory)
        state, _ = checkpoints.restore(step, self.abstract_state)
        checkpoints.discard_after(step)
        log.info("resumed from step %d", step)
        return state


class Diverged(ValueError):
    """Loss or gradient were not finite too many times in a row."""


class Preempted(Exception):
    """The run was asked to stop (SIGTERM) and has saved what it had: start it again to go on."""


class _StopRequest:
    """Set by SIGTERM, which then no longer kills: the step under way is finished and saved.

    Several processes would have to agree on the step: there, and in a thread, SIGTERM does what it did before.
    """

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> Self:
        self._handled = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
        if self._handled:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def _receive(self, *_: Any) -> None:
        self.received = True

    def __exit__(self, *_: Any) -> None:
        if self._handled:
            signal.signal(signal.SIGTERM, self._before)


def train(task: Task, config: EngineConfig, workdir: epath.PathLike) -> TrainState:
    """Trains to `config.training.steps`, going on from the newest good checkpoint of `workdir`.

    Validation scores are of the moving average when evaluation.checkpoint is "ema", else of the parameters.

    Raises CheckpointError when a checkpoint is of other data or tokenizers, or cannot be written; Diverged when loss or
    gradient were not finite MAX_SKIPPED times in a row; and Preempted, with everything saved, after SIGTERM.
    """
    training, workdir = config.training, epath.Path(workdir)
    batches = task.batches(task.train_split, training.seed)
    engine = Engine(task, config)
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint)
    identity = task.identity(training=True)
    state = engine.restore_or_init(checkpoints, identity)
    first = int(state.step)
    evaluator = Evaluator(task, engine.mesh, config.evaluation.rows)
    check_rows((rows for rows, *_ in batches.plan.shapes), engine.mesh, training.microbatches)
    writer = MetricsWriter(workdir, first)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    log.info("%s parameters in arrays, devices: %s", f"{count:,}", engine.mesh.shape)

    progress, pending, guard = Progress(first, training.steps), [], _Guard(batches, checkpoints)
    compiled = _CompileCount(engine.step, len(batches.plan.shapes))
    arrays = prefetch(_from(batches, first, training.steps))
    with _StopRequest() as stop:
        for step, batch in zip(range(first + 1, training.steps + 1), arrays, strict=True):
            start = time.perf_counter()
            state, metrics = engine.step(state, jax.device_put(batch, engine.batch_sharding))
            if compiled.has_grown(batch):
                progress.leave_out(start)
            pending.append(metrics)
            last = step == training.steps
            if last or step % training.log_every == 0:
                finite = guard.check(step, jax.device_get(pending))
                _report(step, finite, engine.schedule, progress, writer, training.steps)
                pending = []
            start, scores = time.perf_counter(), None
            if last or step % training.evaluate_every == 0:
                params = state.ema if config.evaluation.checkpoint == "ema" else state.params
                scores = _evaluate(evaluator, params, task.validation_split, step, writer)
            stopping = stop.received and not last
            regular = last or step % config.checkpoint.every == 0
            if regular or stopping:
                meta, kept_for = {"identity": identity, "position": step}, scores if regular else None
                checkpoints.save(step, state, meta, kept_for, passing=not regular)
            if scores is not None or step % config.checkpoint.every == 0:
                progress.leave_out(start)
            if stopping:
                writer.close()
                raise Preempted(f"stopped after step {step}, which is saved: start it again to go on")
    writer.close()
    return state


def _from(batches: Batches, first: int, stop: int) -> Iterator[Arrays]:
    for i in range(first, stop):
        yield batches.load(batches.plan.batch(i))


def _report(
    step: int,
    finite: list[dict[str, Any]],
    schedule: optax.Schedule,
    progress: Progress,
    writer: MetricsWriter,
    steps: int,
) -> None:
    weights = np.array([metrics["weight"] for metrics in finite], np.float64)
    speed, left = progress.report(step, float(weights.sum()))
    # Means since the last report: of one step they would tell the batch's bucket.
    values = {
        name: float(np.average([metrics[name] for metrics in finite], weights=weights))
        for name in (finite[0] if finite else ())
        if name not in ("weight", "skipped")
    }
    values |= {"learning_rate": float(schedule(step - 1)), "tokens_per_s": round(speed, 1)}
    writer.write(step, "train", values)
    log.info(
        "step %d/%d  loss %.3f  %s tokens/s  ETA %s",
        step,
        steps,
        values.get("loss", math.nan),
        f"{speed:,.0f}",
        clock(left),
    )


class _Guard:
    """Says which steps were skipped, and stops the run when too many were in a row."""

    def __init__(self, batches: Batches, checkpoints: Checkpoints):
        self._batches, self._checkpoints, self._in_a_row = batches, checkpoints, 0

    def check(self, last: int, metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of the steps up to `last`, those that were not skipped."""
        for step, values in enumerate(metrics, last - len(metrics) + 1):
            self._in_a_row = self._in_a_row + 1 if values["skipped"] else 0
            if values["skipped"]:
                epoch, batch = divmod(step - 1, len(self._batches.plan))
                where = f"step {step} (epoch {epoch}, batch {batch}; both from 0)"
                log.warning("%s: loss %s, gradient %s: skipped", where, values["loss"], values["gradient_norm"])
            if self._in_a_row == MAX_SKIPPED:
                raise Diverged(
                    f"{where} is the {MAX_SKIPPED}th in a row whose loss or gradient is not finite. The last good "
                    f"checkpoint is {self._checkpoints.newest() or 'none'}. Lower optimizer.learning_rate, lengthen "
                    "optimizer.warmup_steps, set optimizer.clip_norm, or look at the data of these batches."
                )
        return [values for values in metrics if not values["skipped"]]


def _evaluate(evaluator: Evaluator, params: Params, split: str, step: int, writer: MetricsWriter) -> dict[str, float]:
    start = time.perf_counter()
    scores = evaluator.evaluate(params, split, fast=True)
    writer.write(step, split, scores)
    numbers = {name: value for name, value in scores.items() if not isinstance(value, str)}
    shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    log.info("step %d  %s: %s  (%.1f s)", step, split, shown, time.perf_counter() - start)
    return numbers


class _CompileCount:
    """Says when the step was compiled, for which shape, and how many shapes there are."""

    def __init__(self, step: Any, shapes: int):
        self._step, self._shapes, self._count = step, shapes, 0

    def has_grown(self, batch: Arrays) -> bool:
        count = self._step._cache_size()
        grown, self._count = count > self._count, count
        if grown:
            shape = ", ".join(f"{name} {array.shape}" for name, array in batch.items())
            log.info("compiled the step for %s: %d of at most %d", shape, count, self._shapes)
        return grown
