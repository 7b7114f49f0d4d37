"""Check on this machine that different ways of computing the same result agree, for
a scaled-down recipe.
"""

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import exporting
from transformer_jax.config import ConfigError, fields, make_task, parse, shrink
from transformer_jax.training.checkpoint import CheckpointConfig, Checkpoints
from transformer_jax.training.engine import Engine, make_train_step
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.sharding import on_mesh, place
from transformer_jax.training.task import Arrays, Embedding, Params, Scoring

ROUNDING = 1e-5  # relative tolerance in float32, as the order of summation may differ
STEPS = 4
LENGTH = 12


class Row(NamedTuple):
    """One comparison: the measured and the allowed difference.

    None: the comparison is not possible on this machine.
    """

    name: str
    difference: float | None
    allowed: float

    @property
    def held(self) -> bool:
        """True if nothing was compared or the difference is small enough."""
        # False for NaN
        return self.difference is None or self.difference <= self.allowed


def verify(recipe: ConfigDict, exports: bool = False) -> Iterator[Row]:
    """Yield every comparison that the recipe's task and this machine support, with
    `exports` also that of exported programs.

    The computation is in float32 on all devices. On accelerators, set
    jax_default_matmul_precision to "highest", because the default precision of matrix
    products causes larger differences.
    """
    recipe = recipe.copy_and_resolve_references()
    shrink(recipe)
    recipe.data.directory = recipe.data.directory or "(none)"
    recipe.data.rows_multiple = 8
    recipe.data.batch_tokens = 2**30  # an image may be of any size; no data is batched
    recipe.training.microbatches = 1
    recipe.mesh.data = -1
    recipe.mesh.fsdp = 1
    recipe.mesh.tensor = 1
    field_of = fields(recipe.task, recipe.model)
    ways = {key: field for key, field in field_of.items() if "how" in field.metadata}
    recipe.update_from_flattened_dict(
        {key: field.default for key, field in ways.items()}
    )
    yield Row(
        "resumed run = uninterrupted run, bit for bit", _resumed(_Run(recipe)), 0.0
    )

    # Microbatches and meshes draw different random numbers, so randomness is turned
    # off.
    off = {
        key: field.metadata["off"]
        for key, field in field_of.items()
        if "off" in field.metadata
    }
    recipe.update_from_flattened_dict(off)
    plain = _Run(recipe)
    losses = plain.losses()
    variants = {
        f"{key} = {other} vs. {field.default}": {key: other}
        for key, field in ways.items()
        for other in field.metadata["how"]
    }
    for name, changes in {
        **variants,
        "microbatches = the whole batch": {"training.microbatches": 2},
    }.items():
        try:
            run = _Run(recipe, changes)
        except ConfigError:  # this recipe does not support the value
            continue
        yield Row(name, _apart(run.losses(), losses), ROUNDING)
    devices = jax.device_count()
    alone = plain.losses_on_one_device() if devices > 1 else losses
    for mesh in (
        [(devices, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)]
        if devices == 8
        else [(devices, 1, 1)]
    ):
        shape = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
        apart = _apart(_Run(recipe, shape).losses(), alone) if devices > 1 else None
        yield Row(
            f"1 device = {' × '.join(map(str, mesh))} (data, fsdp, tensor)",
            apart,
            ROUNDING,
        )
    yield Row("batch = its rows one by one", _rows(plain), ROUNDING)
    params = jax.device_put(plain.parameters(), jax.devices()[0])
    for name, difference in plain.engine.task.checks(
        params, jax.device_put(plain.batch(0))
    ).items():
        yield Row(name, difference, ROUNDING)
    if exports:
        task = plain.engine.task
        yield Row("exported = live", exporting.difference(task, params), ROUNDING)
        if isinstance(task, Scoring):
            apart = exporting.difference(task, params, scored=True)
            yield Row("exported scores = live scores", apart, ROUNDING)
        if isinstance(task, Embedding):
            apart = exporting.difference(task, params, pooling="mean")
            yield Row("exported embeddings = live embeddings", apart, ROUNDING)


