"""Evaluate a task on a split, predict from records, and restore the parameters for
either.
"""

import functools
import itertools
import logging
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batching import Batches, Divided
from transformer_jax.data.progress import counted, progress, telling
from transformer_jax.training import processes
from transformer_jax.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    check_fingerprint,
)
from transformer_jax.training.initialization import abstract, make_join, not_finite
from transformer_jax.training.interruption import Stopping, compile_unless
from transformer_jax.training.lora import form_of
from transformer_jax.training.sharding import (
    Fed,
    batch_sharding,
    feed,
    on_mesh,
    place,
    replicated,
    row_shards,
)
from transformer_jax.training.task import (
    Axis,
    EvaluationConfig,
    Growing,
    Mean,
    Params,
    Picture,
    Piece,
    Predicting,
    Record,
    Task,
)

log = logging.getLogger(__name__)


STREAMED = 8  # steps between two looks at an output that somebody watches grow


class AttentionMap(NamedTuple):
    """The attention weights of one record, of shape (layers, heads, queries, keys),
    and the labels of its positions.
    """

    name: str
    queries: Sequence[str]
    keys: Sequence[str]
    weights: np.ndarray
    # of queries and keys by name, e.g. "source"; "" for what is no text
    texts: Mapping[str, str] = types.MappingProxyType({})
    picture: Picture | None = None  # of the keys
    signed: bool = False  # the weights may be negative, and are from -1 to 1


