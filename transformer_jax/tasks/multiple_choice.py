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
from transformer_jax.data.examples import Labels, laid_out, records_of
from transformer_jax.data.text import TextData, example_plan
from transformer_jax.tasks.classification import label_means, probabilities
from transformer_jax.tasks.fine_tuning import LabelTask, LabelTaskConfig
from transformer_jax.training.metric import ACCURACY, LOSS
from transformer_jax.training.task import Arrays, Mean, Params


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
class MultipleChoiceConfig(LabelTaskConfig):
    """The config sections of multiple choice."""

    data: MultipleChoiceData


class MultipleChoice(LabelTask):
    """Prediction of the right choice by one score per choice, whose softmax is the
    probability.

    The score is the output for the pair of text and choice, see `data.examples.Frame`.
    For C choices, a batch holds "text" (B, C, T), "text_length" and "second" (B, C),
    the place at which the choice starts, "index" (B,), and "label" (B,), the number of
    the right choice, which is optional in prediction.
    """

    Config = MultipleChoiceConfig
    metrics: ClassVar = {"loss": LOSS, "accuracy": ACCURACY}

    def __init__(self, config: MultipleChoiceConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir, ("choice",))
        data, names = config.data, config.data.texts
        self.labels = Labels(
            tuple(map(str, range(len(data.choice_columns)))), "data.choice_columns"
        )
        self.inputs, self.columns = len(names), (*names, data.label_column)
        streams = {"text": names[0], **{name: name for name in names[1:]}}
        self.corpus = self.make_corpus(
            streams, workdir, tables.tsv_file, (data.label_column,)
        )

    def arguments(self, batch: Mapping[str, jax.Array]) -> tuple[Any, ...]:
        """Return the arguments of the model for B · C texts."""
        each = {name: batch[name] for name in ("text", "text_length", "second")}
        return super().arguments(
            {name: x.reshape(-1, *x.shape[2:]) for name, x in each.items()}
        )

    def shaped(self, logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the scores (B, C)."""
        return logits.reshape(batch["text_length"].shape)

    def means(
        self, logits: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, Mean]:
        return label_means(logits, batch["label"], batch["text_length"][:, 0] > 0)

    def _batches(self, columns: Sequence[Any], what: str, seed: int | None) -> Batches:
        config, corpus, (*texts, labels) = self.config, self.corpus, columns
        limit, count = config.data.max_length, len(self.labels.names)
        before = texts[1] if config.data.second_column else [""] * len(texts[0])
        examples = zip(before, *texts[-count:], strict=True)
        lines = [
            f"{start} {choice}".strip()
            for start, *choices in examples
            for choice in choices
        ]
        first = corpus.encode("text", texts[0], end=False).take(
            np.repeat(np.arange(len(texts[0])), count)
        )
        second, frame = (
            corpus.encode("text", lines, end=False),
            self.backbone.frame(corpus),
        )
        each = f"{what}, {count} choices per row"
        rows, place = laid_out(
            first, second, limit=limit, frame=frame, what=each, key="data.max_length"
        )
        others = {} if labels is None else {"label": self.labels.encode(labels, what)}
        longest = rows.lengths.reshape(-1, count).max(axis=1, keepdims=True)
        plan = example_plan(
            corpus, longest, seed=seed, rows=config.evaluation.batch_size, limit=limit
        )

        def load(batch: Batch) -> Arrays:
            i = batch.indices[:, None]
            each = batch._replace(
                indices=np.where(i >= 0, i * count + np.arange(count), -1).ravel()
            )
            arrays = padded_arrays({"text": rows}, {"second": place}, each)
            shaped = {
                name: x.reshape(-1, count, *x.shape[1:]) for name, x in arrays.items()
            }
            return shaped | padded_arrays({}, others, batch._replace(shape=()))

        return Batches(
            plan,
            load,
            records=records_of(self.columns[: self.inputs], texts),
            references=labels or (),
            baseline=label_entropy(others.get("label")),
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"choice": number of the most probable choice, "probabilities":
        those of all choices} for each row.
        """
        rows = probabilities(outputs["logits"])
        return [
            {"choice": int(row.argmax()), "probabilities": row.tolist()} for row in rows
        ]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the loss and the accuracy."""
        loss: dict[str, float | str] = {"loss": means["cross_entropy"]} if means else {}
        return loss | {
            "accuracy": metrics.exact_match(
                [str(found["choice"]) for found in predictions], references
            )
        }

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, shape = np.random.default_rng(seed or 0), (rows, len(self.labels.names))
        lengths = (
            np.full(shape, length)
            if seed is None
            else draw.integers(1, length + 1, shape)
        )
        return {
            "text": draw.integers(
                0, self.config.model.vocab_size, (*shape, length), np.int32
            ),
            "text_length": lengths.astype(np.int32),
            "second": draw.integers(0, lengths + 1).astype(np.int32),
            "label": draw.integers(0, shape[1], rows, np.int32),
            "index": np.arange(rows, dtype=np.int32),
        }

    def preview(self, arrays: Arrays) -> list[str]:
        lines = ["the choices of the first row of the first batch:"]
        for number, (ids, length) in enumerate(
            zip(arrays["text"][0], arrays["text_length"][0], strict=True)
        ):
            tokens, _ = self.tokens("text", ids[:length])
            lines.append(
                f"  {number}{' (right)' if number == arrays['label'][0] else ''}: "
                f"{' '.join(tokens)}"
            )
        return lines

    def attention(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[
        dict[tuple[str, str, str], jax.Array], dict[str, tuple[jax.Array, jax.Array]]
    ]:
        """Return the maps of each choice."""
        columns, (maps, _) = (
            self.config.data.choice_columns,
            super().attention(params, batch),
        )
        each = {
            (f"{name}, choice {i}", column, column): weights.reshape(
                *batch["second"].shape, *weights.shape[1:]
            )[:, i]
            for (name, *_), weights in maps.items()
            for i, column in enumerate(columns)
        }
        return each, {
            column: (batch["text"][:, i], batch["text_length"][:, i])
            for i, column in enumerate(columns)
        }
