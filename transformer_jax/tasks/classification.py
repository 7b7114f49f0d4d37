"""Fine-tuning for the label or the value of a text or of a pair of texts (Devlin et al. 2019, Section 4.1)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import fields, losses, metrics
from transformer_jax.data import sources
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import Labels, encode_numbers, laid_out, records_of
from transformer_jax.data.text import TextData, example_batches
from transformer_jax.models.bert import Classifier
from transformer_jax.tasks.text import FineTuningTask, FineTuningTaskConfig
from transformer_jax.training.task import Arrays, Mean, Outputs, Params


@dataclasses.dataclass(frozen=True)
class LabelledData(TextData):
    """Data from a table {split}.tsv with a header, and a text or a pair of texts and a label per row."""

    text_column: str = "sentence"
    second_column: str = ""  # the second text of a pair; "": there is one text
    label_column: str = "label"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.second_column in (self.text_column, self.label_column):
            yield "second_column", "must be a column of its own, or '' if there is one text"
        if self.text_column == self.label_column:
            yield "label_column", "must differ from data.text_column"
        if self.max_length < (least := 5 if self.second_column else 3):
            yield "max_length", f"must be at least {least}: a token of each text, and the special tokens"


@dataclasses.dataclass(frozen=True)
class ClassificationData(LabelledData):
    """Data with a label per row. If there are two labels, the second is the positive one of F1."""

    labels: tuple[str, ...] = fields.outputs(("0", "1"))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2:
            yield "labels", "must be two or more different labels, e.g. ('negative', 'positive')"


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(FineTuningTaskConfig):
    """The config sections of classification."""

    data: ClassificationData


@dataclasses.dataclass(frozen=True)
class RegressionConfig(FineTuningTaskConfig):
    """The config sections of regression."""

    data: LabelledData


def label_means(logits: jax.Array, label: jax.Array, real: jax.Array) -> dict[str, Mean]:
    """Return cross-entropy and accuracy over the rows for which `real` (B,) is True, given logits (B, classes)."""
    count, right = real.sum().astype(jnp.float32), (logits.argmax(axis=-1) == label) & real
    loss, _ = losses.cross_entropy(logits[:, None], label[:, None], real[:, None], vocab_size=logits.shape[-1])
    return {"cross_entropy": Mean(loss, count), "accuracy": Mean(right.sum().astype(jnp.float32), count, scale=0)}


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class TextOrPair(FineTuningTask):
    """A task with one output per text, [CLS] text [SEP], or per pair of texts, [CLS] first [SEP] second [SEP].

    A batch holds "text" (B, T), "text_length", "label" and "index" (B,), and for pairs "second" (B,), the place at
    which the second text starts. In prediction, the label is optional.
    """

    def __init__(self, config: Any, workdir: epath.PathLike | None, num_outputs: int):
        super().__init__(config, workdir)
        data = config.data
        self.model = Classifier(config.model, num_outputs, config.fine_tuning.feature_layers)
        texts = {"text": data.text_column} | ({"second": data.second_column} if data.second_column else {})
        self.inputs, self.columns = len(texts), (*texts.values(), data.label_column)
        self.corpus = self.make_corpus(texts, workdir, sources.tsv_file, (data.label_column,))

    def numbers(self, labels: Sequence[str], what: str) -> np.ndarray:
        """Return the labels as numbers (n,). `what` is their source, for messages."""
        raise NotImplementedError

    def means(self, logits: jax.Array, label: jax.Array, real: jax.Array) -> dict[str, Mean]:
        """Return the means over the rows for which `real` (B,) is True."""
        raise NotImplementedError

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> dict[str, Mean]:
        return self.means(self.logits(params, batch, key), batch["label"], batch["text_length"] > 0)

    def evaluate(self, params: Params, batch: Mapping[str, jax.Array], greedy: bool) -> tuple[dict[str, Mean], Outputs]:
        """Return the means if there are labels, and the logits (B, outputs)."""
        logits = self.logits(params, batch)
        means = self.means(logits, batch["label"], batch["text_length"] > 0) if "label" in batch else {}
        return means, {"logits": logits}

    def _batches(self, columns: Sequence[Any], what: str, seed: int | None) -> Batches:
        config, special = self.config, self.corpus.special_ids("text")
        (*texts, labels), limit = columns, config.data.max_length
        first, *more = (self.corpus.encode("text", text, end=False) for text in texts)
        second = more[0] if more else None
        rows, place = laid_out(
            first, second, limit=limit, begin=special.begin, end=special.end, what=what, key="data.max_length"
        )
        others = {} if labels is None else {"label": self.numbers(labels, what)}
        others |= {"second": place} if second is not None else {}
        size = config.evaluation.batch_size
        batches = example_batches(self.corpus, {"text": rows}, others, seed=seed, rows=size, limit=limit)
        return batches._replace(records=records_of(self.columns[: self.inputs], texts), references=labels or ())

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, config = np.random.default_rng(seed or 0), self.config
        lengths = np.full(rows, length) if seed is None else draw.integers(1, length + 1, rows)
        arrays = {
            "text": draw.integers(0, config.model.vocab_size, (rows, length), np.int32),
            "text_length": lengths.astype(np.int32),
            "label": self.dummy_labels(draw, rows),
            "index": np.arange(rows, dtype=np.int32),
        }
        return arrays | ({"second": draw.integers(0, lengths + 1).astype(np.int32)} if self.inputs == 2 else {})

    def dummy_labels(self, draw: np.random.Generator, rows: int) -> np.ndarray:
        """Return random labels (rows,)."""
        raise NotImplementedError

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        return ["the first text of the first batch:", f"  {self.shown_label(arrays['label'][0])}: {' '.join(tokens)}"]

    def shown_label(self, number: Any) -> str:
        """Return the label with this number, for the log."""
        return f"{number:g}"


class Classification(TextOrPair):
    """Assignment of one of several labels, trained by cross-entropy."""

    Config = ClassificationConfig
    metrics: ClassVar = {name: name for name in ("loss", "accuracy", "f1", "matthews")}

    def __init__(self, config: ClassificationConfig, workdir: epath.PathLike | None):
        self.labels = Labels(config.data.labels)
        super().__init__(config, workdir, len(self.labels.names))

    def numbers(self, labels: Sequence[str], what: str) -> np.ndarray:
        return self.labels.encode(labels, what)

    def means(self, logits: jax.Array, label: jax.Array, real: jax.Array) -> dict[str, Mean]:
        return label_means(logits, label, real)

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"label": the most probable label, "probabilities": {label: probability}} for each row."""
        rows = [dict(zip(self.labels.names, row, strict=True)) for row in probabilities(outputs["logits"]).tolist()]
        return [{"label": max(row, key=lambda name: row[name]), "probabilities": row} for row in rows]

    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        """Return the loss, accuracy, F1 (of the second of two labels, else the mean over labels) and Matthews' R."""
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
    """Prediction of a number, e.g. the similarity of two sentences, trained by the squared error."""

    Config = RegressionConfig
    metrics: ClassVar = {name: name for name in ("loss", "pearson", "spearman")}

    def __init__(self, config: RegressionConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir, 1)

    def numbers(self, labels: Sequence[str], what: str) -> np.ndarray:
        return encode_numbers(labels, what)

    def means(self, logits: jax.Array, label: jax.Array, real: jax.Array) -> dict[str, Mean]:
        errors = jnp.where(real, jnp.square(logits[:, 0] - label), 0.0)
        return {"squared_error": Mean(errors.sum(), real.sum().astype(jnp.float32))}

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"value": the predicted number} for each row."""
        return [{"value": float(value)} for value in outputs["logits"][:, 0]]

    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        """Return the loss, and the correlations of Pearson and Spearman."""
        found, right = [prediction["value"] for prediction in predictions], list(map(float, references))
        loss: dict[str, float | str] = {"loss": means["squared_error"]} if means else {}
        return loss | {"pearson": metrics.pearson(found, right), "spearman": metrics.spearman(found, right)}

    def dummy_labels(self, draw: np.random.Generator, rows: int) -> np.ndarray:
        return draw.uniform(0, 5, rows).astype(np.float32)
