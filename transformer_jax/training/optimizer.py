"""The optimizers, with learning-rate schedules, weight decay and gradient clipping,
built with optax.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax import fields
from transformer_jax.training.matrices import Block

PyTree = Any

SCHEDULES = ("noam", "inverse_sqrt", "cosine", "linear", "constant")
DECAYING = ("cosine", "linear")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Config of an optimizer, by default Adam (Vaswani et al. 2017, Section 5.3)."""

    # one of `OPTIMIZERS`; the docstring of each says which keys it reads
    name: str = "adamw"
    schedule: str = "noam"
    learning_rate: float = 1.0  # the peak rate; for "noam", the factor in the formula
    warmup_steps: int = fields.size(4000, small=2)
    # the step at which "cosine" and "linear" reach their final rate; 0 means
    # training.steps
    decay_steps: int = 0
    # the final rate of "cosine" and "linear", relative to the peak
    end_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    # of matrices, decoupled from the gradient (Loshchilov and Hutter 2019)
    weight_decay: float = 0.0
    # the maximum global norm of the gradient; 0 disables clipping
    clip_norm: float = 0.0

    @property
    def averages(self) -> bool:
        """True for an optimizer whose result is an average of parameters."""
        return self.name == "schedule_free"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.name not in OPTIMIZERS:
            yield "name", f"must be one of {', '.join(OPTIMIZERS)}"
        if self.name == "adam" and self.weight_decay:
            yield "weight_decay", "must be 0 for adam: set optimizer.name = 'adamw'"
        if self.averages and self.b1 == 0:
            yield "b1", "must be positive for schedule_free, e.g. 0.9"
        if self.averages and self.schedule != "constant":
            yield (
                "schedule",
                "must be 'constant' for schedule_free, which averages parameters "
                "instead of lowering the rate",
            )
        if self.schedule not in SCHEDULES:
            yield "schedule", f"must be one of {', '.join(SCHEDULES)}"
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < 1e38:
                yield name, "must be positive and below 1e38, to fit into float32"
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                yield name, "must be finite and not negative; 0 disables it"
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                yield name, "must be in [0, 1)"
        if not 0 <= self.end_fraction <= 1:
            yield "end_fraction", "must be in [0, 1]"
        if (
            self.schedule in DECAYING
            and self.decay_steps
            and self.decay_steps <= max(self.warmup_steps, 1)
        ):
            yield (
                "decay_steps",
                (
                    "must be greater than 1 and than "
                    f"warmup_steps = {self.warmup_steps}, or 0 for training.steps"
                ),
            )


