"""What must be equal, measured on this machine: a recipe at a size of seconds, computed in one way and in another."""

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from transformer_jax.config import Config, parse
from transformer_jax.tasks import task_class
from transformer_jax.training.checkpoint import CheckpointConfig, Checkpoints
from transformer_jax.training.engine import Engine, TrainState, make_train_step
from transformer_jax.training.sharding import on_mesh, place
from transformer_jax.training.task import Arrays

ROUNDING = 1e-5  # relative, in float32: the order of summation may differ
STEPS, LENGTH = 4, 12


class Row(NamedTuple):
    """One comparison: "a = b", how far apart they are and may be; None: it cannot be made here."""

    name: str
    difference: float | None
    allowed: float

    @property
    def held(self) -> bool:
        return self.difference is None or self.difference <= self.allowed  # not where it is NaN


def verify(recipe: ConfigDict) -> Iterator[Row]:
    """Every comparison that the recipe's task and this machine allow, one by one. float32, on all devices there are."""
    recipe = recipe.copy_and_resolve_references()
    task: Any = task_class(recipe.task)
    task.shrink(recipe)
    recipe.data.directory = recipe.data.directory or "(none)"
    recipe.model.dtype, recipe.training.microbatches = "float32", 1
    yield Row("resumed = never stopped, bit for bit", _resumed(_Run(recipe)), 0.0)

    for name in recipe.model:
        if name.endswith("dropout_rate"):
            recipe.model[name] = 0.0
    plain = _Run(recipe)
    losses = plain.losses()
    both = {"model.unroll": 2 if recipe.model.unroll == 1 else 1}
    variants: dict[str, Mapping[str, Any]] = {
        "unrolled = a loop over layers": both,
        "rematerialised = kept": {"model.remat": "full"},
        "rematerialised but for products = kept": {"model.remat": "scores"},
        "in microbatches = whole": {"training.microbatches": 2},
    }
    for name, changes in variants.items():
        yield Row(name, _apart(_Run(recipe, changes).losses(), losses), ROUNDING)
    yield Row("fused attention = its equation", _fused(recipe, losses), ROUNDING)
    alone = _apart(plain.losses_on_one_device(), losses) if jax.device_count() > 1 else None
    yield Row(f"1 device = {jax.device_count()} devices", alone, ROUNDING)
    yield Row("rows of a batch do not see one another", _rows(plain), ROUNDING)
    params = jax.device_put(plain.engine.init(jax.random.key(0)).params, jax.devices()[0])
    for name, difference in plain.task.exactness(params, jax.device_put(plain.batch(0))).items():
        yield Row(name, difference, ROUNDING)


class _Run:
    """A recipe with some keys changed, and batches made up for it."""

    def __init__(self, recipe: ConfigDict, changes: Mapping[str, Any] | None = None):
        config = recipe.copy_and_resolve_references()
        config.update_from_flattened_dict(changes or {})
        self.config: Config = parse(config)
        self.task = self.config.make_task("(none)")
        self.engine = Engine(self.task, self.config.engine)
        # As many on any mesh, so that every run has the same.
        self._rows = 2 * jax.device_count()

    def batch(self, step: int) -> Arrays:
        return self.task.made_up(self._rows, LENGTH, seed=step + 1)

    def train(self, state: TrainState, steps: range) -> tuple[TrainState, list[float]]:
        found = []
        for step in steps:
            batch = place(self.batch(step), self.engine.batch_sharding, self._rows)
            state, metrics = self.engine.step(state, batch)
            found += [float(metrics["loss"]), float(metrics["gradient_norm"])]
        return state, found

    def losses(self) -> list[float]:
        """Loss and norm of the gradient, step by step."""
        return self.train(self.engine.init(jax.random.key(0)), range(STEPS))[1]

    def losses_on_one_device(self) -> list[float]:
        state = jax.device_put(self.engine.init(jax.random.key(0)), jax.devices()[0])
        step = jax.jit(make_train_step(self.task, self.engine.optimizer, seed=0, microbatches=1))
        found = []
        for i in range(STEPS):
            state, metrics = step(state, self.batch(i))
            found += [float(metrics["loss"]), float(metrics["gradient_norm"])]
        return found


def _apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.array(found) - expected) / np.abs(expected)))


def _resumed(run: _Run) -> float:
    """How many arrays of the state differ after a save and a restore half-way, dropout on."""
    key = jax.random.key(0)
    whole, _ = run.train(run.engine.init(key), range(STEPS))
    half, _ = run.train(run.engine.init(key), range(STEPS // 2))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(epath.Path(folder), CheckpointConfig())
        checkpoints.save(STEPS // 2, half, {})
        restored, _ = checkpoints.restore(STEPS // 2, run.engine.abstract_state)
        checkpoints.close()
    resumed, _ = run.train(restored, range(STEPS // 2, STEPS))
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True)
    return float(sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs))


def _fused(recipe: ConfigDict, losses: list[float]) -> float | None:
    """None where the recipe's attention is none that libraries fuse."""
    model = recipe.model
    if model.positions == "relative":
        return None
    other = "xla" if model.attention_implementation == "einsum" else "einsum"
    return _apart(_Run(recipe, {"model.attention_implementation": other}).losses(), losses)


def _rows(run: _Run) -> float:
    """The sums of a batch against those of its rows one by one, the others' places taken by copies of that row."""
    params, batch = run.engine.init(jax.random.key(0)).params, run.batch(0)
    measure = on_mesh(run.task.measure, run.engine.mesh)
    rows = len(next(iter(batch.values())))

    def sums(arrays: Arrays) -> np.ndarray:
        placed = place(arrays, run.engine.batch_sharding, rows)
        return np.array([float(value) for _, value in sorted(measure(params, placed).items())])

    alone = [sums({name: np.repeat(x[i : i + 1], rows, axis=0) for name, x in batch.items()}) for i in range(rows)]
    return _apart(list(np.sum(alone, axis=0) / rows), list(sums(batch)))
