"""Load a trained run for prediction and evaluation."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import config as configs
from transformer_jax import workdir as workdirs
from transformer_jax.errors import UserError
from transformer_jax.rounding import summed_axes, to_int8
from transformer_jax.training import processes
from transformer_jax.training.checkpoint import Checkpoints, parameters_sha256
from transformer_jax.training.evaluation import (
    AttentionMap,
    Evaluator,
    restore_parameters,
)
from transformer_jax.training.sharding import make_mesh
from transformer_jax.training.task import (
    Columns,
    Embedding,
    Growing,
    Params,
    Predicting,
    Record,
    Scoring,
    Task,
)


class Predictor:
    """A trained model, loaded from a workdir.

    Research code may use its `params`, `step` and `task`.
    """

    @classmethod
    def load(
        cls,
        workdir: epath.PathLike,
        overrides: Mapping[str, Any],
        task: str | type[Task] | None = None,
    ) -> "Predictor":
        """See `transformer_jax.load`."""
        config = workdirs.read(epath.Path(workdir).expanduser(), task=task)
        configs.override(
            config, [f"--config.{key}={value}" for key, value in overrides.items()]
        )
        return cls(workdir, config)

    def __init__(self, workdir: epath.PathLike, config: ConfigDict):
        """`config` is the run's config, possibly with changed values, e.g. in
        `evaluation` or `decoding`.

        Raises CheckpointError if there is no valid checkpoint, and ConfigError for
        values that are invalid or define a different model.
        """
        workdir = epath.Path(workdir).expanduser()
        workdirs.check_model(workdir, config)
        self.config = configs.parse(config)
        self.task = configs.make_task(self.config, workdir)
        mesh = make_mesh(self.config.mesh)
        checkpoints = Checkpoints(
            epath.Path(workdir) / "checkpoints",
            self.config.checkpoint,
            self.task.metrics,
        )
        restored = restore_parameters(
            self.task, checkpoints, self.config.evaluation, mesh
        )
        self.step: int = restored[0]
        self.params: Params = restored[1]
        if self.config.evaluation.weights == "int8":
            self.params = to_int8(self.params, summed_axes(self.task.init))
        self._evaluator = Evaluator(self.task, mesh)
        self._embedders: dict[str, Evaluator] = {}

    def predict(self, records: Sequence[Record], scored: bool = False) -> list[Record]:
        """Return a prediction for every record, in order: a string if the task predicts
        text, otherwise a JSON object.

        A record is an object with the fields `config.columns`, not all of which are
        needed. If only one is needed, a string may take its place.
        With `scored`, predicted text is returned in an object together with its score;
        a language model, also a masked one, scores the text of the records instead of
        predicting. Raises
        ValueError for other records, and for a single record that is not in a list.
        """
        evaluator = self._scorer if scored else self._evaluator
        records = checked(records, self.config.columns)
        predictions = evaluator.predict(self.params, records)
        if scored:
            return list(predictions)
        return [prediction.get("text", prediction) for prediction in predictions]

    def embed(self, records: Sequence[Record], pooling: str = "mean") -> np.ndarray:
        """Return a vector for every record, in order: (N, D), in float32.

        `pooling` is "mean", the mean of the encoder's outputs at all tokens with [CLS]
        and [SEP], or "cls", its output at [CLS]. The vectors are not normalised.
        Raises ValueError for other records, and if the run cannot embed texts so.
        """
        if pooling not in self._embedders:
            embedder = embedder_of(self.task, pooling)
            self._embedders[pooling] = Evaluator(embedder, self._evaluator.mesh)
        records = checked(records, self.config.columns)
        found = self._embedders[pooling].predict(self.params, records)
        vectors = [prediction["embedding"] for prediction in found]
        return np.array(vectors, np.float32).reshape(-1, self.config.model.d_model)

    @property
    def scores_texts(self) -> bool:
        """True if `predict` with `scored` returns the log-likelihood of given texts."""
        return isinstance(self.task, Scoring)

    @property
    def streamed(self) -> str:
        """The field of a prediction whose text `stream` yields, or "" if it cannot."""
        return self.task.growing if isinstance(self.task, Growing) else ""

    def stream(self, record: Record, number: int = 0) -> Iterator[str]:
        """Yield the text that is predicted for a record in pieces, while it is written.

        Together they are the text that `predict` returns for a record at place
        `number`, from 0, of its list. Raises ValueError if the predictions are not
        texts that grow.
        """
        if not self.streamed:
            raise UserError(
                "the predictions of this run are not single texts that grow in pieces: "
                "use predict, or with a language model decoding.n_best = 1"
            )
        (record,) = checked([record], self.config.columns)
        shown = ""
        for prediction in self._evaluator.stream(self.params, record, number):
            text = prediction[self.streamed]
            # otherwise the decoder has changed what it had written
            if text.startswith(shown):
                yield text[len(shown) :]
                shown = text

    def evaluate(self, split: str | None = None) -> dict[str, float | str | int]:
        """Return the task's scores on a split (default: the test split), with `step`
        and `parameters_sha256`.
        """
        split = split or self.config.data.test_split
        batches = self._evaluator.open(split)
        processes.agree(f"data of {split}", batches.sha256)
        scores = self._evaluator.evaluate(self.params, split, greedy=False)
        return {
            "split": split,
            "step": self.step,
            **scores,
            "parameters_sha256": self.parameters_sha256,
        }

    def attention(self, records: Sequence[Record]) -> list[list[AttentionMap]]:
        """Return the attention maps of every record, in order.

        A model that generates text is given its own output, or the reference if the
        record has all of `config.columns`.
        """
        records = checked(records, self.config.columns)
        return self._evaluator.attention(self.params, records) if records else []

    @functools.cached_property
    def _scorer(self) -> Evaluator:
        if not isinstance(self.task, Scoring):
            return self._evaluator
        return Evaluator(self.task.scorer(), self._evaluator.mesh)

    @functools.cached_property
    def parameters_sha256(self) -> str:
        """The hash of the parameters, in hexadecimal digits."""
        return parameters_sha256(self.params)


def embedder_of(task: Task, pooling: str) -> Predicting:
    """Return what embeds texts with the parameters of a task.

    Raises:
        UserError: the task does not embed texts, or not with this pooling.
    """
    if not isinstance(task, Embedding):
        raise UserError(
            f"a run of the task {task.config.task} does not embed texts: use a run of "
            "bert_pretraining or electra_pretraining"
        )
    return task.embedder(pooling)


def checked(records: Iterable[Record], columns: Columns) -> list[Record]:
    """Return records as a list.

    Raises:
        UserError: they are no list of records with the fields of `columns`.
    """
    if isinstance(records, str | bytes | Mapping):
        raise UserError(
            f"{records!r:.80} is one record, not a list of records: "
            "put it in square brackets"
        )
    if not isinstance(records, Iterable):
        raise UserError(f"{records!r:.80} is not a list of records: give a list")
    records = list(records)
    needed = columns.inputs
    kinds = Mapping if len(needed) > 1 else str | Mapping
    for number, record in enumerate(records, 1):
        if not isinstance(record, kinds):
            text = "a line of text, or " if len(needed) == 1 else ""
            decode = (
                "; decode it, e.g. with .decode()" if isinstance(record, bytes) else ""
            )
            raise UserError(
                f"record {number} is {record!r:.80}, of type {type(record).__name__}: "
                f"it must be {text}an object with the {'field' if text else 'fields'} "
                f"{' and '.join(needed)}{decode}"
            )
    return records
