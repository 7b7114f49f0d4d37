"""What is compiled: a task's state and its training step, on a mesh."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from transformer_jax.data.batching import Batch
from transformer_jax.training import optimizer as optimizers
from transformer_jax.training import processes
from transformer_jax.training.checkpoint import CheckpointConfig, Checkpoints
from transformer_jax.training.evaluation import EvaluationConfig, check_identity
from transformer_jax.training.optimizer import OptimizerConfig
from transformer_jax.training.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    on_mesh,
    place,
    replicated,
    rows_here,
    shardings,
)
from transformer_jax.training.task import Arrays, Batches, Params, Task, TrainingConfig

log = logging.getLogger(__name__)


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
    """The average after step n = 1, 2, …: d · average + (1 - d) · params, d = min(decay, (1 + n) / (10 + n)).

    Averaging of iterates (Polyak and Juditsky 1992) with weights that fall off exponentially. The warm-up of d is that
    of TensorFlow's ExponentialMovingAverage: the initial parameters, where it starts, are soon forgotten, and the
    average is one at every step, with nothing to correct. Steps that are skipped count in n. In float32, as parameters
    are.
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

    def sums(params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array) -> tuple:
        def total(params: Params) -> tuple[jax.Array, tuple]:
            loss, weight, auxiliary = task.loss(params, batch, key, step)
            return loss, (loss, weight, auxiliary)

        gradient, (loss, weight, auxiliary) = jax.grad(total, has_aux=True)(params)
        return gradient, loss, weight, auxiliary

    def accumulate(params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array) -> tuple:
        if microbatches == 1:
            return sums(params, batch, key, step)
        # Every m-th row: each device has its share of every microbatch.
        parts = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(so_far: tuple, part: tuple) -> tuple[tuple, None]:
            number, rows = part
            return jax.tree.map(jnp.add, so_far, sums(params, rows, jax.random.fold_in(key, number), step)), None

        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, params, batch, key, step))
        return jax.lax.scan(add, first, (jnp.arange(microbatches), parts))[0]

    def train_step(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient, loss, weight, auxiliary = accumulate(state.params, batch, key, state.step)
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
        self.init = on_mesh(lambda key: nn.unbox(init(key)), self.mesh, out_shardings=self.state_sharding)
        step = make_train_step(
            task,
            self.optimizer,
            seed=config.training.seed,
            microbatches=config.training.microbatches,
            ema_decay=config.training.ema_decay,
        )
        out = self.state_sharding, replicated(self.mesh)
        self.step = on_mesh(step, self.mesh, donate_argnums=0, out_shardings=out)

    def updates(self, state: TrainState) -> int:
        """How many steps changed the parameters: all but those that were skipped. The schedule goes by them."""
        return int(optax.tree.get_all_with_path(state.opt_state, "count")[0][1])

    def rows_here(self, rows: int) -> slice:
        """Of a batch of `rows`, those that this process's devices hold."""
        return rows_here(self.batch_sharding, rows)

    def load(self, batches: Batches, batch: Batch) -> Arrays:
        """Of a batch of the plan, this process's rows."""
        return batches.load(batch._replace(indices=batch.indices[self.rows_here(len(batch.indices))]))

    def place(self, arrays: Arrays, rows: int) -> dict[str, jax.Array]:
        """What `load` gave, on the devices, as part of a batch of `rows`."""
        return place(arrays, self.batch_sharding, rows, self.rows_here(rows).start)

    def restore_or_init(self, checkpoints: Checkpoints, identity: dict[str, str]) -> TrainState:
        """The newest good checkpoint's state, or a new one. What is newer than that checkpoint is removed."""
        step = processes.first_says(checkpoints.newest)
        if step is None:
            checkpoints.discard_after(None)
            return self.init(jax.random.key(self.config.training.seed))
        check_identity(identity, checkpoints.meta(step), checkpoints.directory)
        state, _ = checkpoints.restore(step, self.abstract_state)
        checkpoints.discard_after(step)
        log.info("resumed from step %d", step)
        return state
