"""Save the state of a run: at regular steps, when it is asked to stop, and when its
folder was moved.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from transformer_jax.training import processes
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.divergence import check_parameters, is_good
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.location import Location, Moved
from transformer_jax.training.task import Config

Metrics = Mapping[str, jax.Array] | None  # of a step; None if it is known to be good


class Preempted(Exception):
    """The run stopped on request (SIGTERM or Ctrl-C). Start it again to continue."""


class Keeper:
    """Saves the state of a run.

    With several processes, every process must call every method.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        location: Location,
        config: Config,
        meta: dict[str, Any],
        scoring: Mapping[str, Any],
        first: int,
    ):
        """`meta` and `scoring` are stored with every step.

        `first` is the step that the run starts from.
        """
        self.checkpoints = checkpoints
        self._location = location
        self._config = config
        self._meta = meta
        self._scoring = scoring
        self._saved = first

    def is_regular(self, step: int) -> bool:
        """Return True if the step is saved by checkpoint.every, or the last one."""
        return (
            step == self._config.training.steps
            or step % self._config.checkpoint.every == 0
        )

    def save(
        self,
        step: int,
        state: TrainState,
        scores: dict[str, float] | None,
        pending: bool = False,
    ) -> None:
        """Save a good step with its scores, or as one whose evaluation is `pending`."""
        check_parameters(self.checkpoints, step, state.params)
        self.check_place(step, state, None)
        regular = self.is_regular(step)
        self.checkpoints.save(
            step,
            state,
            self._meta | {"position": step},
            scores if regular else None,
            preemption=not regular or pending,
            pending=pending,
            scoring=self._scoring,
        )
        self._saved = step

    def stopped(
        self, step: int, state: TrainState, metrics: Metrics, pending: bool = False
    ) -> Preempted:
        """Save the step, if it is good and not saved, and return the exception that
        ends the run.

        `metrics` are those of the step. `pending` says that the step should still be
        evaluated.
        """
        again = "run the same command again to continue"
        if self._saved == step:
            return Preempted(f"stopped before step {step + 1}: {again}")
        if metrics is not None and not is_good(step, metrics):
            return Preempted(
                f"stopped after step {step}, which is not saved, "
                f"because its loss is not finite: {again}"
            )
        self.save(step, state, None, pending)
        return Preempted(f"stopped after step {step}, which is saved: {again}")

    def complete(self, step: int, scores: dict[str, float]) -> None:
        """Add the scores of a step that was saved before its evaluation."""
        regular = self.is_regular(step)
        self.checkpoints.complete(
            step, scores if regular else None, preemption=not regular
        )

    def check_place(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Raise Moved if somebody renamed or removed the workdir.

        If it was renamed, save a good step there before.
        """
        moved = processes.first_says(self._location.moved)
        if moved is None:
            return
        workdir = self.checkpoints.directory.parent
        if not moved:
            raise Moved(
                f"--workdir={workdir} was removed while the run trained, so "
                f"step {step} is not saved. Start again, and leave the folder in place"
            )
        if self._saved != step and (metrics is None or is_good(step, metrics)):
            checkpoints = Checkpoints(
                epath.Path(moved) / "checkpoints",
                self._config.checkpoint,
                self.checkpoints.metrics,
            )
            checkpoints.save(
                step,
                state,
                self._meta | {"position": step},
                preemption=True,
                scoring=self._scoring,
            )
            checkpoints.close()
            self._saved = step
        raise Moved(
            f"--workdir={workdir} was renamed to {moved} while the run trained. Step "
            f"{self._saved} is saved there. Continue with --workdir={os.fspath(moved)}"
        )
