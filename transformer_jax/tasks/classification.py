"""Classification of texts with an encoder, trained by cross-entropy and scored by accuracy."""

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
from transformer_jax.data.examples import Labels, columns_of
from transformer_jax.data.text import Corpus, Stream, TextData, bucket_batches, ladder_batches
from transformer_jax.models.bert import BertConfig, Classifier
from transformer_jax.tasks.text import TextTask, TextTaskConfig
from transformer_jax.training.task import Arrays, Mean, Outputs, Params, Record


@dataclasses.dataclass(frozen=True)
class ClassificationData(TextData):
    """Data from a table {split}.tsv with a header and one text and label per row."""

    text_column: str = "sentence"
    label_column: str = "label"
    labels: tuple[str, ...] = fields.outputs(("0", "1"))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2:
            yield "labels", "must be two or more different labels, e.g. ('negative', 'positive')"


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(TextTaskConfig):
    """The config sections of classification."""

    model: BertConfig
    data: ClassificationData


class Classification(TextTask):
    """Assignment of one of several labels to a text.

    A batch holds "text" (B, T), "text_length", "label" and "index" (B,). In prediction, the label is optional. A text
    starts with [CLS] and ends with [SEP], or with the tokenizer's equivalents.
    """

    Config = ClassificationConfig
    metrics: ClassVar = {"loss": "loss", "accuracy": "accuracy"}

    def __init__(self, config: ClassificationConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir)
        data, self.labels = config.data, Labels(config.data.labels)
        self.model = Classifier(config.model, len(data.labels))
        self.columns = data.text_column, data.label_column
        streams = {"text": Stream(data.text_column, "tokenizer.json", config.model.vocab_size, "model.vocab_size")}
        self.corpus = Corpus(data, streams, workdir, sources.tsv_file, (data.label_column,))

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))["params"]

    def _logits(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> Any:
        rngs = None if key is None else {"dropout": key}
        return self.model.apply({"params": params}, batch["text"], self.valid(batch, "text"), rngs=rngs)

    def _means(self, logits: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, Mean]:
        real, label = batch["text_length"] > 0, batch["label"]
        count = real.sum().astype(jnp.float32)
        loss, _ = losses.cross_entropy(logits[:, None], label[:, None], real[:, None], vocab_size=logits.shape[-1])
        right = (logits.argmax(axis=-1) == label) & real
        return {"cross_entropy": Mean(loss, count), "accuracy": Mean(right.sum().astype(jnp.float32), count, scale=0)}

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> dict[str, Mean]:
        return self._means(self._logits(params, batch, key), batch)

    def evaluate(self, params: Params, batch: Mapping[str, jax.Array], greedy: bool) -> tuple[dict[str, Mean], Outputs]:
        """Return the means if there are labels, and the probabilities (B, classes)."""
        logits = self._logits(params, batch)
        return self._means(logits, batch) if "label" in batch else {}, {"probabilities": jax.nn.softmax(logits)}

    def batches(self, split: str, seed: int | None) -> Batches:
        table = self.corpus.open(split)
        text, labels = (table.column(name) for name in self.columns)
        if seed is None:
            return self._in_order(text, labels, split)
        return bucket_batches(
            self.corpus,
            {"text": text},
            split=split,
            seed=seed,
            begin=True,
            others={"label": self.labels.encode(labels, split)},
        )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        text, labels = columns_of(records, self.columns)
        return self._in_order(text or [], labels, "input")

    def _in_order(self, text: Sequence[str], labels: Sequence[str] | None, what: str) -> Batches:
        config, others = self.config, {} if labels is None else {"label": self.labels.encode(labels, what)}
        rows, limit = config.evaluation.batch_size, config.model.max_length
        batches = ladder_batches(
            self.corpus, {"text": text}, rows=rows, limit=limit, what=what, begin=True, others=others
        )
        return batches._replace(references=labels or ())

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"label": the most probable label, "probabilities": {label: probability}} for each row."""
        rows = [dict(zip(self.labels.names, map(float, row), strict=True)) for row in outputs["probabilities"]]
        return [{"label": max(row, key=lambda name: row[name]), "probabilities": row} for row in rows]

    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        loss: dict[str, float | str] = {"loss": means["cross_entropy"]} if means else {}
        return loss | {"accuracy": metrics.exact_match([found["label"] for found in predictions], references)}

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, config = np.random.default_rng(seed or 0), self.config
        lengths = np.full(rows, length) if seed is None else draw.integers(1, length + 1, rows)
        return {
            "text": draw.integers(0, config.model.vocab_size, (rows, length), np.int32),
            "text_length": lengths.astype(np.int32),
            "label": draw.integers(0, len(config.data.labels), rows, np.int32),
            "index": np.arange(rows, dtype=np.int32),
        }

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        return ["the first text of the first batch:", f"  {self.labels.names[arrays['label'][0]]}: {' '.join(tokens)}"]
