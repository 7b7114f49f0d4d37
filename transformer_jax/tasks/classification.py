"""Fine-tuning for the label or the value of a text or of a pair of texts.

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
from transformer_jax.data import tables
from transformer_jax.data.batching import Batches, label_entropy
from transformer_jax.data.examples import Labels, encode_numbers, laid_out, records_of
from transformer_jax.data.text import TextData, example_batches
from transformer_jax.tasks.fine_tuning import (
    AuxiliaryConfig,
    LabelTask,
    LabelTaskConfig,
)
from transformer_jax.training.metric import ACCURACY, F1, LOSS, Metric
from transformer_jax.training.task import Arrays, Mean


@dataclasses.dataclass(frozen=True)
class LabelledData(TextData):
    """Data from a table {split}.tsv with a header, and a text or a pair of texts and
    a label per row.
    """

    text_column: str = "sentence"
    second_column: str = ""  # the second text of a pair; "": there is one text
    label_column: str = "label"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.second_column in (self.text_column, self.label_column):
            yield (
                "second_column",
                "must be a column of its own, or '' if there is one text",
            )
        if self.text_column == self.label_column:
            yield "label_column", "must differ from data.text_column"
        if self.max_length < (least := 5 if self.second_column else 3):
            yield (
                "max_length",
                (
                    f"must be at least {least}: "
                    "a token of each text, and the special tokens"
                ),
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
class PairConfig(AuxiliaryConfig):
    """The keys of `AuxiliaryConfig`, and the order of pairs.

    both_orders: the model reads each pair in both orders, and the two vectors are added
        (Radford et al. 2018, Section 3.3), as the order of e.g. paraphrases means
        nothing; for GPT only.
    """

    both_orders: bool = fields.outputs(False)


@dataclasses.dataclass(frozen=True)
class TextOrPairConfig(LabelTaskConfig):
    """The config sections of tasks on texts or pairs."""

    data: LabelledData
    fine_tuning: PairConfig

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        if self.fine_tuning.both_orders and not self.data.second_column:
            yield (
                "fine_tuning.both_orders",
                "needs pairs: set data.second_column, or this to False",
            )


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(TextOrPairConfig):
    """The config sections of classification."""

    data: ClassificationData


def label_means(
    logits: jax.Array, label: jax.Array, real: jax.Array
) -> dict[str, Mean]:
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


class TextOrPair(LabelTask):
    """A task with one output per text or per pair of texts, see
    `data.examples.Frame`.
    """

    def __init__(
        self, config: Any, workdir: epath.PathLike | None, outputs: Sequence[str]
    ):
        super().__init__(
            config, workdir, outputs, views=1 + config.fine_tuning.both_orders
        )
        data = config.data
        texts = {"text": data.text_column} | (
            {"second": data.second_column} if data.second_column else {}
        )
        self.inputs = len(texts)
        self.columns = (*texts.values(), data.label_column)
        self.corpus = self.make_corpus(
            texts, workdir, tables.tsv_file, (data.label_column,)
        )

    def numbers(self, labels: Sequence[str], what: str) -> np.ndarray:
        """Return the labels as numbers (n,). `what` is their source, for messages."""
        raise NotImplementedError

    def _batches(self, columns: Sequence[Any], what: str, seed: int | None) -> Batches:
        config = self.config
        frame = self.backbone.frame(self.corpus)
        *texts, labels = columns
        first, *more = (self.corpus.encode("text", text, end=False) for text in texts)
        second = more[0] if more else None
        limit = config.data.max_length
        key = "data.max_length"
        # the order also means nothing where texts are cut
        if config.fine_tuning.both_orders and limit % 2 == 0:
            limit -= 1
            key = "data.max_length - 1"
        rows, place = laid_out(
            first, second, limit=limit, frame=frame, what=what, key=key
        )
        others = {} if labels is None else {"label": self.numbers(labels, what)}
        others |= {"second": place} if second is not None else {}
        size = config.evaluation.batch_size
        batches = example_batches(
            self.corpus, {"text": rows}, others, seed=seed, rows=size, limit=limit
        )
        return batches._replace(
            records=records_of(self.columns[: self.inputs], texts),
            references=labels or (),
            baseline=label_entropy(others.get("label")),
        )

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, config = np.random.default_rng(seed or 0), self.config
        lengths = (
            np.full(rows, length)
            if seed is None
            else draw.integers(1, length + 1, rows)
        )
        arrays = {
            "text": draw.integers(0, config.model.vocab_size, (rows, length), np.int32),
            "text_length": lengths.astype(np.int32),
            "label": self.dummy_labels(draw, rows),
            "index": np.arange(rows, dtype=np.int32),
        }
        return arrays | (
            {"second": draw.integers(0, lengths + 1).astype(np.int32)}
            if self.inputs == 2
            else {}
        )

    def dummy_labels(self, draw: np.random.Generator, rows: int) -> np.ndarray:
        """Return random labels (rows,)."""
        raise NotImplementedError

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        return [
            "the first text of the first batch:",
            f"  {self.shown_label(arrays['label'][0])}: {' '.join(tokens)}",
        ]

    def shown_label(self, number: Any) -> str:
        """Return the label with this number, for the log."""
        return f"{number:g}"


class Classification(TextOrPair):
    """Assignment of one of several labels, trained by cross-entropy."""

    Config = ClassificationConfig
    metrics: ClassVar = {
        "loss": LOSS,
        "accuracy": ACCURACY,
        "f1": F1,
        "matthews": Metric("matthews", better="higher"),
    }

    def __init__(self, config: ClassificationConfig, workdir: epath.PathLike | None):
        self.labels = Labels(config.data.labels)
        super().__init__(config, workdir, self.labels.names)

    def numbers(self, labels: Sequence[str], what: str) -> np.ndarray:
        return self.labels.encode(labels, what)

    def means(
        self, logits: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, Mean]:
        return label_means(logits, batch["label"], batch["text_length"] > 0)

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
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the loss, accuracy, F1 (of the second of two labels, else the mean
        over labels) and Matthews' R.
        """
        found = [prediction["label"] for prediction in predictions]
        loss: dict[str, float | str] = {"loss": means["cross_entropy"]} if means else {}
        return loss | {
            "accuracy": metrics.exact_match(found, references),
            "f1": metrics.f1(found, references, self.labels.names),
            "matthews": metrics.matthews(found, references),
        }

    def dummy_labels(self, draw: np.random.Generator, rows: int) -> np.ndarray:
        return draw.integers(0, len(self.labels.names), rows, np.int32)

    def shown_label(self, number: Any) -> str:
        return self.labels.names[number]


