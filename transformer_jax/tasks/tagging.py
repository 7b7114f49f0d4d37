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
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.sources import DataError
from transformer_jax.data.text import example_batches
from transformer_jax.data.words import TaggingData, subwords, word_rows
from transformer_jax.models.bert import BertConfig, TokenClassifier
from transformer_jax.tasks.fine_tuning import FineTuningTask, FineTuningTaskConfig
from transformer_jax.training.metric import ACCURACY, F1, LOSS, Metric
from transformer_jax.training.task import Arrays, Mean, Outputs, Params

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TaggingConfig(FineTuningTaskConfig):
    """The config sections of tagging."""

    model: BertConfig
    data: TaggingData


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
    known, read, found = set(data.tags), list[str](), [line.split() for line in lines]
    for i, (tags, count) in enumerate(zip(found, counts, strict=True)):
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
            read.append(place(i, k))
            tags[k] = f"B{tags[k][1:]}"
    if read:
        log.warning(
            "%d tags I that continue no entity are read as B, e.g. %s",
            len(read),
            ", ".join(read[:3]),
        )
    return found


class Tagging(FineTuningTask):
    """Prediction of a tag for each word from the vector of its first subword.

    Differs: The paper adds as much context from the document as fits. Here, every
    sentence is read alone.

    A row is [CLS] subwords [SEP]. A sentence that is too long has several rows. A batch
    holds "text" (B, T), "text_length" and "index" (B,), and "first" (B, T), which is 1
    at first subwords. With references, it holds "label" (B, T), the numbers of the tags
    there.
    """

    Config = TaggingConfig
    metrics: ClassVar = {
        "loss": LOSS,
        "accuracy": ACCURACY,
        "precision": Metric("precision", better="higher"),
        "recall": Metric("recall", better="higher"),
        "f1": F1,
    }
    columns = ("words", "tags")
    input_arrays = ("text", "text_length", "first", "index")

    def __init__(self, config: TaggingConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir, config.data.tags)
        self.tags = config.data.tags
        self.model = TokenClassifier(
            config.model, len(self.tags), config.fine_tuning.feature_layers
        )
        others = ("tags", "line") if config.data.source == "files" else ("tags",)
        self.corpus = self.make_corpus(
            {"text": "words"}, workdir, annotated.conll_file, others
        )

    def _means(
        self, logits: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, Mean]:
        """Return the means over the first subwords, given logits (B, T, tags)."""
        counted, label = (
            (batch["first"] > 0) & self.valid(batch, "text"),
            batch["label"],
        )
        loss, count = losses.cross_entropy(
            logits, label, counted, vocab_size=len(self.tags)
        )
        right = ((logits.argmax(axis=-1) == label) & counted).sum().astype(jnp.float32)
        return {
            "cross_entropy": Mean(loss, count),
            "accuracy": Mean(right, count, scale=0),
        }

    def loss(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int,
    ) -> dict[str, Mean]:
        return self._means(self.logits(params, batch, key), batch)

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the means if there are labels, and the most probable tag at each
        token, "tags" (B, T).
        """
        logits = self.logits(params, batch)
        return self._means(logits, batch) if "label" in batch else {}, {
            "tags": logits.argmax(axis=-1)
        }

    def batches(self, split: str, seed: int | None) -> Batches:
        if self.config.data.source != "files":
            return super().batches(split, seed)
        table = self.corpus.open(split)
        columns, lines = (
            [table.column(name) for name in self.columns],
            table.column("line"),
        )
        what = f"{table.where}, split {split}"
        return self._batches(
            columns, what, seed, lambda i, k: f"{table.where}:{int(lines[i]) + k}"
        )

    def _batches(
        self,
        columns: Sequence[Any],
        what: str,
        seed: int | None,
        place: Callable[[int, int], str] | None = None,
    ) -> Batches:
        """Return the batches. `place` names a word in messages, see `read_tags`."""
        lines, tags = columns
        place = place or (lambda i, k: f"{what}, sentence {i + 1}, word {k + 1}")
        corpus, data, special = (
            self.corpus,
            self.config.data,
            self.corpus.special_ids("text"),
        )
        tokenizer, sentences = (
            corpus.tokenizers["text"],
            [line.split() for line in lines],
        )
        counts = [len(words) for words in sentences]
        pieces = subwords(
            tokenizer,
            sentences,
            special.end if tokenizer.unk_id is None else tokenizer.unk_id,
        )
        limit, size = data.max_length, self.config.evaluation.batch_size
        rows, first, owners = word_rows(
            pieces, counts, limit=limit, begin=special.begin, end=special.end, what=what
        )
        others, found = {"first": first}, list[list[str]]()
        if tags is not None:
            found, numbers = (
                read_tags(tags, counts, data, place),
                {tag: i for i, tag in enumerate(self.tags)},
            )
            others["label"] = label = Ragged(np.zeros_like(first.values), first.lengths)
            label.values[first.values > 0] = [
                numbers[tag] for tag in itertools.chain(*found)
            ]
        batches = example_batches(
            corpus, {"text": rows}, others, seed=seed, rows=size, limit=limit
        )
        join = functools.partial(self._join, sentences)
        return batches._replace(
            records=lines, references=found, owners=owners, join=join
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
        words, tags = sentences[number], [tag for row in rows for tag in row["tags"]]
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
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the loss, the accuracy of the tags, and precision, recall and F1 of
        the entities.
        """
        found = [prediction["tags"] for prediction in predictions]
        loss: dict[str, float | str] = {"loss": means["cross_entropy"]} if means else {}
        return loss | {
            "accuracy": metrics.exact_match(
                list(itertools.chain(*found)), list(itertools.chain(*references))
            ),
            **spans.entity_f1(found, references, self.config.data.scheme),
        }

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, shape = np.random.default_rng(seed or 0), (rows, length)
        lengths = (
            np.full(rows, length)
            if seed is None
            else draw.integers(1, length + 1, rows)
        )
        return {
            "text": draw.integers(0, self.config.model.vocab_size, shape, np.int32),
            "text_length": lengths.astype(np.int32),
            "first": np.ones(shape, np.int32),
            "label": draw.integers(0, len(self.tags), shape, np.int32),
            "index": np.arange(rows, dtype=np.int32),
        }

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        shown = [
            f"{token}/{self.tags[label]}" if first else token
            for token, label, first in zip(
                tokens, arrays["label"][0], arrays["first"][0], strict=False
            )
        ]
        return ["the first sentence of the first batch:", f"  {' '.join(shown)}"]
