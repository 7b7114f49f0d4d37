"""Adam, its learning-rate schedules, weight decay and clipping, all from optax."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("paper", "inverse_sqrt", "cosine", "constant")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the constants of Vaswani et al. 2017, Section 5.3."""

    schedule: str = "paper"
    learning_rate: float = 1.0  # the peak; under "paper" a factor on the formula
    warmup_steps: int = 4000
    decay_steps: int = 100_000  # "cosine" reaches its end here
    end_fraction: float = 0.0  # of the peak, at the end of "cosine"
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0  # decoupled (Loshchilov and Hutter 2019), on matrices only
    clip_norm: float = 0.0  # the global norm gradients are cut to; 0: they are not

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        if self.schedule not in SCHEDULES:
            yield "schedule", f"must be one of {', '.join(SCHEDULES)}"
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                yield name, "must be positive"
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                yield name, "must not be negative; 0 switches it off"
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                yield name, "must be in [0, 1)"
        if not 0 <= self.end_fraction <= 1:
            yield "end_fraction", "must be in [0, 1]"
        if self.schedule == "cosine" and self.decay_steps <= max(self.warmup_steps, 1):
            yield "decay_steps", f"must be beyond warmup_steps = {self.warmup_steps} and 1: usually training.steps"


def schedule(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """The learning rate of update 0, 1, 2 …; the formulas count updates from 1.

    paper: factor · d_model^-0.5 · min(n^-0.5, n · warmup^-1.5) (Vaswani et al. 2017, eq. 3).
    inverse_sqrt: peak · min((n / warmup), (warmup / n)^0.5); cosine: linear to the peak, then half a cosine to
    end_fraction · peak at decay_steps (Loshchilov and Hutter 2017); constant: linear to the peak, then the peak.
    """
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(count, jnp.float32) + 1
        if config.schedule == "paper":
            return peak * d_model**-0.5 * jnp.minimum(n**-0.5, n * warmup**-1.5)
        if config.schedule == "inverse_sqrt":
            return peak * jnp.minimum(n / warmup, (warmup / n) ** 0.5)
        rising = jnp.minimum(n / warmup, 1.0)
        if config.schedule == "constant":
            return peak * rising
        progress = jnp.clip((n - warmup) / (config.decay_steps - warmup), 0, 1)
        falling = config.end_fraction + (1 - config.end_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return peak * rising * falling

    return rate


def decays(params: Any) -> Any:
    """True at the parameters that weight decay touches: matrices. Stacked layers' vectors have two axes: names tell."""

    def is_matrix(path: tuple, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return name not in ("bias", "scale", "v", "position_v", "damping")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Clipping, Adam, decoupled decay, learning rate; in this order."""
    steps = []
    if config.clip_norm:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    steps.append(optax.scale_by_adam(config.b1, config.b2, config.epsilon))
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=decays))
    steps.append(optax.scale_by_learning_rate(schedule(config, d_model)))
    return optax.chain(*steps)