class Regression(TextOrPair):
    """Prediction of a number, e.g. the similarity of two sentences, trained by the
    squared error.
    """

    Config = TextOrPairConfig
    metrics: ClassVar = {
        "loss": LOSS,
        "pearson": Metric("pearson", better="higher"),
        "spearman": Metric("spearman", better="higher"),
    }

    def __init__(self, config: TextOrPairConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir, ("value",))

    def numbers(self, labels: Sequence[str], what: str) -> np.ndarray:
        return encode_numbers(labels, what)

    def means(
        self, logits: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, Mean]:
        real = batch["text_length"] > 0
        errors = jnp.where(real, jnp.square(logits[:, 0] - batch["label"]), 0.0)
        return {"squared_error": Mean(errors.sum(), real.sum().astype(jnp.float32))}

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"value": the predicted number} for each row."""
        return [{"value": float(value)} for value in outputs["logits"][:, 0]]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the loss, and the correlations of Pearson and Spearman."""
        predicted = [prediction["value"] for prediction in predictions]
        right = list(map(float, references))
        loss: dict[str, float | str] = {"loss": means["squared_error"]} if means else {}
        return loss | {
            "pearson": metrics.pearson(predicted, right),
            "spearman": metrics.spearman(predicted, right),
        }

    def dummy_labels(self, draw: np.random.Generator, rows: int) -> np.ndarray:
        return draw.uniform(0, 5, rows).astype(np.float32)
