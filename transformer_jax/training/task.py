"""The interface of a task, used for training, evaluation, prediction and
description.

A batch is a dictionary of arrays with rows as the first axis. For each stream NAME of
its data, it holds the padded positions NAME (B, …, T), which may be vectors, and their
number NAME_length (B, …). "index" (B,) is the number of each example, or -1 in rows
that only fill the batch.
"""

import dataclasses
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from transformer_jax.data.batching import Batches
from transformer_jax.errors import UserError
from transformer_jax.fields import free
from transformer_jax.training import flops
from transformer_jax.training.checkpoint import CheckpointConfig
from transformer_jax.training.freezing import Parts
from transformer_jax.training.lora import LoraConfig
from transformer_jax.training.metric import Metric
from transformer_jax.training.optimizer import DECAYING, OptimizerConfig
from transformer_jax.training.sharding import MeshConfig

Params = Any
Arrays = dict[str, np.ndarray]  # of the host
DeviceArrays = Mapping[str, jax.Array]
Outputs = dict[str, Any]  # arrays of the device, or of the host
Step = jax.Array | int
Scores = dict[str, float | str]
Predictions = Sequence[dict[str, Any]]
# an entry of the only column that is needed, or an object with the fields of the data
Record = str | dict[str, Any]
# a row → a readable label for each position, and the row as text, see `Stream.shown`
Shown = Callable[[np.ndarray], tuple[list[str], str]]

NOTHING: Parts = types.MappingProxyType({})
CHECKPOINTS = ("latest", "best", "average", "ema")
WEIGHTS = ("float32", "int8")
# from the outputs at all tokens to one vector
POOLINGS = ("mean", "cls")


class Mean(NamedTuple):
    """The mean sum / weight over the whole batch, independent of microbatches and
    devices.

    sum: sum of a value over the examples or positions that have one; float32,
        differentiated.
    weight: the number of these examples or positions; must not depend on the
        parameters.
    scale: λ, the factor of this mean in the objective; 0 for a metric that is not part
        of the objective. The mean is logged without this factor.
    """

    sum: jax.Array
    weight: jax.Array
    scale: float = 1.0


Means = dict[str, Mean]


class Columns(NamedTuple):
    """The fields of a record.

    names: their names; a record that is no object stands for the first one.
    needed: the number of fields, from the first, that a prediction needs. The others
        are references.
    """

    names: tuple[str, ...] = ("text",)
    needed: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """The fields that a prediction needs."""
        return self.names[: self.needed]


class Inherited(NamedTuple):
    """The parameters that a run takes from the run `config.init_from`: by default, all
    that have the same path there.

    parts: the only parameters to take; all if there are none.
    module: a module that the other run may have trained alone, e.g. "gpt". Its "path"
        there is then "gpt/path" here.
    rows: for each table of this module that gains rows, its path and the range of the
        new rows.
    outputs: for each module whose outputs have meanings, e.g. "head", the meaning of
        each output. Outputs are taken by these names.
    """

    parts: Parts = NOTHING
    module: str = ""
    rows: Mapping[str, range] = types.MappingProxyType({})
    outputs: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})


class Work(NamedTuple):
    """The positions and FLOPs of one training step on a batch, without padding."""

    tokens: int  # positions, e.g. tokens or frames
    flops: float  # matrix products only, forward and backward


class Piece(NamedTuple):
    """Outputs of a `Growing` task that may not be complete.

    outputs: arrays for `Growing.unfinished` and `Task.decode`. One of them is
        "finished" (B, …), True where nothing will be added.
    state: what `Growing.grow` continues from; it stays on the device. A pytree with
        rows as the first axis of every leaf.
    """

    outputs: Outputs
    state: Any


class Picture(NamedTuple):
    """A rectangle on which the positions of an axis lie, in reading order.

    rows: of positions; 1 for e.g. times.
    columns: positions in a row.
    pixels: what the positions are parts of, e.g. a photograph or a spectrogram: RGB
        bytes (height, width, 3). None: there is no picture.
    """

    rows: int
    columns: int
    pixels: np.ndarray | None = None


def no_picture(row: np.ndarray) -> Picture | None:
    """Return None: the positions of the row are shown by their labels alone."""
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Axis:
    """The positions that an axis of attention weights stands for.

    ids: (B, T), or vectors (B, T, C).
    lengths: (B,).
    shown: a function of the host from a row to readable labels and the text.
    picture: a function of the host from a row to its picture.
    """

    ids: jax.Array
    lengths: jax.Array
    shown: Shown = dataclasses.field(metadata={"static": True})
    picture: Callable[[np.ndarray], Picture | None] = dataclasses.field(
        default=no_picture, metadata={"static": True}
    )


