"""The optimizer: Adam with learning-rate schedules, weight decay and gradient
clipping, built with optax.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from transformer_jax import fields

SCHEDULES = ("noam", "inverse_sqrt", "cosine", "linear", "constant")
DECAYING = ("cosine", "linear")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the constants of Vaswani et al. 2017, Section 5.3."""

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
    weight_decay: float = 0.0  # decoupled (Loshchilov and Hutter 2019); see `decays`
    # the maximum global norm of the gradient; 0 disables clipping
    clip_norm: float = 0.0

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
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
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
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


def decays(boxed_params: Any) -> list[bool]:
    """Return a flag for each parameter, in leaf order: True for matrices, to which
    weight decay applies.

    Matrices are recognized by their logical axes. The axis that stacks layers is
    ignored, and heads × head_dim counts as one axis, the output of a projection.
    Biases, norms and score vectors have one axis and do not decay.
    """
    specs = nn.get_partition_spec(boxed_params)

    def is_matrix(axes: PartitionSpec) -> bool:
        stacked, split = (
            "layers" in axes,
            "head_dim" in axes and not {"heads", "kv_heads"}.isdisjoint(axes),
        )
        return len(axes) - stacked - split >= 2

    return [
        is_matrix(axes)
        for axes in jax.tree.leaves(
            specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    ]


def make_optimizer(
    config: OptimizerConfig, rate: optax.Schedule, decay: Sequence[bool]
) -> optax.GradientTransformation:
    """Chain clipping, Adam, decoupled weight decay and the learning rate, in this
    order.

    `rate` is the result of `schedule`. `decay` is the result of `decays`; it applies to
    boxed and unboxed parameters.
    """

    def mask(params: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(params), decay)

    steps = []
    if config.clip_norm:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    steps.append(optax.scale_by_adam(config.b1, config.b2, config.epsilon))
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    steps.append(optax.scale_by_learning_rate(rate))
    return optax.chain(*steps)
