"""What the engine knows of an objective."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from transformer_jax.data.batching import Batch, BatchPlan

Params = Any
Arrays = dict[str, np.ndarray]
Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, and how often what."""

    steps: int = 100_000
    log_every: int = 100
    evaluate_every: int = 1000
    seed: int = 0
    microbatches: int = 1  # a batch's gradient is summed over this many parts
    ema_decay: float = 0.0  # of the parameters' moving average, for evaluation.checkpoint = "ema"; 0: there is none

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
        for name in ("steps", "log_every", "evaluate_every", "microbatches"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if not 0 <= self.seed < 2**31:
            yield "seed", "must be in [0, 2³¹)"
        if not 0 <= self.ema_decay < 1:
            yield "ema_decay", "must be in [0, 1), as 0.999; 0 keeps no average"


class Batches(NamedTuple):
    """A batch plan and what turns one of its batches into arrays, rows first."""

    plan: BatchPlan
    load: Callable[[Batch], Arrays]


class Task(Protocol):
    """One objective: model, batches, loss, metrics and predictions.

    On the device, pure functions that the engine jits and shards; on the host, the rest.
    """

    d_model: int  # what the paper's learning-rate schedule scales with
    dtype: str  # of the matrix products
    train_split: str
    validation_split: str
    test_split: str

    def prepare(self) -> None:
        """Makes what training needs and does not find, as tokenizers: one process does, and then the others find it."""

    def init(self, key: jax.Array) -> Params:
        """Parameters whose leaves carry their logical axis names (flax's boxes)."""

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, Sums]:
        """(sum, weight, auxiliary sums). Only the sum is differentiated; the engine divides by the weight once. `step`
        counts the updates before this one, for what goes by a schedule."""

    def measure(self, params: Params, batch: Mapping[str, jax.Array]) -> Sums:
        """Evaluation sums of a batch, without dropout; they add up over batches."""

    def predict(self, params: Params, batch: Mapping[str, jax.Array], fast: bool) -> dict[str, jax.Array]:
        """What `write` turns into lines. `fast` is the cheap way, taken while training: greedy, not beam."""

    def batches(self, split: str, seed: int | None) -> Batches:
        """With a seed the shuffled plan for training, without one every example exactly once."""

    def attention(self, params: Params, batch: Mapping[str, jax.Array]) -> dict[tuple[str, str, str], jax.Array]:
        """Of a batch as `pair` has it: (name, who looks, at what) → weights (B, layers, heads, T, S)."""

    def pair(self, lines: Sequence[str], outputs: Sequence[str]) -> Arrays:
        """Lines and what was predicted for them, as one batch."""

    def tokens(self, arrays: Arrays) -> list[dict[str, list[str]]]:
        """Of each row of such a batch, the tokens of those that `attention` names: who looks, and at what."""

    def made_up(self, rows: int, length: int, seed: int | None) -> Arrays:
        """A batch without data: to describe a step, and to verify it with. Its examples are of random lengths up to
        `length`; of that length without a seed."""

    def exactness(self, params: Params, batch: Mapping[str, jax.Array]) -> Mapping[str, float]:
        """What must be equal by this objective's nature, as {"cached = uncached decoding": relative difference}."""

    def show(self, arrays: Arrays, filled: np.ndarray) -> list[str]:
        """What a person should see of a batch for training. `filled` (rows,): which rows hold an example. Raises
        ValueError for a batch that cannot be meant, as one whose labels can be read off the inputs."""

    def examples(self, split: str) -> tuple[Sequence[str], Sequence[str]]:
        """The lines that `read` takes and their references."""

    def read(self, lines: Sequence[str], rows: int) -> Batches:
        """Lines to predict from, in batches of `rows`."""

    def write(self, arrays: Arrays, batch: Arrays) -> list[str]:
        """Predictions of a batch as lines, one a row."""

    def write_scored(self, arrays: Arrays, batch: Arrays) -> list[str]:
        """The same as JSON objects with a score."""

    def score(
        self, sums: Mapping[str, float], lines: Sequence[str], references: Sequence[str]
    ) -> dict[str, float | str]:
        """Metric values from summed `measure`s, predicted lines and references."""

    def flops(self, batch: Arrays) -> float:
        """Of the matrix products that a training step on this batch needs, padding left out."""

    def identity(self, training: bool) -> dict[str, str]:
        """Hashes of what parameters belong to (tokenizers; for training, data): others are refused."""