# (name, queries, keys) → weights (B, L, N, T, S), and the axes of queries and keys
Attention = tuple[dict[tuple[str, str, str], jax.Array], dict[str, Axis]]


class Forward(NamedTuple):
    """The result of one pass of a model over a batch, without dropout.

    logits: (B, T, V) for each position, or (B, V) for each row.
    outcomes: the most probable of the V outcomes at each position, or one for each row.
    inputs: for each sequence that the model reads, the end of the name (see `naming`)
        of its vectors before the first layer → what they stand for. The name may go on
        with "_embedding" or "/embed". The last ones are at the positions of the logits.
    """

    logits: jax.Array
    outcomes: Axis
    inputs: dict[str, Axis]


class Network(Protocol):
    """A model, and how it is called: what `Task.init`, `Task.attention` and
    `Inspected.forward` return by default.
    """

    def init(self, key: jax.Array) -> Params: ...

    def attention(self, params: Params, batch: DeviceArrays) -> Attention: ...

    def forward(self, params: Params, batch: DeviceArrays) -> Forward: ...


class GivenTable(Protocol):
    """A table of the parameters, e.g. an embedding, of which a new run reads rows from
    a file.
    """

    @property
    def stream(self) -> str:
        """The name of the stream whose tokens the rows stand for."""

    @property
    def path(self) -> str:
        """The path of the table in the parameters."""

    @property
    def frozen(self) -> Parts:
        """The rows that training leaves as they are."""

    def problems(self, config: Any) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy), given the whole config."""

    def advice(self) -> Iterator[str]:
        """Yield warnings about values that are valid but probably unintended."""

    def check(self) -> None:
        """Raise ValueError if the beginning of the file shows that it is unusable."""

    def rows(self, tokens: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first rows (n, D), and (n,), True for those to use."""


class Stream(Protocol):
    """The members of `data.streams.Stream` that the defaults of `Task` use."""

    @property
    def column(self) -> str: ...

    @property
    def limit(self) -> int | None: ...

    def shown(self, row: np.ndarray) -> tuple[list[str], str]: ...

    def dummy(
        self, draw: np.random.Generator, lengths: np.ndarray, width: int
    ) -> np.ndarray: ...


class Corpus(Protocol):
    """The members of `data.corpus.Corpus` that the defaults of `Task` use."""

    @property
    def streams(self) -> Mapping[str, Stream]: ...

    def fingerprint(self, training: bool) -> dict[str, str]: ...


def streams(batch: Mapping[str, Any]) -> list[str]:
    """Return the names of the streams of a batch."""
    return [name for name in batch if f"{name}_length" in batch]


