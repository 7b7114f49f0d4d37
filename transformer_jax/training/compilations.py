"""The compilations of the training step: announced, timed and counted."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transformer_jax.training.initialization import TrainState
from transformer_jax.training.interruption import Stopping, compile_unless

log = logging.getLogger(__name__)


def announcement(batch: Mapping[str, Any], number: int, shapes: int) -> str:
    """Return the log line before a compilation."""
    arrays = {name: array.shape for name, array in batch.items() if array.ndim > 1}
    shape = ", ".join(f"{name} {' × '.join(map(str, x))}" for name, x in arrays.items())
    of = f", shape {number} of at most {shapes}" if shapes > 1 else ""
    patience = ": seconds to minutes" if number == 1 else ""
    return f"compiling the training step for batches of {shape}{of}{patience}"


class Compilations:
    """Compiles the step before its first call with each batch shape.

    So compilation can be timed separately. `shapes` is the number of batch shapes, and
    thus the expected maximum. The first one was announced, and perhaps compiled,
    before.
    """

    def __init__(self, step: Any, shapes: int):
        self._step = step
        self._shapes = shapes
        self._compiled = set[tuple]()
        self._count = 0
        self._seconds: list[float] = []  # of each compilation after the first

    def compile(
        self,
        state: TrainState,
        batch: Mapping[str, jax.Array],
        stop: Stopping | None = None,
    ) -> bool:
        """Compile the step for this batch.

        Return False if it was compiled for the shape before.

        Raises Interrupted if the run should stop meanwhile.
        """
        shapes = tuple(array.shape for array in batch.values())
        if shapes in self._compiled:
            return False
        if later := bool(self._compiled):
            log.info("%s", announcement(batch, len(self._compiled) + 1, self._shapes))
        start = time.perf_counter()
        compile_unless(stop, self._step.lower(state, batch))
        self._seconds += [time.perf_counter() - start] * later
        self._compiled.add(shapes)
        return True

    def left(self) -> float | None:
        """Return the estimated seconds of the compilations to come, None if unknown."""
        missing = max(self._shapes - len(self._compiled), 0)
        if missing and not self._seconds:
            return None
        return missing * float(np.mean(self._seconds or [0.0]))

    def check(self) -> None:
        """Warn if the step was compiled more often than there are batch shapes."""
        count = self._count
        self._count = self._step._cache_size()
        if self._count > max(count, self._shapes):
            message = (
                "compiled the step %d times for %d batch shapes: "
                "check what else changes"
            )
            log.warning(message, self._count, self._shapes)
