"""Compile a task's state and training step on a mesh."""

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from transformer_jax.errors import UserError
from transformer_jax.training import optimizer as optimizers
from transformer_jax.training.checkpoint import CheckpointError, Checkpoints
from transformer_jax.training.freezing import Parts, hold, without_updates
from transformer_jax.training.initialization import (
    TrainState,
    abstract,
    abstract_state,
    init_state,
    jit_init,
    make_join,
    trace_init,
)
from transformer_jax.training.lora import ALL, Form, form_of
from transformer_jax.training.matrices import blocks
from transformer_jax.training.sharding import make_mesh, on_mesh, replicated
from transformer_jax.training.task import Mean, Params, Task

log = logging.getLogger(__name__)

TrainStep = Callable[
    [TrainState, Mapping[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]
]


def moving_average(
    average: Params, params: Params, n: jax.Array, decay: float
) -> Params:
    """Return the average after step n = 1, 2, …: d · average + (1 - d) · params.

    d = min(decay, (1 + n) / (10 + n)). This is averaging of iterates (Polyak and
    Juditsky 1992) with exponentially decreasing weights. The average starts at the
    initial parameters. Like in TensorFlow's ExponentialMovingAverage, d warms up so
    that it soon forgets them. Skipped steps count in n. The computation is in float32,
    the parameters' dtype.
    """
    d = jnp.minimum(decay, (1.0 + n) / (10.0 + n))
    return jax.tree.map(lambda a, p: d * a + (1 - d) * p, average, params)


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    microbatches: int,
    ema_decay: float = 0.0,
    frozen: Parts = types.MappingProxyType({}),
    form: Form = ALL,
) -> TrainStep:
    """Return the function step(state, batch) → (state, metrics), not yet jitted.

    The metrics are "loss" (the objective), every mean of `task.loss` by its name,
    "weight" (of the first mean), "gradient_norm" and "skipped". Each mean is divided
    once, by its weight over the whole batch, so the result does not depend on the
    number of microbatches. The step's random key is folded from the seed and the step,
    and the key of a microbatch from the step's key and the microbatch's number. If the
    loss or the gradient is not finite, only the step number changes, and "skipped" is
    1. `frozen` parameters do not change. `form` makes the parameters of the model from
    those of the state.
    """

    gradient = make_gradient(task, microbatches, frozen, form)

    def train_step(
        state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        slope, loss, shares, weight = gradient(
            state.params, state.base, batch, key, state.step
        )
        updates, opt_state = optimizer.update(slope, state.opt_state, state.params)
        params = optax.apply_updates(state.params, without_updates(updates, frozen))
        metrics = {**shares, "loss": loss, "weight": weight}
        metrics["gradient_norm"] = optax.tree.norm(slope)
        ema = optimizers.averaged(opt_state, params)
        if ema is not None:
            apart = jax.tree.map(jnp.subtract, ema, params)
            ema = optax.apply_updates(params, without_updates(apart, frozen))
        elif ema_decay:
            ema = moving_average(state.ema, params, state.step + 1, ema_decay)
        done = TrainState(state.step + 1, params, opt_state, ema, state.base)
        skipped = state._replace(step=state.step + 1)
        finite = jnp.isfinite(loss) & jnp.isfinite(metrics["gradient_norm"])
        metrics["skipped"] = (~finite).astype(jnp.float32)
        after = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), done, skipped
        )
        return after, metrics

    return train_step