def check_rows(arrays: Arrays) -> None:
    """Raise ValueError if a row of a batch that holds an example is empty."""
    rows = np.flatnonzero(arrays["index"] >= 0)
    for name in streams(arrays):
        for row in rows[(arrays[f"{name}_length"][rows] < 1).nonzero()[0]][:1]:
            raise UserError(
                f"row {row} of the first batch has no position in its {name}: "
                f"{arrays[name][row]}"
            )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Number of training steps, and the intervals of logging and evaluation."""

    steps: int = free(100_000)
    log_every: int = free(100)
    evaluate_every: int = free(1000)
    # measure gradients, updates, attention and units of every layer at these steps, see
    # `watching`; 0: never
    watch_every: int = free(0)
    seed: int = 0
    # split each batch into this many parts and sum their gradients, to save memory
    microbatches: int = 1
    # decay of the parameters' moving average, for evaluation.checkpoint = "ema"; 0: no
    # average
    ema_decay: float = 0.0

    @property
    def loss_label(self) -> str:
        """The name of the training loss where it is shown next to an evaluation
        loss.
        """
        return "loss"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name in ("steps", "log_every", "evaluate_every", "microbatches"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if self.watch_every < 0:
            yield "watch_every", "must not be negative; 0 watches no step"
        if not 0 <= self.seed < 2**31:
            yield "seed", "must be in [0, 2³¹)"
        if not 0 <= self.ema_decay < 1:
            yield "ema_decay", "must be in [0, 1), e.g. 0.999; 0 keeps no average"


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The parameters to evaluate, and the batch size.

    checkpoint: "latest"; "best" by checkpoint.best_metric; "average" of the last
        `average_last` checkpoints; or "ema", the moving average of training.ema_decay,
        or the average that an optimizer keeps, in the latest checkpoint. Evaluations
        during training score this average for "ema", and the parameters themselves for
        the other values.
    weights: "float32"; or "int8", which rounds the weights of linear maps and of output
        layers to 8 bits, and also what they are multiplied by (see
        `models.kernels.int8`). Evaluations during training use float32.
    """

    checkpoint: str = "latest"
    average_last: int = 10
    batch_size: int = 64  # examples
    weights: str = "float32"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.checkpoint not in CHECKPOINTS:
            yield "checkpoint", f"must be one of {', '.join(CHECKPOINTS)}"
        if self.weights not in WEIGHTS:
            yield "weights", f"must be one of {', '.join(WEIGHTS)}"
        for name in ("average_last", "batch_size"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"


@dataclasses.dataclass(frozen=True)
class Config:
    """The validated sections of a config.

    Each task's subclass narrows some of the types and adds sections.

    Every `model` has the fields architecture, d_model and dtype. Every `data` is a
    `data.splits.SplitData`.
    """

    task: str
    # the workdir of another run, whose parameters and tokenizers a new run starts from;
    # "": none
    init_from: str
    model: Any
    data: Any
    optimizer: OptimizerConfig
    training: TrainingConfig
    lora: LoraConfig
    evaluation: EvaluationConfig = dataclasses.field(metadata={"free": True})
    checkpoint: CheckpointConfig = dataclasses.field(metadata={"free": True})
    mesh: MeshConfig = dataclasses.field(metadata={"free": True})

    @property
    def columns(self) -> Columns:
        """The fields of a record."""
        return Columns()

    @property
    def longest(self) -> tuple[str, int]:
        """The most positions of the longest stream: in words, and their number."""
        return f"data.max_length = {self.data.max_length}", self.data.max_length

    @property
    def longest_input(self) -> int:
        """The most positions of an input to predict from."""
        return self.model.max_length

    @property
    def given_tables(self) -> tuple[GivenTable, ...]:
        """The tables of which a new run reads rows from files."""
        return ()

    @property
    def frozen(self) -> Parts:
        """The parameters that training leaves as they are."""
        parts: dict[str, int | None] = {}
        for table in self.given_tables:
            parts |= table.frozen
        return parts

    @property
    def inherited(self) -> Inherited:
        """The parameters that a run takes from the run that it starts from."""
        return Inherited()

    @property
    def whole_parts(self) -> Mapping[str, int]:
        """The parameters that LoRA trains as they are: path of a subtree → the first
        entry of its arrays along their first axis that is trained.

        They are new heads, new rows of tables, and lora.fully_trained.
        """
        starts = dict.fromkeys([*self.inherited.outputs, *self.lora.fully_trained], 0)
        rows = {path: rows.start for path, rows in self.inherited.rows.items()}
        return rows | starts

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for incompatible values."""
        words, longest = self.longest
        if longest > self.data.max_length:
            for field, rule in self.data.no_room(longest, words):
                yield f"data.{field}", rule
        rows = self.data.rows_multiple
        parts = self.training.microbatches
        if rows % parts:
            yield (
                "training.microbatches",
                (
                    f"must divide data.rows_multiple = {rows}: "
                    f"set data.rows_multiple to a multiple of {parts}"
                ),
            )
        every = self.checkpoint.every
        checked = self.training.evaluate_every
        if self.checkpoint.keep_best and every % checked:
            yield (
                "checkpoint.every",
                (
                    "must be a multiple "
                    f"of training.evaluate_every = {checked} to keep the best: "
                    "change one of them, or set checkpoint.keep_best to 0"
                ),
            )
        kept = self.checkpoint.keep_latest
        if (
            self.evaluation.checkpoint == "average"
            and self.evaluation.average_last > kept
        ):
            yield (
                "evaluation.average_last",
                (
                    f"must not exceed checkpoint.keep_latest = {kept}, "
                    "because older checkpoints are removed: "
                    f"set it to {kept}, or train with a larger checkpoint.keep_latest"
                ),
            )
        if self.optimizer.averages and self.training.ema_decay:
            yield (
                "training.ema_decay",
                (
                    f"must be 0 for optimizer.name = {self.optimizer.name!r}, "
                    "which keeps an average of its own"
                ),
            )
        keeps_average = self.training.ema_decay > 0 or self.optimizer.averages
        if self.evaluation.checkpoint == "ema" and not keeps_average:
            yield (
                "evaluation.checkpoint",
                (
                    "training.ema_decay = 0.0 keeps no moving average: train "
                    "with e.g. 0.999, or set this to 'latest', 'best' or 'average'"
                ),
            )
        if self.lora.rank and self.frozen:
            yield (
                "lora.rank",
                (
                    f"must be 0 with other keys that freeze {', '.join(self.frozen)}: "
                    "LoRA keeps all weights of the base; set those keys to 0 or False"
                ),
            )
        for table in self.given_tables:
            yield from table.problems(self)

    def advice(self) -> Iterator[str]:
        """Yield warnings about values that are valid but probably unintended."""
        end = self.optimizer.decay_steps
        steps = self.training.steps
        if self.optimizer.schedule in DECAYING and 0 < end < steps:
            yield (
                f"config.optimizer.decay_steps = {end}: after that step, the learning "
                f"rate stays at {self.optimizer.end_fraction:g} of its peak "
                f"until training.steps = {steps}; set it to 0 to decay over all steps"
            )
        if self.optimizer.averages and self.evaluation.checkpoint != "ema":
            yield (
                f"config.evaluation.checkpoint = {self.evaluation.checkpoint!r}: "
                f"optimizer.name = {self.optimizer.name!r} is meant to be evaluated "
                "with the average of its parameters; set this to 'ema'"
            )
        if self.lora.rank and not self.init_from:
            yield (
                "config.lora adapts random weights, "
                "as there is no config.init_from to load from"
            )
        for table in self.given_tables:
            yield from table.advice()


class Task(ABC):
    """A task: model, batches, loss, metrics and predictions.

    The methods that run on the device are pure; the engine compiles them and shards
    them over the mesh. All generic code (training, evaluation, prediction,
    verification, description, benchmark, report) uses only these methods.

    A task is a class directly below this one, possibly with `Growing` beside it. Its
    constructor takes `config`, whose type is the class of the task's config, and
    `workdir`, the folder with the tokenizers, or None.

    Attributes:
        config: the config.
        corpus: the columns of the data, and the streams that encode them.
        network: the model, see `Network`. None: the task has `init` and `attention`
            itself.
    """

    # The numbers that `score` returns, which are the choices for
    # checkpoint.best_metric, e.g. {"bleu": Metric("bleu (greedy)", better="higher")}.
    metrics: ClassVar[Mapping[str, Metric]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, metric in getattr(cls, "metrics", {}).items():
            if not isinstance(metric, Metric):
                raise UserError(
                    f"{cls.__qualname__}.metrics[{name!r}] = {metric!r}: must be a "
                    f"Metric, e.g. Metric({name!r}, better='higher')"
                )

    def __init__(self, config: Any, corpus: Corpus, network: Network | None = None):
        """Set the attributes. The constructor of a task calls this one."""
        self.config = config
        self.corpus = corpus
        self.network: Any = network

    # Methods that run on the device.

    @abstractmethod
    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """Return the terms of the objective Σ scale · sum / weight, and metrics.

        `step` is the number of steps before.

        When the training log averages the loss over steps, it weights each step by the
        weight of the first term.
        """

    @abstractmethod
    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs | Piece]:
        """Return the means over a batch, without dropout, and the outputs for `decode`,
        with rows as the first axis.

        Without references in the batch, there are no means. `greedy` requests cheap
        predictions, for evaluations during training. A `Growing` task may return a
        `Piece` instead of outputs.
        """

    # Methods that run on the host.

    @abstractmethod
    def batches(self, split: str, seed: int | None) -> Batches:
        """Return batches of a split: shuffled for training if `seed` is given,
        otherwise each example exactly once.
        """

    @abstractmethod
    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return the batches of records to predict from, with references if every
        record has all of `config.columns`.
        """

    @abstractmethod
    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return the prediction for each row as a JSON object.

        Predicted text is in the field "text".
        """

    @abstractmethod
    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the metrics.

        `means` are those of `evaluate` (empty if only predictions are scored),
        `predictions` the results of `decode`.
        """

    # Methods with defaults, on the device.

    def init(self, key: jax.Array) -> Params:
        """Return new parameters, with leaves boxed with their logical axis names
        (Flax metadata).

        The default asks the network.
        """
        return self.network.init(key)

    def attention(self, params: Params, batch: DeviceArrays) -> Attention:
        """Return the attention weights of a batch.

        The default asks the network. Without one, there are no weights.
        """
        if self.network is None:
            return {}, {}
        return self.network.attention(params, batch)

    # Methods with defaults, on the host.

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        """Return a synthetic batch.

        Examples have `length` positions, or random lengths up to it with a `seed`.
        Without `references`, the batch is one of records to predict from.

        The default has the streams of the corpus, without `references` only those of
        `config.columns.inputs`. No row is longer than the limit of its stream.
        """
        draw = np.random.default_rng(seed or 0)
        arrays: Arrays = {"index": np.arange(rows, dtype=np.int32)}
        for name, stream in self.corpus.streams.items():
            if not references and stream.column not in self.config.columns.inputs:
                continue
            longest = min(length, stream.limit or self.config.data.max_length)
            lengths = np.full(rows, longest)
            if seed is not None:
                lengths = draw.integers(1, longest + 1, rows)
            arrays[name] = stream.dummy(draw, lengths, longest)
            arrays[f"{name}_length"] = lengths.astype(np.int32)
        return arrays

    def preview(self, arrays: Arrays) -> list[str]:
        """Return lines that show the first batch, for the log.

        The default shows the first row of each stream, position by position.

        Raises ValueError if the batch is obviously wrong, e.g. has an empty row.
        """
        check_rows(arrays)
        lines = ["the first example of the first batch:"]
        for name in streams(arrays):
            row = arrays[name][0, : arrays[f"{name}_length"][0]]
            labels, _ = self.corpus.streams[name].shown(row)
            lines.append(f"  {name}: {' '.join(labels)}")
        return lines

    def fingerprint(
        self, training: bool, stored: Collection[str] | None = None
    ) -> dict[str, str]:
        """Return the hashes of the tokenizers and, if `training`, of the data, which
        must match those of a checkpoint.

        Trains the tokenizers that are missing in the workdir. `stored` names the hashes
        that a checkpoint holds. A part that older checkpoints lack is left out if it is
        as it was when they were made.

        The default returns those of the corpus.
        """
        return self.corpus.fingerprint(training)

    def work(self, batch: Arrays) -> Work:
        """Return the positions and FLOPs of a training step on this batch.

        The default counts the positions of all streams, and the matrix products in the
        program of `loss`, of which the share of positions that are not padding counts.
        The backward pass counts twice the FLOPs of the forward pass, also for products
        without a gradient, e.g. logits of words that a decoder feeds back to itself.
        What is computed again to save memory does not count (Chowdhery et al. 2022,
        Appendix B).
        """
        filled = positions = 0
        for name in streams(batch):
            lengths = batch[f"{name}_length"]
            filled += int(lengths.sum())
            positions += math.prod(batch[name].shape[: lengths.ndim + 1])
        forward = flops.of_loss(self.init, self.loss, batch)
        return Work(filled, 3 * (filled / positions) * forward)

    def checks(self, params: Params, batch: DeviceArrays) -> Mapping[str, float]:
        """Return relative differences of results that must be equal, e.g. {"cached =
        uncached decoding": 1e-7}.

        By default, there are none.
        """
        return {}


class Predicting(Protocol):
    """The methods of a task that predictions need, see `Task`."""

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs | Piece]: ...

    def batches_of(self, records: Sequence[Record]) -> Batches: ...

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]: ...

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays: ...


