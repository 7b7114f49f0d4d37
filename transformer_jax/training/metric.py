"""The scores of a task: their labels, and which of two values is better."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from transformer_jax.errors import UserError

Direction = Literal["higher", "lower"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A score of a task.

    label: its name in the training log, where predictions are the cheap ones, e.g.
        "bleu (greedy)".
    better: the direction in which the model is better.
    of_predictions: False for a score such as the loss, which depends on parameters and
        references only and therefore not on how predictions are made.
    """

    label: str
    _: dataclasses.KW_ONLY
    better: Direction
    of_predictions: bool = True

    def __post_init__(self) -> None:
        if self.better not in get_args(Direction):
            raise UserError(
                f"Metric({self.label!r}, better={self.better!r}): "
                "better must be 'higher' or 'lower'"
            )

    def merit(self, value: float) -> float:
        """Return `value`, or its negative if lower is better."""
        return value if self.better == "higher" else -value


LOSS = Metric("loss", better="lower", of_predictions=False)
PERPLEXITY = Metric("perplexity", better="lower", of_predictions=False)
BITS_PER_BYTE = Metric("bits_per_byte", better="lower", of_predictions=False)
ACCURACY = Metric("accuracy", better="higher")
F1 = Metric("f1", better="higher")


def label(metrics: Mapping[str, Metric], name: str) -> str:
    """Return the label of a logged value, or its name if it is no metric."""
    return metrics[name].label if name in metrics else name