def make_gradient(task: Task, microbatches: int, frozen: Parts, form: Form) -> Callable:
    """Return the function gradient(params, base, batch, key, step) → (gradient, loss,
    means, weight of the first mean).
    """

    def terms(
        params: Params,
        base: Params | None,
        batch: Any,
        key: jax.Array,
        step: jax.Array,
        weights: Any = None,
    ) -> tuple:
        """Return (objective, (means, weights, first weight)).

        These are the microbatch's contributions to the objective and means. `weights`
        are the weights of the whole batch. If they are None, `batch` is the whole
        batch.
        """
        whole = form.join(params, base)
        means = task.loss(hold(whole, frozen), batch, key, step)
        _check_names(means)
        of_part = {
            name: jax.lax.stop_gradient(jnp.asarray(mean.weight, jnp.float32))
            for name, mean in means.items()
        }
        weights = of_part if weights is None else weights
        shares = {
            name: mean.sum / _nonzero(weights[name]) for name, mean in means.items()
        }
        # pytrees lose the order of names
        first = next(iter(of_part.values()))
        return _objective(means, shares), (shares, of_part, first)

    differentiate = jax.value_and_grad(terms, has_aux=True)

    def of_whole(
        params: Params, base: Any, batch: Any, key: jax.Array, step: jax.Array
    ) -> tuple:
        (loss, (shares, _, weight)), slope = differentiate(
            params, base, batch, key, step
        )
        return slope, loss, shares, weight

    def of_parts(
        params: Params, base: Any, batch: Any, key: jax.Array, step: jax.Array
    ) -> tuple:
        # Weights do not depend on the parameters, so XLA reduces this pass to the code
        # that counts them.
        weights, weight = over_parts(
            lambda rows, key: terms(params, base, rows, key, step)[1][1:],
            batch,
            key,
            microbatches,
        )

        def share(rows: Any, key: jax.Array) -> tuple[Params, jax.Array, dict]:
            (loss, (shares, *_)), slope = differentiate(
                params, base, rows, key, step, weights
            )
            return slope, loss, shares

        slope, loss, shares = over_parts(share, batch, key, microbatches)
        return slope, loss, shares, weight

    return of_whole if microbatches == 1 else of_parts


def over_parts(
    part_of: Callable[[Any, jax.Array], Any],
    batch: Any,
    key: jax.Array,
    microbatches: int,
) -> Any:
    """Return the sum of `part_of`(rows, key) over the microbatches of a batch.

    A microbatch takes every m-th row, so that every microbatch is spread over all
    devices. Its key is folded from `key` and its number.
    """
    parts = jax.tree.map(
        lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch
    )

    def add(so_far: Any, part: tuple) -> tuple[Any, None]:
        number, rows = part
        of_part = part_of(rows, jax.random.fold_in(key, number))
        return jax.tree.map(jnp.add, so_far, of_part), None

    shapes = jax.eval_shape(part_of, jax.tree.map(lambda x: x[0], parts), key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(microbatches), parts))
    return total


def _check_names(means: Mapping[str, Mean]) -> None:
    """Raise ValueError if the name of a mean clashes with another metric.

    The metrics are those of the training step. "loss" is the objective, so a mean may
    be called "loss" only if it is the whole objective.
    """
    all_of_it = (
        [mean.scale for mean in means.values() if mean.scale] == [1]
        and "loss" in means
        and means["loss"].scale
    )
    taken = {"weight", "gradient_norm", "skipped"} | (set() if all_of_it else {"loss"})
    if wrong := sorted(taken & means.keys()):
        raise UserError(
            f"the task's loss returns a mean called {wrong[0]!r}: "
            "this name is reserved, choose another"
        )


def _objective(means: Mapping[str, Mean], shares: Mapping[str, jax.Array]) -> jax.Array:
    """Return Σ scale · share over the terms.

    Metrics have scale 0 and contribute no gradient.
    """
    return sum(
        (mean.scale * shares[name] for name, mean in means.items() if mean.scale),
        jnp.zeros(()),
    )


def _nonzero(weight: jax.Array) -> jax.Array:
    """Return the divisor of a mean: `weight`, or 1 instead of 0.

    An empty mean is then 0.
    """
    return jnp.where(weight == 0, 1.0, weight)


