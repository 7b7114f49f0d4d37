"""Texts or pairs of texts with a label each, e.g. the tables of GLUE: the config
sections and the batches of classification and regression.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from etils import epath

from transformer_jax import fields
from transformer_jax.data import tables
from transformer_jax.data.batching import Batches, label_entropy
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import example_batches
from transformer_jax.data.examples import Frame, columns_of, laid_out, records_of
from transformer_jax.data.text import TextData
from transformer_jax.tasks import text
from transformer_jax.tasks.fine_tuning import AuxiliaryConfig
from transformer_jax.training.task import Arrays, Columns, Record


@dataclasses.dataclass(frozen=True)
class LabelledData(TextData):
    """Data from a table {split}.tsv with a header, and a text or a pair of texts and
    a label per row.
    """

    text_column: str = "sentence"
    second_column: str = ""  # the second text of a pair; "": there is one text
    label_column: str = "label"

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns with text."""
        return tuple(filter(None, (self.text_column, self.second_column)))

    @property
    def columns(self) -> Columns:
        """The names of the columns, and how many of them are texts."""
        return Columns((*self.texts, self.label_column), len(self.texts))

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
class PairConfig(AuxiliaryConfig):
    """The keys of `AuxiliaryConfig`, and the order of pairs.

    both_orders: the model reads each pair in both orders, and the two vectors are added
        (Radford et al. 2018, Section 3.3), as the order of e.g. paraphrases means
        nothing; for GPT only.
    """

    both_orders: bool = fields.outputs(False)

    gpt_keys: ClassVar[tuple[str, ...]] = (*AuxiliaryConfig.gpt_keys, "both_orders")

    @property
    def views(self) -> int:
        return 2 if self.both_orders else 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.both_orders and self.plain_text:
            yield (
                "plain_text",
                (
                    "must be False with fine_tuning.both_orders, "
                    "which needs special tokens"
                ),
            )


def pair_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, rule and remedy) for keys of pairs without pairs."""
    if config.fine_tuning.both_orders and not config.data.second_column:
        yield (
            "fine_tuning.both_orders",
            "needs pairs: set data.second_column, or this to False",
        )


def make_corpus(config: Any, workdir: epath.PathLike | None) -> Corpus:
    """Return the corpus of texts or pairs."""
    data = config.data
    columns = dict(zip(("text", "second"), data.texts, strict=False))
    others = (data.label_column,)
    return text.make_corpus(config, columns, workdir, tables.tsv_file, others)


@dataclasses.dataclass(frozen=True)
class LabelledTexts:
    """Reads texts or pairs and their labels.

    A batch holds "text", "text_length", "index" (B,) and, except in prediction, "label"
    (B,). For pairs, it also holds "second" (B,), the position at which the second text
    starts.

    config: the config of the task.
    corpus: the corpus of its texts.
    frame: the ids around texts.
    numbers: a function from labels and their source, for messages, to numbers (n,).
    """

    config: Any
    corpus: Corpus
    frame: Callable[[Corpus], Frame]
    numbers: Callable[[Sequence[str], str], np.ndarray]

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return the batches of a split, shuffled if there is a seed."""
        columns, source = text.split_columns(
            self.corpus, split, self.config.columns.names
        )
        return self._arranged(columns, source, seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return the batches of records that may lack a label."""
        columns = columns_of(records, *self.config.columns)
        return self._arranged(columns, "input", None)

    def _arranged(
        self, columns: Sequence[Any], source: str, seed: int | None
    ) -> Batches:
        """Return the batches of texts and labels, None for a missing column."""
        config = self.config
        *texts, labels = columns
        limit = config.data.max_length
        key = "data.max_length"
        # the order also means nothing where texts are cut
        if config.fine_tuning.both_orders and limit % 2 == 0:
            limit -= 1
            key = "data.max_length - 1"
        first, *more = (self.corpus.encode("text", lines, end=False) for lines in texts)
        rows, second = laid_out(
            first,
            more[0] if more else None,
            limit=limit,
            frame=self.frame(self.corpus),
            source=source,
            key=key,
        )
        others = {}
        if labels is not None:
            others["label"] = self.numbers(labels, source)
        if more:
            others["second"] = second
        batches = example_batches(
            self.corpus,
            {"text": rows},
            others,
            seed=seed,
            rows=config.evaluation.batch_size,
            limit=limit,
        )
        return batches._replace(
            records=records_of(config.data.texts, texts),
            references=labels or (),
            baseline=label_entropy(others.get("label")),
        )

    def dummy_batch(
        self,
        rows: int,
        length: int,
        seed: int | None,
        label: Callable[[np.random.Generator], np.ndarray] | None,
    ) -> Arrays:
        """Return a synthetic batch, whose labels (rows,) the function `label` draws."""
        dummies = text.Dummies((rows,), length, seed)
        batch = dummies.text(self.config.model.vocab_size)
        if label is not None:
            batch["label"] = label(dummies.random)
        if self.config.data.second_column:
            batch["second"] = dummies.positions()
        return batch
