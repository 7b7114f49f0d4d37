"""Fine-tuning for a number that belongs to a text or a pair of texts, e.g. how similar
two sentences are.

Devlin et al. 2019, Section 4.1; Radford et al. 2018, Section 3.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import metrics
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import encode_numbers
from transformer_jax.tasks import labelled_texts, text
from transformer_jax.tasks.fine_tuning import FineTuningTaskConfig, classifier
from transformer_jax.tasks.labelled_texts import (
    LabelledData,
    LabelledTexts,
    PairConfig,
)
from transformer_jax.training.metric import LOSS, Metric
from transformer_jax.training.task import (
    Arrays,
    Columns,
    DeviceArrays,
    Inherited,
    Inspected,
    Mean,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
    Work,
)


@dataclasses.dataclass(frozen=True)
class RegressionConfig(FineTuningTaskConfig):
    """The config sections of regression."""

    data: LabelledData
    fine_tuning: PairConfig

    @property
    def columns(self) -> Columns:
        return self.data.columns

    @property
    def inherited(self) -> Inherited:
        return self.backbone.inherited(("value",))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        yield from labelled_texts.pair_problems(self)


class Regression(Task, Inspected):
    """Prediction of a number, trained by the squared error.

    See `LabelledTexts` for its batches.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "pearson": Metric("pearson", better="higher"),
        "spearman": Metric("spearman", better="higher"),
    }

    def __init__(self, config: RegressionConfig, workdir: epath.PathLike | None):
        backbone = config.backbone
        corpus = labelled_texts.make_corpus(config, workdir)
        super().__init__(config, corpus, classifier(backbone, corpus, 1))
        self.backbone = backbone
        self.reader = LabelledTexts(config, corpus, backbone.frame, encode_numbers)

    def _means(self, output: jax.Array, batch: DeviceArrays) -> Means:
        """Return the mean squared error, given the model's output (B, 1)."""
        real = batch["text_length"] > 0
        errors = jnp.where(real, jnp.square(output[:, 0] - batch["label"]), 0.0)
        return {"squared_error": Mean(errors.sum(), real.sum().astype(jnp.float32))}

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """Return the squared error, and L1 of Radford et al. 2018 if it is part of the
        objective.
        """
        output, others = self.backbone.training_output(self.network, params, batch, key)
        return self._means(output, batch) | others

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the mean if there are labels, and the predicted numbers (B,)."""
        output = self.network.output(params, batch)
        means = self._means(output, batch) if "label" in batch else {}
        return means, {"values": output[:, 0]}

    def batches(self, split: str, seed: int | None) -> Batches:
        return self.reader.batches(split, seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        return self.reader.batches_of(records)

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"value": the predicted number} for each row."""
        return [{"value": float(value)} for value in outputs["values"]]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss, and the correlations of Pearson and Spearman."""
        predicted = [prediction["value"] for prediction in predictions]
        right = list(map(float, references))
        loss: Scores = {"loss": means["squared_error"]} if means else {}
        return loss | {
            "pearson": metrics.pearson(predicted, right),
            "spearman": metrics.spearman(predicted, right),
        }

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        def label(random: np.random.Generator) -> np.ndarray:
            return random.uniform(0, 5, rows).astype(np.float32)

        return self.reader.dummy_batch(
            rows, length, seed, label if references else None
        )

    def work(self, batch: Arrays) -> Work:
        return self.backbone.work(super().work(batch))

    def preview(self, arrays: Arrays) -> list[str]:
        label = f"{arrays['label'][0]:g}"
        return text.preview(arrays, self.network.shown, label=label)
