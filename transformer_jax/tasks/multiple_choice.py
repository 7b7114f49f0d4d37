"""Fine-tuning for the choice of one of several continuations of a text.

Devlin et al. 2019, Section 4.4; Radford et al. 2018, Section 3.3.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from etils import epath

from transformer_jax import fields, metrics
from transformer_jax.data import tables
from transformer_jax.data.batching import (
    Batch,
    Batches,
    label_entropy,
    padded_arrays,
)
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import example_plan
from transformer_jax.data.examples import Labels, columns_of, laid_out, records_of
from transformer_jax.data.text import TextData
from transformer_jax.tasks import text
from transformer_jax.tasks.classification import label_means, probabilities
from transformer_jax.tasks.fine_tuning import (
    AuxiliaryConfig,
    FineTuningTaskConfig,
    classifier,
)
from transformer_jax.training.metric import ACCURACY, LOSS
from transformer_jax.training.task import (
    Arrays,
    Attention,
    Axis,
    Columns,
    DeviceArrays,
    Inherited,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
    check_rows,
)


@dataclasses.dataclass(frozen=True)
class MultipleChoiceData(TextData):
    """Data from a table {split}.tsv with a header, and a text, several choices and the
    number of the right one per row.

    The number, from 0, is the place among `choice_columns`. All choices of a row have
    the same padded length, and `batch_tokens` counts one choice of each row.
    """

    text_column: str = "sent1"
    # text before each choice, e.g. SWAG's sent2; "": there is none
    second_column: str = ""
    choice_columns: tuple[str, ...] = fields.outputs(
        ("ending0", "ending1", "ending2", "ending3")
    )
    label_column: str = "label"

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns with text."""
        return tuple(
            filter(None, (self.text_column, self.second_column, *self.choice_columns))
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if len(self.choice_columns) < 2 or len(set(self.texts)) != len(self.texts):
            yield (
                "choice_columns",
                (
                    "must be two or more different columns, "
                    "none of them text_column or second_column"
                ),
            )
        if self.max_length < 5:
            yield (
                "max_length",
                "must be at least 5: a text, a choice and three special tokens",
            )


@dataclasses.dataclass(frozen=True)
class MultipleChoiceConfig(FineTuningTaskConfig):
    """The config sections of multiple choice."""

    data: MultipleChoiceData
    fine_tuning: AuxiliaryConfig

    @property
    def columns(self) -> Columns:
        texts = self.data.texts
        return Columns((*texts, self.data.label_column), len(texts))

    @property
    def inherited(self) -> Inherited:
        return self.backbone.inherited(("choice",))


def _flat(batch: DeviceArrays) -> dict[str, jax.Array]:
    """Return the batch of the B · C texts of all choices."""
    names = ("text", "text_length", "second")
    return {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in names}


class MultipleChoice(Task):
    """Prediction of the right choice by one score per choice, whose softmax is the
    probability.

    The score is the output for the pair of text and choice, see `data.examples.Frame`.
    For C choices, a batch holds "text" (B, C, T), "text_length" and "second" (B, C),
    the position at which the choice starts, "index" (B,), and "label" (B,), the number
    of the right choice, which is optional in prediction.
    """

    metrics: ClassVar = {"loss": LOSS, "accuracy": ACCURACY}
    corpus: Corpus

    def __init__(self, config: MultipleChoiceConfig, workdir: epath.PathLike | None):
        data = config.data
        first, *others = data.texts
        corpus = text.make_corpus(
            config,
            {"text": first, **{name: name for name in others}},
            workdir,
            tables.tsv_file,
            (data.label_column,),
        )
        backbone = config.backbone
        super().__init__(config, corpus, classifier(backbone, corpus, 1))
        self.backbone = backbone
        numbers = tuple(map(str, range(len(data.choice_columns))))
        self.labels = Labels(numbers, "data.choice_columns")

    def _means(self, scores: jax.Array, batch: DeviceArrays) -> Means:
        """Return the means, given the scores (B, C)."""
        return label_means(scores, batch["label"], batch["text_length"][:, 0] > 0)

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """Return L2 of Radford et al. 2018, and L1 if it is part of the objective."""
        output, others = self.backbone.training_output(
            self.network, params, _flat(batch), key
        )
        scores = output.reshape(batch["text_length"].shape)
        return self._means(scores, batch) | others

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the means if there are labels, and the scores (B, C)."""
        output = self.network.output(params, _flat(batch))
        scores = output.reshape(batch["text_length"].shape)
        means = self._means(scores, batch) if "label" in batch else {}
        return means, {"scores": scores}

    def batches(self, split: str, seed: int | None) -> Batches:
        names = self.config.columns.names
        return self._arranged(*text.split_columns(self.corpus, split, names), seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        columns = columns_of(records, *self.config.columns)
        return self._arranged(columns, "input", None)

    def _arranged(
        self, columns: Sequence[Any], source: str, seed: int | None
    ) -> Batches:
        """Return the batches of texts, choices and labels, None for missing labels."""
        data = self.config.data
        *texts, labels = columns
        count = len(data.choice_columns)
        before = texts[1] if data.second_column else [""] * len(texts[0])
        lines = [
            f"{start} {choice}".strip()
            for start, *choices in zip(before, *texts[-count:], strict=True)
            for choice in choices
        ]
        each = np.repeat(np.arange(len(texts[0])), count)
        rows, second = laid_out(
            self.corpus.encode("text", texts[0], end=False).take(each),
            self.corpus.encode("text", lines, end=False),
            limit=data.max_length,
            frame=self.backbone.frame(self.corpus),
            source=f"{source}, {count} choices per row",
            key="data.max_length",
        )
        others = {}
        if labels is not None:
            others["label"] = self.labels.encode(labels, source)
        plan = example_plan(
            self.corpus,
            rows.lengths.reshape(-1, count).max(axis=1, keepdims=True),
            seed=seed,
            rows=self.config.evaluation.batch_size,
            limit=data.max_length,
        )

        def load(batch: Batch) -> Arrays:
            i = batch.indices[:, None]
            choices = np.where(i >= 0, i * count + np.arange(count), -1).ravel()
            arrays = padded_arrays(
                {"text": rows}, {"second": second}, batch._replace(indices=choices)
            )
            shaped = {
                name: x.reshape(-1, count, *x.shape[1:]) for name, x in arrays.items()
            }
            return shaped | padded_arrays({}, others, batch._replace(shape=()))

        return Batches(
            plan,
            load,
            records=records_of(data.texts, texts),
            references=labels or (),
            baseline=label_entropy(others.get("label")),
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"choice": number of the most probable choice, "probabilities":
        those of all choices} for each row.
        """
        rows = probabilities(outputs["scores"])
        return [
            {"choice": int(row.argmax()), "probabilities": row.tolist()} for row in rows
        ]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss and the accuracy."""
        loss: Scores = {"loss": means["cross_entropy"]} if means else {}
        chosen = [str(prediction["choice"]) for prediction in predictions]
        return loss | {"accuracy": metrics.exact_match(chosen, references)}

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        count = len(self.labels.names)
        dummies = text.Dummies((rows, count), length, seed)
        batch = dummies.text(self.config.model.vocab_size)
        batch["second"] = dummies.positions()
        if references:
            batch["label"] = dummies.random.integers(0, count, rows, np.int32)
        return batch

    def preview(self, arrays: Arrays) -> list[str]:
        check_rows(arrays)
        right = arrays["label"][0]
        lines = ["the choices of the first row of the first batch:"]
        for number, ids in enumerate(arrays["text"][0]):
            tokens, _ = self.network.shown(ids[: arrays["text_length"][0, number]])
            mark = " (right)" if number == right else ""
            lines.append(f"  {number}{mark}: {' '.join(tokens)}")
        return lines

    def attention(self, params: Params, batch: DeviceArrays) -> Attention:
        """Return the maps of each choice."""
        shape = batch["second"].shape
        whole, _ = self.network.attention(params, _flat(batch))
        maps = {}
        tokens = {}
        for i, column in enumerate(self.config.data.choice_columns):
            ids = batch["text"][:, i]
            lengths = batch["text_length"][:, i]
            tokens[column] = Axis(ids, lengths, self.network.shown)
            for (name, *_), weights in whole.items():
                each = weights.reshape(*shape, *weights.shape[1:])[:, i]
                maps[f"{name}, choice {i}", column, column] = each
        return maps, tokens
