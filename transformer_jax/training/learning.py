"""Tell in the log if a model does not learn."""

import logging
from collections.abc import Mapping

from transformer_jax.data.batching import Batches

log = logging.getLogger(__name__)

# steps, or a fifth of a shorter run, after which a model must have learned something
SOON = 2000
MARGIN = 0.98  # a loss above this part of the baseline is no better than the baseline


class Learning:
    """Compares validation losses with a model that knows only how frequent each target
    is, e.g. each token or label.

    Args:
        batches: the training batches. Their `baseline` is the entropy of their targets.
        steps: the number of training steps.
    """

    def __init__(self, batches: Batches, steps: int):
        self._baseline = batches.baseline
        self._steps = steps
        self._told = False
        self._learned = False

    def check(self, step: int, scores: Mapping[str, float]) -> None:
        """Warn if the validation loss of `step` is still at the entropy of the training
        targets.

        The warning comes once, and again after the last step. It never comes after a
        loss that was clearly lower: then the model has learned something, and overfits.
        """
        late = step >= min(SOON, self._steps / 5)
        if self._baseline is None or "loss" not in scores or not late:
            return
        if self._learned or (self._told and step < self._steps):
            return
        entropy = self._baseline()
        if scores["loss"] <= MARGIN * entropy:
            self._learned = True
            return
        self._told = True
        log.warning(
            "step %d: the validation loss %.3g is not clearly below %.3g, "
            "the entropy of the training targets: so far, the model knows "
            "only how frequent each of them is. If this lasts, train for more steps, "
            "lower optimizer.learning_rate, or use pre-LN (model.norm = 'pre') "
            "if the model has that key",
            step,
            scores["loss"],
            entropy,
        )