class Growing(ABC):
    """Further members of a task whose predictions grow piece by piece, e.g. generated
    text.

    Attributes:
        piece: the number of steps of `grow` after which the host looks at the outputs.
        growing: the field of a prediction whose text grows, or "" if there is none.
    """

    piece: int
    growing: str

    @abstractmethod
    def grow(
        self,
        params: Params,
        batch: DeviceArrays,
        state: Any,
        going_on: jax.Array,
        steps: int,
        greedy: bool,
    ) -> Piece:
        """Return the piece after up to `steps` more steps, where `going_on` is True.

        `going_on` has the shape of the output "finished". Runs on the device.
        """

    @abstractmethod
    def unfinished(self, outputs: Arrays, batch: Arrays) -> np.ndarray:
        """Return where outputs are to grow further, in the shape of "finished"."""


class Scoring(ABC):
    """A further member of a task whose model says how probable given texts are."""

    @abstractmethod
    def scorer(self) -> Predicting:
        """Return what scores given texts, with the same parameters.

        Its predictions have the fields of `data.scoring.score`.
        """


class Embedding(ABC):
    """A further member of a task whose model has an encoder that embeds texts."""

    @abstractmethod
    def embedder(self, pooling: str) -> Predicting:
        """Return what predicts {"embedding": vector} for texts, with the same
        parameters.

        Raises ValueError if `pooling` is none of POOLINGS, or none for this model.
        """


class Inspected:
    """Further members of a task whose model can be looked into, see `inside`."""

    network: Any

    def completed(self, params: Params, batch: DeviceArrays) -> DeviceArrays:
        """Return the batch with what `forward` reads and records may lack, e.g. the
        model's own output as the target. Runs on the device.

        By default, nothing is lacking.
        """
        return batch

    def forward(self, params: Params, batch: DeviceArrays) -> Forward:
        """Return the result of one pass over a batch. Runs on the device.

        The default asks the network.
        """
        return self.network.forward(params, batch)
