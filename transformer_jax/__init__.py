"""Recurrent encoder–decoders with attention, the Transformer, BERT and GPT, in JAX
and Flax.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.inside import (
        activations,
        capture,
        gradient_times_input,
        logit_lens,
        patch,
    )
    from transformer_jax.predictor import Predictor
    from transformer_jax.training.task import Task

__all__ = [
    "activations",
    "capture",
    "gradient_times_input",
    "load",
    "logit_lens",
    "patch",
]


def load(
    workdir: str,
    overrides: Mapping[str, Any] | None = None,
    task: "str | type[Task] | None" = None,
) -> "Predictor":
    """Load a trained run for prediction: `load("runs/dates").predict(["3 May 2021"])`.

    Args:
        workdir: the folder of the run. Nothing in it chooses code to run.
        overrides: values of the run's config to replace, e.g.
            `{"evaluation.checkpoint": "best"}`.
        task: the task that the run was trained with, if it is not one of this package:
            its class, or "module:Class" as in `config.task`, whose module is imported.

    Raises:
        ConfigError: `workdir` is not the folder of a run, or is that of another task,
            or `overrides` has an unknown key, a value that cannot be used, or a value
            that would change the model.
        CheckpointError: The run has no intact checkpoint.
    """
    # A local import, because importing `transformer_jax.models` must not require more
    # than JAX and Flax.
    from transformer_jax.predictor import Predictor

    return Predictor.load(workdir, overrides or {}, task)


def __getattr__(name: str) -> Any:
    """Return a function of `inside`, which is imported only here: see `load`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformer_jax import inside

    return getattr(inside, name)
