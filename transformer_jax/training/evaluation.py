"""Metrics over every example of a split, predictions for lines, and the parameters to use for both."""

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.training import processes
from transformer_jax.training.checkpoint import CheckpointError, Checkpoints
from transformer_jax.training.sharding import batch_sharding, on_mesh, place, replicated, shardings
from transformer_jax.training.task import Arrays, Batches, Params, Task

log = logging.getLogger(__name__)

CHECKPOINTS = ("latest", "best", "average", "ema")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Which parameters are evaluated, and how.

    checkpoint: "latest", "best" (by checkpoint.best_metric), "average" (of the last `average_last`) or "ema" (the
    moving average that training.ema_decay keeps, in the latest). While training, scores are of the moving average
    under "ema", and of the parameters themselves under the others; "best" takes what had the best score.
    """

    checkpoint: str = "latest"
    average_last: int = 10
    rows: int = 64  # sentences predicted at a time

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        if self.checkpoint not in CHECKPOINTS:
            yield "checkpoint", f"must be one of {', '.join(CHECKPOINTS)}"
        for name in ("average_last", "rows"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"


class Evaluator:
    """Compiles a task's `measure` and `predict`, once for each batch shape, and runs them."""

    def __init__(self, task: Task, mesh: Mesh, rows: int):
        self.task, self.rows = task, rows
        self._sharding = batch_sharding(mesh)
        self._devices = mesh.shape["data"] * mesh.shape["fsdp"]
        self._measure = on_mesh(task.measure, mesh, out_shardings=replicated(mesh))
        self._predict = on_mesh(task.predict, mesh, out_shardings=replicated(mesh), static_argnums=2)
        self._attention = on_mesh(task.attention, mesh, out_shardings=replicated(mesh))
        self._measured: dict[str, Batches] = {}

    def evaluate(self, params: Params, split: str, fast: bool) -> dict[str, float | str]:
        """The task's scores over all examples of `split`."""
        sums = collections.Counter[str]()
        for _, arrays in every_batch(self.open(split), self._devices):
            measured = self._measure(params, self._place(arrays))
            sums.update({name: float(value) for name, value in measured.items()})
        inputs, references = self.task.examples(split)
        return self.task.score(sums, self.predict(params, inputs, fast), references)

    def open(self, split: str) -> Batches:
        """The batches of a split, read and tokenized once."""
        if split not in self._measured:
            self._measured[split] = self.task.batches(split, seed=None)
        return self._measured[split]

    def predict(
        self,
        params: Params,
        lines: Sequence[str],
        fast: bool = False,
        write: Callable[[Arrays, Arrays], list[str]] | None = None,
    ) -> list[str]:
        """A line for every line, in their order; `write` is the task's own by default."""
        if not lines:
            return []
        write = write or self.task.write
        rows = -(-self.rows // self._devices) * self._devices
        predicted = [""] * len(lines)
        for indices, arrays in every_batch(self.task.read(lines, rows), self._devices):
            found = self._predict(params, self._place(arrays), fast)
            for index, line in zip(indices, write(jax.device_get(found), arrays), strict=True):
                if index >= 0:
                    predicted[index] = line
        return predicted

    def attention(self, params: Params, arrays: Arrays) -> Iterator[dict[tuple[str, str, str], np.ndarray]]:
        """What `task.attention` gives, a row of `task.pair` at a time."""
        count = len(next(iter(arrays.values())))
        rows = -(-min(self.rows, count) // self._devices) * self._devices
        for start in range(0, count, rows):
            here = min(rows, count - start)
            part = {name: np.pad(x[start : start + here], ((0, rows - here), (0, 0))) for name, x in arrays.items()}
            found = jax.device_get(self._attention(params, self._place(part)))
            yield from ({key: weights[row] for key, weights in found.items()} for row in range(here))

    def _place(self, arrays: Arrays) -> dict[str, jax.Array]:
        return place(arrays, self._sharding, len(next(iter(arrays.values()))))


def every_batch(batches: Batches, devices: int = 1) -> Iterator[tuple[np.ndarray, Arrays]]:
    """One epoch: (indices, arrays), rows without an example added to what `devices` cannot share out."""
    for i in range(len(batches.plan)):
        batch = batches.plan.batch(i)
        indices = np.pad(batch.indices, (0, -len(batch.indices) % devices), constant_values=-1)
        yield indices, batches.load(batch._replace(indices=indices))


def restore_parameters(
    task: Task, checkpoints: Checkpoints, config: EvaluationConfig, mesh: Mesh
) -> tuple[int, Params]:
    """(step, parameters) that `config` asks for.

    Raises CheckpointError when there is none, or when it belongs to another tokenizer than the workdir's.
    """
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        nn.unbox(boxed),
        shardings(boxed, mesh),
    )
    if config.checkpoint == "average":
        steps = checkpoints.verified(checkpoints.latest(config.average_last))  # nothing older for a damaged one
    else:
        found = checkpoints.best() if config.checkpoint == "best" else checkpoints.newest()
        steps = [] if found is None else [found]
    if not steps:
        raise CheckpointError(_nothing_found(checkpoints, config))
    processes.agree("checkpoints", lambda: steps)
    for step in steps:
        check_identity(task.identity(training=False), checkpoints.meta(step), checkpoints.directory)
    if len(steps) > 1:
        log.info("averaging steps %s", ", ".join(map(str, steps)))
        return steps[-1], checkpoints.average(steps, abstract)
    part = "ema" if config.checkpoint == "ema" else "params"
    if config.checkpoint == "best":
        part = checkpoints.meta(steps[0]).get("scored", part)
    return steps[0], checkpoints.restore_params(steps[0], abstract, part)


def _nothing_found(checkpoints: Checkpoints, config: EvaluationConfig) -> str:
    newest, where = checkpoints.newest(), checkpoints.directory
    if newest is None:
        return f"{where} holds no good checkpoint: train first with this --workdir"
    if config.checkpoint == "average":
        return (
            f"the last {config.average_last} checkpoints in {where} are damaged: set evaluation.checkpoint to 'latest' "
            f"for the newest good one, step {newest}"
        )
    scores = ", ".join(checkpoints.scores(newest)) or "none"
    return (
        f"no good checkpoint in {where} has the score checkpoint.best_metric = {checkpoints.config.best_metric!r} "
        f"(step {newest} has: {scores}): set that to another, or evaluation.checkpoint to 'latest'"
    )


def check_identity(identity: Mapping[str, str], meta: Mapping[str, Any], where: Any) -> None:
    """Raises CheckpointError when a tokenizer or the data is not what the checkpoint was made with."""
    stored = meta["identity"]
    for name, value in identity.items():
        if stored.get(name) != value:
            raise CheckpointError(
                f"{name}: sha256 {value[:12]}… here, {stored.get(name, 'none')[:12]}… in the checkpoints of {where}: "
                "they do not belong together; restore the file it was trained with, or use another --workdir"
            )
