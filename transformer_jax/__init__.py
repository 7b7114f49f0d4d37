"""The Transformer and everything that led to it, in JAX and Flax."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.predictor import Predictor

__all__ = ["load"]


def load(workdir: str, overrides: Mapping[str, Any] | None = None) -> "Predictor":
    """Open a trained run for prediction: `load("runs/dates").predict(["3 May 2021"])`.

    `overrides` replaces values of its config, e.g. {"evaluation.checkpoint": "best"}. Raises ConfigError for a folder
    that is not a run, or for unknown keys, and CheckpointError where no good checkpoint is found.
    """
    # Imported here, so that `transformer_jax.models` needs jax and flax only.
    from transformer_jax.predictor import Predictor

    return Predictor.load(workdir, overrides or {})