@contextlib.contextmanager
def compiling_ahead() -> Iterator[Callable[..., Future]]:
    """Yield compile(function, *arguments).

    It compiles a jitted function in a background thread. Once the returned future is
    done, calls with arguments of these shapes do not compile again. Leaving the context
    waits for all pending compilations, unless the work was interrupted.
    """
    pool = ThreadPoolExecutor(2, thread_name_prefix="compile")
    waits = True
    try:
        yield lambda function, *arguments: pool.submit(
            function.lower(*arguments).compile
        )
    except KeyboardInterrupt:
        waits = False
        raise
    finally:
        pool.shutdown(waits, cancel_futures=not waits)


class Engine:
    """The train state and the compiled training step of a task on a mesh.

    The mesh is one of `devices`, by default all.

    Attributes:
        form: makes the parameters of the model from those of a state.
        axes: the names of the axes of each parameter of a state.
        abstract_parameters: the shapes, dtypes and shardings of the model's parameters.
        abstract_state: those of a state.
    """

    def __init__(self, task: Task, devices: Sequence[jax.Device] | None = None):
        self.task = task
        self.config = task.config
        config = self.config
        self.mesh = make_mesh(config.mesh, devices)
        rate = optimizers.schedule(
            config.optimizer, config.model.d_model, config.training.steps
        )
        self.schedule = jax.jit(rate)
        init, boxed = trace_init(task)
        self.form = form_of(config, boxed)
        trained = self.form.trained
        self.axes = nn.get_partition_spec(trained)
        self.optimizer = optimizers.make_optimizer(
            config.optimizer, rate, blocks(trained)
        )
        ema_decay = config.training.ema_decay
        self.abstract_parameters = abstract(boxed, self.mesh)
        self.abstract_state = abstract_state(
            abstract(trained, self.mesh),
            self.optimizer,
            ema_decay,
            self.form.base and self.abstract_parameters,
        )
        placed = jax.tree.map(lambda x: x.sharding, self.abstract_state)

        self._join = make_join(self.form, self.mesh, self.abstract_parameters)

        def begin(params: Params, key: jax.Array) -> TrainState:
            trained, base = self.form.split(params, key)
            return init_state(trained, self.optimizer, ema_decay, base)

        self.init = jit_init(lambda key: begin(init(key), key), self.mesh, placed)
        # the state with given parameters of the model, whose memory it takes over
        self.begin = jit_init(
            lambda params: begin(params, jax.random.key(config.training.seed)),
            self.mesh,
            placed,
            donate=True,
        )
        training = config.training
        step = make_train_step(
            task,
            self.optimizer,
            seed=training.seed,
            microbatches=training.microbatches,
            ema_decay=ema_decay,
            frozen=config.frozen,
            form=self.form,
        )
        self.step = on_mesh(
            step,
            self.mesh,
            donate_argnums=0,
            out_shardings=(placed, replicated(self.mesh)),
        )

    def parameters(self, state: TrainState, part: str = "params") -> Params:
        """Return the parameters of the model, given those in a `part` of a state: its
        "params", or "ema", their moving average.
        """
        return self._join(getattr(state, part), state.base)

    def updates(self, state: TrainState) -> int:
        """Return the number of updates, i.e. of steps that were not skipped.

        The learning rate depends on it.
        """
        return optimizers.count_updates(state.opt_state)

    def restore_or_init(
        self,
        checkpoints: Checkpoints,
        step: int | None,
        initial: Params | None = None,
    ) -> TrainState:
        """Return the state of the checkpoint at `step`, or a new one if it is None.

        Newer checkpoints are removed.

        A new state has the parameters `initial`, whose memory it takes over. None:
        they are drawn.

        Raises CheckpointError if the checkpoint holds another step because its folder
        was renamed.
        """
        if step is None:
            checkpoints.discard_after(None)
            if initial is not None:
                return self.begin(initial)
            return self.init(jax.random.key(self.config.training.seed))
        state, _ = checkpoints.restore(step, self.abstract_state)
        if (held := int(state.step)) != step:
            raise CheckpointError(
                f"{checkpoints.directory / str(step)} holds step {held}: "
                f"rename the folder to {held}"
            )
        checkpoints.discard_after(step)
        log.info("resumed from step %d", step)
        return state
