"""Fine-tuning for one tag per word, e.g. of named entities (Devlin et al. 2019,
Section 5.3).
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import losses, metrics, spans
from transformer_jax.data import annotated
from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import example_batches
from transformer_jax.data.examples import columns_of
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.sources import DataError
from transformer_jax.data.words import TaggingData, subwords, word_rows
from transformer_jax.models.bert import BertConfig, TokenClassifier
from transformer_jax.tasks import text
from transformer_jax.tasks.fine_tuning import FineTuningTaskConfig, fine_tuned
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
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TaggingConfig(FineTuningTaskConfig):
    """The config sections of tagging."""

    model: BertConfig
    data: TaggingData

    @property
    def columns(self) -> Columns:
        return Columns(("words", "tags"))

    @property
    def inherited(self) -> Inherited:
        return self.backbone.inherited(self.data.tags)


def read_tags(
    lines: Sequence[str],
    counts: Sequence[int],
    data: TaggingData,
    place: Callable[[int, int], str],
) -> list[list[str]]:
    """Return the tags of each sentence.

    In IOB2, I that continues no entity can only begin one: it is read as B, as a
    warning says. So IOB1 is read as IOB2.

    Args:
        lines: the tags of each sentence, separated by spaces.
        counts: the number of words of each sentence.
        data: the config, with types and scheme.
        place: a function that names a word in messages, given the number of its
            sentence and its own, from 0.

    Raises:
        DataError: a sentence does not have one tag per word, a tag is unknown, or a
            sequence breaks the scheme "bioes".
    """
    known = set(data.tags)
    repaired = list[str]()
    sentences = [line.split() for line in lines]
    for i, (tags, count) in enumerate(zip(sentences, counts, strict=True)):
        if len(tags) != count:
            raise DataError(
                f"{place(i, 0)}: the sentence has {count} words and {len(tags)} tags: "
                "give one per word"
            )
        for k in (k for k, tag in enumerate(tags) if tag not in known):
            raise DataError(
                f"{place(i, k)}: "
                f"the tag {tags[k]!r} is not one of {', '.join(data.tags)}: "
                "correct it, or change data.types or data.scheme"
            )
        for k in spans.malformed(tags, data.scheme):
            if data.scheme != "iob2":
                raise DataError(
                    f"{place(i, k)}: the tag {tags[k]} does not fit the tags beside "
                    f"it in {data.scheme}, in {' '.join(tags[max(k - 1, 0) : k + 2])}: "
                    "correct it, or change data.scheme"
                )
            repaired.append(place(i, k))
            tags[k] = f"B{tags[k][1:]}"
    if repaired:
        log.warning(
            "%d tags I that continue no entity are read as B, e.g. %s",
            len(repaired),
            ", ".join(repaired[:3]),
        )
    return sentences


class Tagging(Task, Inspected):
    """Prediction of a tag for each word from the vector of its first subword.

    Differs: The paper adds as much context from the document as fits. Here, every
    sentence is read alone.

    A row is [CLS] subwords [SEP]. A sentence that is too long has several rows. A batch
    holds "text" (B, T), "text_length" and "index" (B,), and "first" (B, T), which is 1
    at first subwords. With references, it holds "label" (B, T), the numbers of the tags
    there.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "accuracy": ACCURACY,
        "precision": Metric("precision", better="higher"),
        "recall": Metric("recall", better="higher"),
        "f1": F1,
    }
    corpus: Corpus

    def __init__(self, config: TaggingConfig, workdir: epath.PathLike | None):
        tags = config.data.tags
        others = ("tags", "line") if config.data.source == "files" else ("tags",)
        corpus = text.make_corpus(
            config, {"text": "words"}, workdir, annotated.conll_file, others
        )
        features = config.fine_tuning.feature_layers
        model = TokenClassifier(config.model, len(tags), features)
        network = fine_tuned(config.backbone, model, corpus)
        network = dataclasses.replace(network, outcomes=text.named(tags))
        super().__init__(config, corpus, network)
        self.tags = tags

    def _means(self, logits: jax.Array, batch: DeviceArrays) -> Means:
        """Return the means over the first subwords, given logits (B, T, tags)."""
        counted = (batch["first"] > 0) & text.valid(batch)
        label = batch["label"]
        loss, count = losses.cross_entropy(
            logits, label, counted, vocab_size=len(self.tags)
        )
        right = ((logits.argmax(axis=-1) == label) & counted).sum().astype(jnp.float32)
        return {
            "cross_entropy": Mean(loss, count),
            "accuracy": Mean(right, count, scale=0),
        }

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        return self._means(self.network.output(params, batch, key), batch)

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the means if there are labels, and the most probable tag at each
        token, "tags" (B, T).
        """
        logits = self.network.output(params, batch)
        means = self._means(logits, batch) if "label" in batch else {}
        return means, {"tags": logits.argmax(axis=-1)}

    def batches(self, split: str, seed: int | None) -> Batches:
        names = self.config.columns.names
        columns, source = text.split_columns(self.corpus, split, names)
        if self.config.data.source != "files":
            return self._arranged(columns, source, seed)
        table = self.corpus.open(split)
        first = table.column("line")

        def place(sentence: int, word: int) -> str:
            return f"{table.where}:{int(first[sentence]) + word}"

        return self._arranged(columns, source, seed, place)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        columns = columns_of(records, *self.config.columns)
        return self._arranged(columns, "input", None)

    def _arranged(
        self,
        columns: Sequence[Any],
        source: str,
        seed: int | None,
        place: Callable[[int, int], str] | None = None,
    ) -> Batches:
        """Return the batches of sentences and tags, None for missing tags.

        `place` names a word in messages, see `read_tags`.
        """
        data = self.config.data
        lines, tags = columns
        sentences = [line.split() for line in lines]
        counts = [len(words) for words in sentences]
        special = self.corpus.special_ids("text")
        tokenizer = self.corpus.tokenizers["text"]
        unknown = special.end if tokenizer.unk_id is None else tokenizer.unk_id
        rows, first, owners = word_rows(
            subwords(tokenizer, sentences, unknown),
            counts,
            limit=data.max_length,
            begin=special.begin,
            end=special.end,
            source=source,
        )
        others = {"first": first}
        references: list[list[str]] = []
        if tags is not None:

            def numbered(sentence: int, word: int) -> str:
                return f"{source}, sentence {sentence + 1}, word {word + 1}"

            references = read_tags(tags, counts, data, place or numbered)
            numbers = {tag: i for i, tag in enumerate(self.tags)}
            label = Ragged(np.zeros_like(first.values), first.lengths)
            label.values[first.values > 0] = [
                numbers[tag] for tag in itertools.chain(*references)
            ]
            others["label"] = label
        batches = example_batches(
            self.corpus,
            {"text": rows},
            others,
            seed=seed,
            rows=self.config.evaluation.batch_size,
            limit=data.max_length,
        )
        return batches._replace(
            records=lines,
            references=references,
            owners=owners,
            join=functools.partial(self._join, sentences),
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"tags": the tags of its words} for each row.

        `Batches.join` makes sentences of them.
        """
        tags = np.array(self.tags, object)[outputs["tags"]]
        return [
            {"tags": row[first > 0].tolist()}
            for row, first in zip(tags, batch["first"], strict=True)
        ]

    def _join(
        self,
        sentences: Sequence[Sequence[str]],
        number: int,
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the prediction for a sentence, given the tags of its rows.

        The fields are "words", "tags" and "entities", each with "type", "text", and
        "start" and "end" in words.
        """
        words = sentences[number]
        tags = [tag for row in rows for tag in row["tags"]]
        entities = [
            {
                "type": kind,
                "text": " ".join(words[start:end]),
                "start": start,
                "end": end,
            }
            for kind, start, end in spans.entities(tags, self.config.data.scheme)
        ]
        return {"words": words, "tags": tags, "entities": entities}

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss, the accuracy of the tags, and precision, recall and F1 of
        the entities.
        """
        predicted = [prediction["tags"] for prediction in predictions]
        loss: Scores = {"loss": means["cross_entropy"]} if means else {}
        return loss | {
            "accuracy": metrics.exact_match(
                list(itertools.chain(*predicted)), list(itertools.chain(*references))
            ),
            **spans.entity_f1(predicted, references, self.config.data.scheme),
        }

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        dummies = text.Dummies((rows,), length, seed)
        batch = dummies.text(self.config.model.vocab_size)
        batch["first"] = np.ones((rows, length), np.int32)
        if references:
            batch["label"] = dummies.random.integers(
                0, len(self.tags), (rows, length), np.int32
            )
        return batch

    def preview(self, arrays: Arrays) -> list[str]:
        words = [
            f"{token}/{self.tags[label]}" if first else token
            for token, label, first in zip(
                text.first_tokens(arrays, self.network.shown),
                arrays["label"][0],
                arrays["first"][0],
                strict=False,
            )
        ]
        return ["the first sentence of the first batch:", f"  {' '.join(words)}"]
