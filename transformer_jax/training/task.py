"""The interface between an objective and everything that trains, evaluates, predicts with or describes it."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from etils import epath

from transformer_jax.data.batching import Batches
from transformer_jax.fields import free
from transformer_jax.training.checkpoint import CheckpointConfig
from transformer_jax.training.optimizer import OptimizerConfig
from transformer_jax.training.sharding import MeshConfig

Params = Any
Arrays = dict[str, np.ndarray]
Outputs = dict[str, jax.Array]
Record = str | dict[str, Any]  # a line of text, or an object with the fields of the task's data

CHECKPOINTS = ("latest", "best", "average", "ema")


class Mean(NamedTuple):
    """sum / weight over the whole batch, whatever its microbatches and devices.

    sum: of a value over the examples or tokens that have one, float32; differentiated.
    weight: how many there are; never depends on the parameters.
    scale: λ, the factor of this mean in the objective. The mean is logged without it. 0: a metric, not part of it.
    """

    sum: jax.Array
    weight: jax.Array
    scale: float = 1.0


class Work(NamedTuple):
    """The tokens and FLOPs of one training step on a batch, without padding."""

    tokens: int
    flops: float  # of the matrix products, forward and backward


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the training, and intervals of logging and evaluation."""

    steps: int = free(100_000)
    log_every: int = free(100)
    evaluate_every: int = free(1000)
    seed: int = 0
    microbatches: int = 1  # parts of a batch whose gradients are added up, to save memory
    ema_decay: float = 0.0  # of the parameters' moving average, for evaluation.checkpoint = "ema"; 0: there is none

    @property
    def loss_label(self) -> str:
        """The name of the training loss where an evaluation's loss stands beside it."""
        return "loss"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name in ("steps", "log_every", "evaluate_every", "microbatches"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if not 0 <= self.seed < 2**31:
            yield "seed", "must be in [0, 2³¹)"
        if not 0 <= self.ema_decay < 1:
            yield "ema_decay", "must be in [0, 1), e.g. 0.999; 0 keeps no average"


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The parameters to evaluate, and the batch size.

    checkpoint: "latest", "best" (by checkpoint.best_metric), "average" (of the last `average_last`) or "ema" (the
    moving average that training.ema_decay keeps, in the latest). During training, "ema" scores the moving average and
    the others score the parameters themselves.
    """

    checkpoint: str = "latest"
    average_last: int = 10
    batch_size: int = 64  # examples

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.checkpoint not in CHECKPOINTS:
            yield "checkpoint", f"must be one of {', '.join(CHECKPOINTS)}"
        for name in ("average_last", "batch_size"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"


@dataclasses.dataclass(frozen=True)
class Config:
    """The checked sections of a config. A task's own class narrows the types of some and adds others.

    Every `model` has the fields architecture, d_model and dtype; every `data` is a `data.text.TextData`.
    """

    task: str
    model: Any
    data: Any
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = dataclasses.field(metadata={"free": True})
    checkpoint: CheckpointConfig = dataclasses.field(metadata={"free": True})
    mesh: MeshConfig = dataclasses.field(metadata={"free": True})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that do not go together."""
        rows, parts = self.data.rows_multiple, self.training.microbatches
        if rows % parts:
            yield "training.microbatches", f"must divide data.rows_multiple = {rows}: set that to a multiple of {parts}"
        every, checked = self.checkpoint.every, self.training.evaluate_every
        if self.checkpoint.keep_best and every % checked:
            yield (
                "checkpoint.every",
                f"must be a multiple of training.evaluate_every = {checked} to keep the best: change either, or set "
                "checkpoint.keep_best to 0",
            )
        kept = self.checkpoint.keep_latest
        if self.evaluation.checkpoint == "average" and self.evaluation.average_last > kept:
            yield (
                "evaluation.average_last",
                f"must not be beyond checkpoint.keep_latest = {kept}, since older ones are removed: set it to {kept}, "
                "or train with more kept",
            )
        if self.evaluation.checkpoint == "ema" and not self.training.ema_decay:
            yield (
                "evaluation.checkpoint",
                "training.ema_decay = 0.0 keeps no moving average: train with 0.999, for example, or set this to "
                "'latest', 'best' or 'average'",
            )

    def advice(self) -> Iterator[str]:
        """Yield what is allowed but unwise."""
        end, steps = self.optimizer.decay_steps, self.training.steps
        if self.optimizer.schedule == "cosine" and 0 < end < steps:
            yield (
                f"config.optimizer.decay_steps = {end}: the learning rate stays at {self.optimizer.end_fraction:g} of "
                f"its peak from there to training.steps = {steps}; 0 makes it fall over all steps"
            )


class Task(ABC):
    """One objective: model, batches, loss, metrics and predictions.

    The functions on the device are pure; the engine compiles them and lays them out on the mesh. Everything generic
    (training, evaluation, prediction, verification, description, benchmark, report) calls these methods only.
    """

    Config: ClassVar[type[Config]]
    # The numbers that `score` returns, for checkpoint.best_metric, and what training's log calls them where predictions
    # are cheap, e.g. {"bleu": "bleu (greedy)"}.
    metrics: ClassVar[Mapping[str, str]]
    columns: tuple[str, ...] = ("text",)  # the fields of a record, in order; a line of text is the first

    def __init__(self, config: Any, workdir: epath.PathLike):
        """`config` is an instance of `Config`; tokenizers lie in `workdir`."""
        self.config = config

    # On the device.

    @abstractmethod
    def init(self, key: jax.Array) -> Params:
        """Return new parameters whose leaves carry their logical axis names (flax's boxes)."""

    @abstractmethod
    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> dict[str, Mean]:
        """Return the terms of the objective, Σ scale · sum / weight, and metrics. `step` counts the updates before.

        The training log weighs the steps' losses by the first term's weight.
        """

    @abstractmethod
    def evaluate(self, params: Params, batch: Mapping[str, jax.Array], greedy: bool) -> tuple[dict[str, Mean], Outputs]:
        """Return means over a batch, without dropout, and outputs for `decode`, rows first.

        There are no means where a batch has no references. `greedy` asks for the cheap predictions of evaluations
        during training.
        """

    # On the host.

    @abstractmethod
    def batches(self, split: str, seed: int | None) -> Batches:
        """Return the batches of a split. With a seed: shuffled, for training. Without: every example exactly once."""

    @abstractmethod
    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of records to predict from, with references if every record has all of `columns`."""

    @abstractmethod
    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return the prediction for each row as a JSON object. Text is in its field "text"."""

    @abstractmethod
    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        """Return metrics from the evaluation's means (none, if only predictions are scored) and what `decode` gave."""

    @abstractmethod
    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        """Return a batch for training without data. Every example has `length` tokens, or, with a seed, up to it."""

    @abstractmethod
    def fingerprint(self, training: bool) -> dict[str, str]:
        """Return hashes of what parameters belong to: tokenizers and, for training, the data. Learns the tokenizers
        that the workdir lacks."""

    # Optional.

    def work(self, batch: Arrays) -> Work:
        """Return the tokens and FLOPs of a training step on this batch."""
        return Work(0, 0.0)

    def preview(self, arrays: Arrays) -> list[str]:
        """Return what a person should see of the first batch. Raises ValueError for a batch that must be wrong."""
        return []

    def checks(self, params: Params, batch: Mapping[str, jax.Array]) -> Mapping[str, float]:
        """Return relative differences of what must be equal, e.g. {"cached = uncached decoding": 1e-7}."""
        return {}

    def attention(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[dict[tuple[str, str, str], jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:
        """Return {(name, queries, keys): weights (B, L, N, T, S)} and {queries or keys: (ids (B, T), lengths (B,))}."""
        return {}, {}

    def tokens(self, name: str, ids: np.ndarray) -> tuple[list[str], str]:
        """Return the tokens of ids that `attention` gave under this name, for a person to read, and their text."""
        raise NotImplementedError(f"{type(self).__name__} names no tokens")
