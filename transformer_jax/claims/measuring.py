"""Parts of measurements of trained models, for claims.

Shapes: B batch · S source positions · T target positions · V vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from transformer_jax.models.transformer import shift_right
from transformer_jax.predictor import Predictor
from transformer_jax.tasks import text
from transformer_jax.training.task import Arrays

Array = jax.Array
Batch = Mapping[str, Any]


def batches_of(predictor: Predictor, split: str) -> Iterator[Arrays]:
    """Yield the batches of a split, each example once."""
    batches = predictor.task.batches(split, None)
    for number in range(len(batches.plan)):
        yield batches.load(batches.plan.batch(number))


def logits_of(model: Any, params: Any, batch: Batch, begin: int) -> Array:
    """Return the logits (B, T, V) of each target token, given those before it.

    begin: id that the decoder reads first.
    """
    return model.apply(
        {"params": params},
        batch["source"],
        shift_right(batch["target"], begin),
        text.valid(batch, "source"),
        text.valid(batch, "target"),
    )


def correct(logits: Array, batch: Batch) -> tuple[Array, Array]:
    """Return how many of the target's tokens are the most probable ones, and how many
    tokens there are.
    """
    is_token = text.valid(batch, "target")
    is_right = logits.argmax(axis=-1) == batch["target"]
    return (is_right & is_token).sum(), is_token.sum()


def begin_id(predictor: Predictor) -> int:
    """Return the id that the decoder reads first."""
    task: Any = predictor.task
    return task.corpus.special_ids("target").begin