class Evaluator:
    """Runs a task's `evaluate` and `attention`, which are compiled once per batch
    shape.

    Only `evaluate` and `attention` of this class need a whole `Task`.
    """

    def __init__(self, task: Predicting, mesh: Mesh):
        self.task: Any = task
        self.mesh = mesh
        self._growing = task if isinstance(task, Growing) else None
        whole = replicated(mesh)
        rows = batch_sharding(mesh)
        self._evaluate = on_mesh(
            self._start, mesh, out_shardings=(whole, whole, rows), static_argnums=2
        )
        self._grow = on_mesh(
            self._add_piece,
            mesh,
            out_shardings=(whole, rows),
            static_argnums=5,
            donate_argnums=2,
        )
        self._opened: dict[str, Batches] = {}
        self._compiled: set[tuple] = set()

    def lower(self, params: Params, batch: Any, greedy: bool) -> jax.stages.Lowered:
        """Return the program for abstract arrays: the one that adds a piece, if
        predictions grow in pieces.
        """
        _, outputs, state = jax.eval_shape(self._evaluate, params, batch, greedy)
        if self._growing is None or state is None:
            return self._evaluate.lower(params, batch, greedy)
        rows = batch_sharding(self.mesh)
        state, going_on = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows),
            (state, outputs["finished"]),
        )
        return self._grow.lower(
            params, batch, state, going_on, self._growing.piece, greedy
        )

    def open(self, split: str) -> Batches:
        """Return the batches of a split. The split is read and tokenized only once."""
        if split not in self._opened:
            with progress(f"preparing the split {split}"):
                self._opened[split] = self.task.batches(split, seed=None)
        return self._opened[split]

    def evaluate(
        self, params: Params, split: str, greedy: bool, stop: Stopping | None = None
    ) -> dict[str, float | str]:
        """Return the task's scores over all examples of `split`, and the number of
        examples.

        Raises Interrupted if `stop` says so meanwhile.
        """
        batches = self.open(split)
        means, predictions = self._run(params, batches, greedy, stop)
        return {
            **self.task.score(means, predictions, batches.references),
            "examples": len(predictions),
        }

    def predict(
        self, params: Params, records: Sequence[Record], greedy: bool = False
    ) -> list[dict[str, Any]]:
        """Return a prediction for every record, in order."""
        if not records:
            return []
        return self._run(params, self.task.batches_of(records), greedy)[1]

    def stream(
        self, params: Params, record: Record, number: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield the prediction for a record each time that a piece is added, as
        `predict` has it at place `number`.
        """
        batches = self._divided(self.task.batches_of([record]))
        batch = batches.plan.batch(0)
        arrays = batches.load(batch)
        arrays["index"] = np.where(batch.indices >= 0, number, -1).astype(np.int32)
        fed = Fed(batch, arrays, place(arrays, self.mesh, len(batch.indices)))
        for _, outputs in self._pieces(params, fed, False, STREAMED):
            yield self.task.decode(outputs, arrays)[0]

    def _start(self, params: Params, batch: Any, greedy: bool) -> tuple[Any, Any, Any]:
        means, outputs = self.task.evaluate(params, batch, greedy)
        if isinstance(outputs, Piece):
            return means, outputs.outputs, outputs.state
        return means, outputs, None

    def _add_piece(
        self,
        params: Params,
        batch: Any,
        state: Any,
        going_on: Any,
        steps: Any,
        greedy: bool,
    ) -> tuple[Any, Any]:
        outputs, state = self.task.grow(params, batch, state, going_on, steps, greedy)
        return outputs, state

    def _pieces(
        self, params: Params, fed: Fed, greedy: bool, steps: int
    ) -> Iterator[tuple[Mapping[str, Mean], dict[str, np.ndarray]]]:
        """Yield the means and the outputs of a batch, and again each time that
        `steps` more steps are done.
        """
        means, outputs, state = self._evaluate(params, fed.placed, greedy)
        while True:
            on_host = jax.device_get(outputs)
            yield means, on_host
            if self._growing is None or state is None:
                return
            going_on = self._growing.unfinished(on_host, fed.arrays)
            if not going_on.any():
                return
            outputs, state = self._grow(
                params, fed.placed, state, going_on, steps, greedy
            )

    def _run(
        self,
        params: Params,
        batches: Batches,
        greedy: bool,
        stop: Stopping | None = None,
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        predictions: dict[int, dict[str, Any]] = {}
        plan = batches.plan
        steps = 0 if self._growing is None else self._growing.piece

        def words() -> str:
            total = 0
            for i in range(len(plan)):
                total += int((plan.batch(i).indices >= 0).sum())
            done = len(predictions) - (-1 in predictions)
            first = "" if done else "; compiling for the first batch"
            return f"{done:,} of {counted(total, 'example')} done{first}"

        with telling(words):
            for fed in self._feed(batches):
                if stop is not None:
                    self._compile(params, fed, greedy, stop)
                for piece in self._pieces(params, fed, greedy, steps):
                    batch_means, outputs = piece  # those of the last one are complete
                    if stop is not None:
                        stop.check()
                for name, mean in batch_means.items():
                    totals[name] += np.array([mean.sum, mean.weight], np.float64)
                rows = self.task.decode(outputs, fed.arrays)
                predictions.update(zip(fed.batch.indices.tolist(), rows, strict=True))
        predictions.pop(-1, None)  # filler rows
        means = {
            name: float(total / (weight or 1))
            for name, (total, weight) in totals.items()
        }
        return means, _joined([predictions[i] for i in sorted(predictions)], batches)

    @functools.cached_property
    def _attention(self) -> Any:
        whole = replicated(self.mesh)
        return on_mesh(self.task.attention, self.mesh, out_shardings=whole)

    def _divided(self, batches: Batches) -> Batches:
        """Return batches of as few rows as the mesh allows, to spend no memory on
        rows without an example.
        """
        rows = row_shards(self.mesh.shape)
        return batches._replace(plan=Divided(batches.plan, rows))

    def _compile(self, params: Params, fed: Fed, greedy: bool, stop: Stopping) -> None:
        """Compile the first program of a batch, if its shape is new, so that this
        can be interrupted.
        """
        stop.check()
        shapes = tuple(array.shape for array in fed.placed.values())
        if shapes not in self._compiled:
            compile_unless(stop, self._evaluate.lower(params, fed.placed, greedy))
            self._compiled.add(shapes)

    def _feed(self, batches: Batches) -> Iterator[Fed]:
        return feed(batches, range(len(batches.plan)), self.mesh, whole=True)

    def attention(
        self, params: Params, records: Sequence[Record]
    ) -> list[list[AttentionMap]]:
        """Return the attention maps of every record, in order: those of its windows,
        if it has several.
        """
        maps: list[list[AttentionMap]] = [[] for _ in records]
        # A batch has references only if all its records do, so records with and without
        # references are batched apart.
        columns = set(self.task.config.columns.names)
        complete = [
            not isinstance(record, str) and set(record) == columns for record in records
        ]
        for is_complete in (False, True):
            chosen = [i for i, each in enumerate(complete) if each == is_complete]
            if not chosen:
                continue
            batches = self._divided(self.task.batches_of([records[i] for i in chosen]))
            rows: dict[int, list[AttentionMap]] = {}
            for fed in self._feed(batches):
                weights, axes = jax.device_get(self._attention(params, fed.placed))
                for row in np.flatnonzero(fed.batch.indices >= 0).tolist():
                    rows[int(fed.batch.indices[row])] = _maps_of(row, weights, axes)
            for number in sorted(rows):
                owner = number if batches.owners is None else batches.owners[number]
                maps[chosen[owner]] += rows[number]
        return maps


def _maps_of(
    row: int,
    weights: Mapping[tuple[str, str, str], np.ndarray],
    axes: Mapping[str, Axis],
) -> list[AttentionMap]:
    """Return the attention maps of a row of a batch.

    `weights` maps (name, sequence of the queries, sequence of the keys) to weights (B,
    L, N, T, S). `axes` are the sequences.
    """
    rows = {
        name: np.asarray(axis.ids)[row, : axis.lengths[row]]
        for name, axis in axes.items()
    }
    shown = {name: axis.shown(rows[name]) for name, axis in axes.items()}
    maps = []
    for (name, query_axis, key_axis), all_rows in weights.items():
        queries, _ = shown[query_axis]
        keys, _ = shown[key_axis]
        texts = {axis: shown[axis][1] for axis in (key_axis, query_axis)}
        of_row = all_rows[row, :, :, : len(queries), : len(keys)]
        picture = axes[key_axis].picture(rows[key_axis])
        maps.append(AttentionMap(name, queries, keys, of_row, texts, picture))
    return maps


def _joined(
    predictions: Sequence[dict[str, Any]], batches: Batches
) -> list[dict[str, Any]]:
    """Return the prediction of every example, given those of all rows in order."""
    if batches.owners is None or batches.join is None:
        return list(predictions)
    ends = np.flatnonzero(np.diff(batches.owners, append=-1)) + 1
    return [
        batches.join(i, predictions[a:b])
        for i, (a, b) in enumerate(itertools.pairwise([0, *ends.tolist()]))
    ]


def restore_parameters(
    task: Task, checkpoints: Checkpoints, config: EvaluationConfig, mesh: Mesh
) -> tuple[int, Params]:
    """Return (step, parameters of the model) of the checkpoint that `config` selects;
    for an average, the step is the newest one.

    Raises the errors of `restore_trained`.
    """
    step, trained = restore_trained(task, checkpoints, config, mesh)
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    form = form_of(task.config, boxed)
    if form.base is None:
        return step, trained
    model = abstract(boxed, mesh)
    base = checkpoints.restore_params(step, model, "base")
    return step, make_join(form, mesh, model, donate=True)(trained, base)


def restore_trained(
    task: Task, checkpoints: Checkpoints, config: EvaluationConfig, mesh: Mesh
) -> tuple[int, Params]:
    """Return (step, trained parameters) of the checkpoint that `config` selects: with
    LoRA, A and B of each adapted weight and what is trained as it is, otherwise the
    parameters of the model.

    Raises CheckpointError if there is no such checkpoint, if it was made with a
    tokenizer other than the workdir's, or if its parameters are not finite.
    """
    if config.checkpoint == "average":
        # no older replacement if one is damaged
        steps = checkpoints.verified(checkpoints.latest(config.average_last))
    else:
        if config.checkpoint == "best":
            selected = checkpoints.best()
        else:
            selected = checkpoints.newest()
        steps = [] if selected is None else [selected]
    if not steps:
        raise CheckpointError(_nothing_found(checkpoints, config))
    processes.agree("checkpoints", lambda: steps)
    for step in steps:
        check_fingerprint(
            task.fingerprint(training=False),
            checkpoints.meta(step),
            checkpoints.directory,
        )
    part = "ema" if config.checkpoint == "ema" else "params"
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    trained = abstract(form_of(task.config, boxed).trained, mesh)
    if len(steps) > 1:
        log.info("averaging the parameters of steps %s", ", ".join(map(str, steps)))
        params = checkpoints.average(steps, trained)
    else:
        if config.checkpoint == "best":
            part = checkpoints.meta(steps[0]).get("scored", part)
        params = checkpoints.restore_params(steps[0], trained, part)
    if ruined := processes.any_says(not_finite(params)):
        raise CheckpointError(
            f"step {steps[-1]} in {checkpoints.directory}: the parameters are not "
            f"finite ({ruined}), so the run diverged. Select another checkpoint with "
            "evaluation.checkpoint, or train again with a lower optimizer.learning_rate"
        )
    return steps[-1], params


def _nothing_found(checkpoints: Checkpoints, config: EvaluationConfig) -> str:
    newest = checkpoints.newest()
    where = checkpoints.directory
    if newest is None:
        damaged = where.exists() and any(where.glob("[0-9]*"))
        remedy = (
            "restore one from a backup, or train again in another workdir"
            if damaged
            else "train there first"
        )
        return f"{where} has no valid checkpoint: {remedy}"
    if config.checkpoint == "average":
        return (
            f"the last {config.average_last} checkpoints in {where} are damaged: set "
            f"evaluation.checkpoint to 'latest' for the newest valid one, step {newest}"
        )
    scores = ", ".join(checkpoints.scores(newest)) or "none"
    return (
        f"no valid checkpoint in {where} has a score for checkpoint.best_metric = "
        f"{checkpoints.config.best_metric!r} (step {newest} has: "
        f"{scores}): choose another metric, or set evaluation.checkpoint to 'latest'"
    )
