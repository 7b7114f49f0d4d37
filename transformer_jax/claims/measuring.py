"""Measurements of trained encoder–decoders, for claims.

Shapes: B batch · S source positions · T target positions · V vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.transformer import shift_right
from transformer_jax.predictor import Predictor

Array = jax.Array
Batch = Mapping[str, Any]


def batches_of(predictor: Predictor, split: str) -> Iterator[Batch]:
    """Yield the batches of a split, each example once."""
    batches = predictor.task.batches(split, None)
    for number in range(len(batches.plan)):
        yield batches.load(batches.plan.batch(number))


def valid(batch: Batch, side: str) -> Array:
    """Return where a batch has tokens of "source" or "target", and not padding."""
    positions = jnp.arange(batch[side].shape[1])
    return positions[None] < batch[f"{side}_length"][:, None]


def logits_of(model: Any, params: Any, batch: Batch, begin: int) -> Array:
    """Return the logits (B, T, V) of each target token, given those before it.

    begin: id that the decoder reads first.
    """
    return model.apply(
        {"params": params},
        batch["source"],
        shift_right(batch["target"], begin),
        valid(batch, "source"),
        valid(batch, "target"),
    )


def cross_entropy(logits: Array, batch: Batch) -> tuple[Array, Array]:
    """Return the sum of -log p over the target's tokens, and their number."""
    of_tokens = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["target"][..., None], axis=-1
    )[..., 0]
    is_token = valid(batch, "target")
    return -jnp.where(is_token, of_tokens, 0).sum(), is_token.sum()


def correct(logits: Array, batch: Batch) -> tuple[Array, Array]:
    """Return how many of the target's tokens are the most probable ones, and how many
    tokens there are.
    """
    is_token = valid(batch, "target")
    is_right = logits.argmax(axis=-1) == batch["target"]
    return (is_right & is_token).sum(), is_token.sum()


def begin_id(predictor: Predictor) -> int:
    """Return the id that the decoder reads first."""
    task: Any = predictor.task
    return task.corpus.special_ids("target").begin
