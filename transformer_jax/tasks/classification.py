"""Fine-tuning for the label of a text or of a pair of texts.

Devlin et al. 2019, Section 4.1; Radford et al. 2018, Section 3.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import fields, losses, metrics
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import Labels
from transformer_jax.tasks import labelled_texts, text
from transformer_jax.tasks.fine_tuning import FineTuningTaskConfig, classifier
from transformer_jax.tasks.labelled_texts import (
    LabelledData,
    LabelledTexts,
    PairConfig,
)
from transformer_jax.training.metric import ACCURACY, F1, LOSS, Metric
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
class ClassificationData(LabelledData):
    """Data with a label per row.

    If there are two labels, the second is the positive one of F1.
    """

    labels: tuple[str, ...] = fields.outputs(("0", "1"))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2:
            yield (
                "labels",
                "must be two or more different labels, e.g. ('negative', 'positive')",
            )


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(FineTuningTaskConfig):
    """The config sections of classification."""

    data: ClassificationData
    fine_tuning: PairConfig

    @property
    def columns(self) -> Columns:
        return self.data.columns

    @property
    def inherited(self) -> Inherited:
        return self.backbone.inherited(self.data.labels)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        yield from labelled_texts.pair_problems(self)


def label_means(logits: jax.Array, label: jax.Array, real: jax.Array) -> Means:
    """Return cross-entropy and accuracy over the rows for which `real` (B,) is True,
    given logits (B, classes).
    """
    loss, count = losses.cross_entropy(logits, label, real, vocab_size=logits.shape[-1])
    right = ((logits.argmax(axis=-1) == label) & real).sum().astype(jnp.float32)
    return {"cross_entropy": Mean(loss, count), "accuracy": Mean(right, count, scale=0)}


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Classification(Task, Inspected):
    """Assignment of one of several labels, trained by cross-entropy.

    See `LabelledTexts` for its batches.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "accuracy": ACCURACY,
        "f1": F1,
        "matthews": Metric("matthews", better="higher"),
    }

    def __init__(self, config: ClassificationConfig, workdir: epath.PathLike | None):
        backbone = config.backbone
        corpus = labelled_texts.make_corpus(config, workdir)
        labels = Labels(config.data.labels)
        network = classifier(backbone, corpus, len(labels.names))
        network = dataclasses.replace(network, outcomes=text.named(labels.names))
        super().__init__(config, corpus, network)
        self.backbone = backbone
        self.labels = labels
        self.reader = LabelledTexts(config, corpus, backbone.frame, labels.encode)

    def _means(self, logits: jax.Array, batch: DeviceArrays) -> Means:
        return label_means(logits, batch["label"], batch["text_length"] > 0)

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """Return L2 of Radford et al. 2018, and L1 if it is part of the objective."""
        logits, others = self.backbone.training_output(self.network, params, batch, key)
        return self._means(logits, batch) | others

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the means if there are labels, and the logits (B, labels)."""
        logits = self.network.output(params, batch)
        means = self._means(logits, batch) if "label" in batch else {}
        return means, {"logits": logits}

    def batches(self, split: str, seed: int | None) -> Batches:
        return self.reader.batches(split, seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        return self.reader.batches_of(records)

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"label": the most probable label, "probabilities": {label:
        probability}} for each row.
        """
        rows = [
            dict(zip(self.labels.names, row, strict=True))
            for row in probabilities(outputs["logits"]).tolist()
        ]
        return [
            {"label": max(row, key=lambda name: row[name]), "probabilities": row}
            for row in rows
        ]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss, accuracy, F1 (of the second of two labels, else the mean
        over labels) and Matthews' R.
        """
        predicted = [prediction["label"] for prediction in predictions]
        loss: Scores = {"loss": means["cross_entropy"]} if means else {}
        return loss | {
            "accuracy": metrics.exact_match(predicted, references),
            "f1": metrics.f1(predicted, references, self.labels.names),
            "matthews": metrics.matthews(predicted, references),
        }

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        def label(random: np.random.Generator) -> np.ndarray:
            return random.integers(0, len(self.labels.names), rows, np.int32)

        return self.reader.dummy_batch(
            rows, length, seed, label if references else None
        )

    def work(self, batch: Arrays) -> Work:
        return self.backbone.work(super().work(batch))

    def preview(self, arrays: Arrays) -> list[str]:
        label = self.labels.names[arrays["label"][0]]
        return text.preview(arrays, self.network.shown, label=label)
