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
    """Every comparison that the recipe's task and this machine allow, one by one. In float32, on all devices there are;
    on accelerators with jax_default_matmul_precision "highest", else products differ by more."""
    recipe = recipe.copy_and_resolve_references()
    task: Any = task_class(recipe.task)
    task.shrink(recipe)
    recipe.data.directory = recipe.data.directory or "(none)"
    recipe.data.rows_multiple, recipe.training.microbatches = 8, 1
    recipe.mesh.data, recipe.mesh.fsdp, recipe.mesh.tensor = -1, 1, 1
    model = recipe.model
    # What eight devices can share out; then what the variants are compared with, whatever the recipe has.
    plain_values: dict[str, Any] = {"num_heads": 8, "vocab_multiple": 8}
    plain_values |= {"dtype": "float32", "remat": "none", "unroll": 1, "attention_implementation": "einsum"}
    model.update({name: value for name, value in plain_values.items() if name in model})
    yield Row("resumed = never stopped, bit for bit", _resumed(_Run(recipe)), 0.0)

    for name in model:  # what is drawn at random is drawn anew for every microbatch
        if name.endswith("dropout_rate"):
            model[name] = 0.0
    if "teacher_forcing" in model:
        model.update({"teacher_forcing": 1.0, "teacher_forcing_end": 1.0, "teacher_forcing_steps": 0})
    plain = _Run(recipe)
    losses = plain.losses()
    variants: dict[str, dict[str, Any]] = {
        "unrolled = a loop over layers": {"model.unroll": 2},
        "rematerialised = kept": {"model.remat": "full"},
        "rematerialised but for products = kept": {"model.remat": "scores"},
        "in microbatches = whole": {"training.microbatches": 2},
    }
    if "positions" in model and model.positions != "relative" and model.value_dim == model.head_dim:
        variants["the library's attention = its equation"] = {"model.attention_implementation": "xla"}
    known = recipe.to_dict()
    for name, changes in variants.items():
        if any(key not in known[section] for section, key in (change.split(".") for change in changes)):
            continue  # a model without the choice
        yield Row(name, _apart(_Run(recipe, changes).losses(), losses), ROUNDING)
    devices = jax.device_count()
    alone = plain.losses_on_one_device() if devices > 1 else losses
    for mesh in [(devices, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)] if devices == 8 else [(devices, 1, 1)]:
        shape = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
        apart = _apart(_Run(recipe, shape).losses(), alone) if devices > 1 else None
        yield Row(f"1 device = {' × '.join(map(str, mesh))} (data, fsdp, tensor)", apart, ROUNDING)
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
        training = self.config.training
        step = jax.jit(
            make_train_step(
                self.task, self.engine.optimizer, seed=training.seed, microbatches=1, ema_decay=training.ema_decay
            )
        )
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
