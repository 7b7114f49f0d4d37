"""Checks that a run has not diverged: losses, gradients and parameters must be
finite.
"""

import logging
import math
from collections.abc import Mapping

import jax

from transformer_jax.errors import UserError
from transformer_jax.training import processes
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.initialization import not_finite
from transformer_jax.training.task import Params

log = logging.getLogger(__name__)


class Diverged(UserError):
    """The run diverged: the loss, the gradient or the parameters are not finite."""


def is_good(step: int, metrics: Mapping[str, jax.Array]) -> bool:
    """Return True if the step's loss and gradient were finite.

    Warns if not, as its parameters may be unusable.
    """
    if metrics["skipped"]:
        log.warning(
            "step %d is not saved: "
            "its loss or gradient is not finite, its parameters may be unusable",
            step,
        )
    return not metrics["skipped"]


def check_loss(
    checkpoints: Checkpoints, step: int, scores: Mapping[str, float]
) -> None:
    """Raise Diverged if the validation loss is not finite."""
    if not math.isfinite(scores.get("loss", 0.0)):
        raise Diverged(
            f"the validation loss of step {step} is {scores['loss']}. "
            f"{remedy(checkpoints)}"
        )


def check_parameters(checkpoints: Checkpoints, step: int, params: Params) -> None:
    """Raise Diverged if a parameter is not finite."""
    if ruined := processes.any_says(not_finite(params)):
        raise Diverged(
            f"the parameters of step {step} are not finite: "
            f"{ruined}. {remedy(checkpoints)}"
        )


def remedy(checkpoints: Checkpoints) -> str:
    """Return what to do about a run that diverged."""
    newest = checkpoints.newest()
    saved = (
        "There is no earlier checkpoint"
        if newest is None
        else f"The last valid checkpoint is step {newest}"
    )
    return (
        f"{saved}. Lower optimizer.learning_rate, "
        "increase optimizer.warmup_steps, set optimizer.clip_norm, or check the data."
    )