def schedule(config: OptimizerConfig, d_model: int, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the number of previous updates, n - 1.

    noam: factor · d_model^-0.5 · min(n^-0.5, n · warmup^-1.5) (Vaswani et al. 2017, eq.
        3).
    inverse_sqrt: peak · min(n / warmup, (warmup / n)^0.5).
    cosine: linear warm-up to the peak, then half a cosine down to end_fraction · peak
        at decay_steps (Loshchilov and Hutter 2017). If decay_steps is 0, the decay ends
        at `steps`, the last step of the run.
    linear: like cosine, but a straight line (Devlin et al. 2019, Appendix A.2).
    constant: linear warm-up to the peak, then the peak.
    """
    peak = config.learning_rate
    warmup = max(config.warmup_steps, 1)
    # a run may end during the warm-up
    end = max(config.decay_steps or steps, warmup + 1)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(count, jnp.float32) + 1
        if config.schedule == "noam":
            return peak * d_model**-0.5 * jnp.minimum(n**-0.5, n * warmup**-1.5)
        if config.schedule == "inverse_sqrt":
            return peak * jnp.minimum(n / warmup, (warmup / n) ** 0.5)
        rising = jnp.minimum(n / warmup, 1.0)
        if config.schedule == "constant":
            return peak * rising
        progress = jnp.clip((n - warmup) / (end - warmup), 0, 1)
        left = (
            1 - progress
            if config.schedule == "linear"
            else 0.5 * (1 + jnp.cos(jnp.pi * progress))
        )
        return peak * rising * (config.end_fraction + (1 - config.end_fraction) * left)

    return rate


def adamw(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015), here with decoupled weight decay (Loshchilov and
    Hutter 2019).
    """
    return optax.scale_by_adam(config.b1, config.b2, config.epsilon)


def sgd(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Gradient descent with momentum `b1` (Polyak 1964; Sutskever et al. 2013): m ← b1
    · m + g. With b1 = 0, the gradient itself.
    """
    return optax.trace(config.b1)


def adadelta(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Adadelta (Zeiler 2012). Its ρ is `b2`; the paper has a learning rate of 1."""
    return optax.scale_by_adadelta(config.b2, config.epsilon)


def lion(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Lion, the sign of a momentum (Chen et al. 2023, Algorithm 2)."""
    return optax.scale_by_lion(config.b1, config.b2)


def adafactor(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, Algorithms 4 and 5).

    It keeps the means of a matrix's rows and columns in place of second moments. The
    learning rate is relative to the root mean square of each matrix or vector.

    Differs: matrices with fewer than 128 rows or columns keep all second moments.
    """
    factored = optax.scale_by_factored_rms(decay_rate=0.8, epsilon=1e-30)

    def flat(tree: PyTree) -> PyTree:
        return _mapped(lambda b, x: b.flat(x) if b.is_matrix else x, params, tree)

    def update(
        gradient: PyTree, state: optax.OptState, weights: PyTree
    ) -> tuple[PyTree, optax.OptState]:
        directions, state = factored.update(flat(gradient), state, flat(weights))
        return _mapped(_relative, params, directions, weights), state

    return optax.GradientTransformation(lambda tree: factored.init(flat(tree)), update)


def _relative(block: Block, direction: jax.Array, weight: jax.Array) -> jax.Array:
    """Clip a direction at the root mean square 1, then scale it by the weight's."""
    direction = direction.reshape(weight.shape)
    clipped = direction / jnp.maximum(1.0, block.root_mean_square(direction))
    return clipped * jnp.maximum(1e-3, block.root_mean_square(weight))


def muon(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal.

    It updates matrices that map features to features; `adamw` updates tables,
    classifiers and vectors. Orthogonal matrices are scaled to a root mean square of
    0.2, that of Adam's updates, so that one learning rate and weight decay serve both
    (Liu et al. 2025, Section 2.2).
    """

    def is_hidden(block: Block) -> bool:
        return block.is_matrix and not block.is_table

    matrices = [block for block in params if is_hidden(block)]

    def axes(tree: PyTree) -> PyTree:
        numbers = [
            optax.contrib.MuonDimensionNumbers(block.rows, block.columns)
            for block in matrices
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), numbers)

    def scale(block: Block, x: jax.Array) -> jax.Array:
        rows, columns = block.flat(x).shape[-2:]
        return 0.2 * math.sqrt(max(rows, columns)) * x

    orthogonal = optax.chain(
        optax.contrib.scale_by_muon(beta=config.b1, weight_dimension_numbers=axes),
        optax.stateless(lambda updates, _: _mapped(scale, matrices, updates)),
    )
    labels = ["muon" if is_hidden(block) else "adam" for block in params]
    return optax.partition(
        {"muon": orthogonal, "adam": adamw(config, params)},
        lambda tree: jax.tree.unflatten(jax.tree.structure(tree), labels),
    )


def schedule_free(
    config: OptimizerConfig, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Schedule-Free AdamW (Defazio et al. 2024, Algorithm 1): Adam without momentum
    makes the steps of z, and x is the average of z, with the squares of the largest
    learning rate so far as weights. The parameters are y = (1 - b1) z + b1 x, where
    gradients are taken. `averaged` returns x.

    Differs: weights of the average use the rate of the next update, as in optax.
    """
    return optax.scale_by_rms(
        config.b2, config.epsilon, eps_in_sqrt=False, bias_correction=True
    )


def _mapped(function: Callable, params: Sequence[Block], *trees: PyTree) -> PyTree:
    """Return the tree of function(block, *leaves)."""
    leaves = map(jax.tree.leaves, trees)
    results = [function(*each) for each in zip(params, *leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), results)


# The choices for `config.optimizer.name`: functions that return the direction of an
# update, before weight decay and learning rate.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "adam": adamw,
    "sgd": sgd,
    "adadelta": adadelta,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "schedule_free": schedule_free,
}


def make_optimizer(
    config: OptimizerConfig, rate: optax.Schedule, params: Sequence[Block]
) -> optax.GradientTransformation:
    """Chain clipping, the optimizer `config.name`, decoupled weight decay of matrices
    and the learning rate, in this order. For "schedule_free", these are the steps of z.

    `rate` is the result of `schedule`, `params` that of `matrices.blocks`.
    """

    def decayed(tree: PyTree) -> PyTree:
        marks = [block.is_matrix for block in params]
        return jax.tree.unflatten(jax.tree.structure(tree), marks)

    steps = []
    if config.clip_norm:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    steps.append(OPTIMIZERS[config.name](config, params))
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
    steps.append(optax.scale_by_learning_rate(rate))
    chain = optax.chain(*steps)
    if config.averages:
        return optax.contrib.schedule_free(chain, rate, config.b1)
    return chain


def averaged(state: optax.OptState, params: PyTree) -> PyTree | None:
    """Return the average that an optimizer keeps of the parameters, if it does."""
    if not isinstance(state, optax.contrib.ScheduleFreeState):
        return None
    return optax.contrib.schedule_free_eval_params(state, params)


def count_updates(state: optax.OptState) -> int:
    """Return the number of updates so far. The learning rate depends on it.

    `state` is that of an optimizer of `make_optimizer`.
    """
    if isinstance(state, optax.contrib.ScheduleFreeState):
        state = state.base_optimizer_state
    return int(optax.tree.get(state[-1], "count"))
