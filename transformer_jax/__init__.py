"""The Transformer and the road to it, in JAX and Flax."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.predictor import Predictor

__all__ = ["load"]


def load(workdir: str, overrides: Mapping[str, Any] | None = None) -> "Predictor":
    """What predicts from a trained run: `load("runs/dates").predict(["3 May 2021"])`.

    `overrides` of its config, as {"evaluation.checkpoint": "best"}. Raises ConfigError for a folder that is no run, or
    keys that do not exist, and CheckpointError where no good checkpoint is found.
    """
    # Imported here, so that `transformer_jax.models` needs jax and flax only.
    from transformer_jax.predictor import Predictor

    return Predictor.load(workdir, overrides or {})