class _Run:
    """A recipe with some keys changed, trained on dummy batches."""

    def __init__(self, recipe: ConfigDict, changes: Mapping[str, Any] | None = None):
        config = recipe.copy_and_resolve_references()
        config.update_from_flattened_dict(changes or {})
        self.engine = Engine(make_task(parse(config), None))
        self.rows = 2 * jax.device_count()  # the same on any mesh

    def batch(self, step: int) -> Arrays:
        return self.engine.task.dummy_batch(self.rows, LENGTH, seed=step + 1)

    def train(self, state: TrainState, steps: range) -> tuple[TrainState, list[float]]:
        losses = []
        for step in steps:
            state, metrics = self.engine.step(
                state, place(self.batch(step), self.engine.mesh, self.rows)
            )
            losses += [float(metrics["loss"]), float(metrics["gradient_norm"])]
        return state, losses

    def parameters(self) -> Params:
        """Return the parameters of the model at the start."""
        return self.engine.parameters(self.engine.init(jax.random.key(0)))

    def losses(self) -> list[float]:
        """Return the loss and the gradient norm of each step, in one flat list."""
        return self.train(self.engine.init(jax.random.key(0)), range(STEPS))[1]

    def losses_on_one_device(self) -> list[float]:
        state = jax.device_put(self.engine.init(jax.random.key(0)), jax.devices()[0])
        training = self.engine.config.training
        step = jax.jit(
            make_train_step(
                self.engine.task,
                self.engine.optimizer,
                seed=training.seed,
                microbatches=1,
                ema_decay=training.ema_decay,
                form=self.engine.form,
            )
        )
        losses = []
        for i in range(STEPS):
            state, metrics = step(state, self.batch(i))
            losses += [float(metrics["loss"]), float(metrics["gradient_norm"])]
        return losses


def _apart(actual: list[float], expected: list[float]) -> float:
    """Return the maximum relative difference."""
    relative = np.abs(np.array(actual) - expected) / np.abs(expected)
    return float(relative.max())


def _resumed(run: _Run) -> float:
    """Return the number of arrays of the final state that differ after a save and
    restore halfway, with dropout.
    """
    key = jax.random.key(0)
    whole, _ = run.train(run.engine.init(key), range(STEPS))
    half, _ = run.train(run.engine.init(key), range(STEPS // 2))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(epath.Path(folder), CheckpointConfig(), {})
        checkpoints.save(STEPS // 2, half, {})
        restored, _ = checkpoints.restore(STEPS // 2, run.engine.abstract_state)
        checkpoints.close()
    resumed, _ = run.train(restored, range(STEPS // 2, STEPS))
    differing = 0
    for one, other in zip(
        jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True
    ):
        differing += np.asarray(one).tobytes() != np.asarray(other).tobytes()
    return float(differing)


def _rows(run: _Run) -> float:
    """Return the relative difference between the means of a batch and those of its
    single rows.

    Each row is repeated to fill a batch of the same shape.
    """
    engine = run.engine
    batch = run.batch(0)
    params = run.parameters()
    step = on_mesh(
        lambda params, batch: engine.task.loss(params, batch, jax.random.key(0), 0),
        engine.mesh,
    )

    def sums(arrays: Arrays) -> np.ndarray:
        means = step(params, place(arrays, engine.mesh, run.rows))
        values = []
        for _, mean in sorted(means.items()):
            values += [float(mean.sum), float(mean.weight)]
        return np.array(values)

    def repeated(row: int) -> Arrays:
        return {
            name: np.repeat(array[row : row + 1], run.rows, axis=0)
            for name, array in batch.items()
        }

    alone = [sums(repeated(row)) for row in range(run.rows)]
    total = np.sum(alone, axis=0) / run.rows
    whole = sums(batch)
    # a sum may be 0
    relative = np.abs(total - whole) / np.maximum(np.abs(whole), 1e-9)
    return float(relative.max())
