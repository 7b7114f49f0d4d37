"""The loss of each token of a split, for claims about parts of texts."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.claims.measuring import batches_of
from transformer_jax.predictor import Predictor
from transformer_jax.tasks import text
from transformer_jax.training.task import Arrays, DeviceArrays


def token_losses(
    model: Any, variables: Mapping[str, Any], batch: DeviceArrays
) -> jax.Array:
    """Return -log P(target) of a language model at each position, (B, T); 0 at padding.

    `variables` are those of the Flax module `model`, e.g. {"params": …}. For the batch,
    see `data.running_text.text_batches`.
    """
    valid = text.valid(batch)
    packing = {}
    if "segment" in batch:
        packing = {"segments": batch["segment"], "positions": batch["position"]}
    logits = model.apply(variables, batch["text"], valid, **packing)
    log_probabilities = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(log_probabilities, batch["target"][..., None], axis=-1)
    return jnp.where(valid, -found[..., 0], 0.0)


def split_losses(
    predictor: Predictor, split: str, variables: Mapping[str, Any] | None = None
) -> Iterator[tuple[Arrays, np.ndarray]]:
    """Yield each batch of a split with its `token_losses` (B, T).

    `variables` are by default the trained parameters.
    """
    model: Any = predictor.task.network.model
    given = {"params": predictor.params} if variables is None else variables
    compute = jax.jit(lambda variables, batch: token_losses(model, variables, batch))
    for batch in batches_of(predictor, split):
        yield batch, np.asarray(compute(given, batch))
