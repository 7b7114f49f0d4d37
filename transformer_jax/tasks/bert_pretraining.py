"""Pre-training of BERT: masked language modelling and next-sentence prediction
(Devlin et al. 2019, Section 3.1).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import losses, metrics
from transformer_jax.data.annotated import documents_file
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import columns_of
from transformer_jax.data.masking import (
    MaskingConfig,
    blank_batches,
    document_batches,
    most_masked,
)
from transformer_jax.data.text import TextData
from transformer_jax.models.bert import BertConfig, Pretraining
from transformer_jax.models.layers import Head
from transformer_jax.tasks.text import TextTask, TextTaskConfig, segmented
from transformer_jax.training.metric import LOSS, PERPLEXITY, Metric
from transformer_jax.training.task import Arrays, Mean, Outputs, Params, Record

# keys of masks, which a causal model does not have
UNUSED = ("rate", "mask_share", "random_share", "whole_word")
SHOWN = 5  # most probable tokens shown for each mask


@dataclasses.dataclass(frozen=True)
class DocumentsData(TextData):
    """Data from documents {split}.txt: a sentence per line, a blank line between
    documents.
    """

    tokenizer: str = "bert"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.max_length < 5:
            yield (
                "max_length",
                "must be at least 5: two segments and three special tokens",
            )
        if self.source != "files":
            yield (
                "source",
                "must be 'files': a tfds data set has no documents of sentences",
            )


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(TextTaskConfig):
    """The config sections of pre-training."""

    model: BertConfig
    data: DocumentsData
    masking: MaskingConfig

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        if self.model.causal and self.masking.next_sentence:
            yield (
                "masking.next_sentence",
                (
                    "must be False with model.causal, "
                    "as in the paper's left-to-right model"
                ),
            )
        for field in dataclasses.fields(MaskingConfig):
            if (
                self.model.causal
                and field.name in UNUSED
                and getattr(self.masking, field.name) != field.default
            ):
                yield (
                    f"masking.{field.name}",
                    f"has no effect with model.causal: set it to {field.default}",
                )


class BertPretraining(TextTask):
    """Prediction of masked tokens, and of whether one segment follows another.

    A batch holds the arrays of `data.masking.document_batches`. A causal model predicts
    every next token instead. In prediction, [MASK] in a text stands for a token to
    predict.
    """

    Config = PretrainingConfig
    input_arrays = (*TextTask.input_arrays, "positions", "masked")
    metrics: ClassVar = {
        "loss": LOSS,
        "perplexity": PERPLEXITY,
        "masked_accuracy": Metric("masked_accuracy", better="higher"),
        "next_sentence_accuracy": Metric("next_sentence_accuracy", better="higher"),
    }

    def __init__(self, config: PretrainingConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir)
        self.model = Pretraining(config.model)
        self.corpus = self.make_corpus(
            {"text": "text"}, workdir, documents_file, ("document",)
        )

    def arguments(self, batch: Mapping[str, jax.Array]) -> tuple[Any, ...]:
        """Return token ids, validity and segments, each (B, T)."""
        return segmented(batch, self.valid(batch, "text"))

    def _forward(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
    ) -> Any:
        """Return the vectors of masked positions, their map to logits, and the
        next-sentence logits.
        """
        rngs = None if key is None else {"dropout": key}
        return self.model.apply(
            {"params": params}, *self.arguments(batch), batch["positions"], rngs=rngs
        )

    def _means(
        self, outputs: Any, batch: Mapping[str, jax.Array], counted: jax.Array
    ) -> dict[str, Mean]:
        vectors, head, follows = outputs
        masked = losses.next_token(head, vectors, batch["label"], counted)
        means = {"masked_lm": Mean(*masked)}
        if self.config.masking.next_sentence:
            paired = (batch["paired"] > 0) & (batch["text_length"] > 0)
            label = batch["follows"]
            loss, pairs = losses.cross_entropy(follows, label, paired, vocab_size=2)
            right = (
                ((follows.argmax(axis=-1) == label) & paired).sum().astype(jnp.float32)
            )
            means["next_sentence"] = Mean(loss, pairs)
            means["next_sentence_accuracy"] = Mean(right, pairs, scale=0)
        return means

    @staticmethod
    def _counted(batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return (B, P), True at the positions to predict."""
        count = jnp.where(batch["text_length"] > 0, batch["masked"], 0)
        return jnp.arange(batch["positions"].shape[1])[None] < count[:, None]

    def loss(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int,
    ) -> dict[str, Mean]:
        return self._means(
            self._forward(params, batch, key), batch, self._counted(batch)
        )

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the means with the accuracy, or for text to predict from, the most
        probable tokens (B, P, SHOWN).
        """
        outputs = self._forward(params, batch)
        counted = self._counted(batch)
        vectors, head, _ = outputs
        if "label" not in batch:
            size = self.corpus.size("text")  # ids beyond it are no tokens
            logits = head(vectors)[..., :size]
            probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits), min(SHOWN, size))
            return {}, {"probabilities": probabilities, "ids": ids}

        def right(
            head: Head, x: jax.Array, labels: jax.Array, weights: jax.Array
        ) -> jax.Array:
            most_probable = head(x).argmax(axis=-1)
            return ((most_probable == labels) & weights).sum().astype(jnp.float32)

        means = self._means(outputs, batch, counted)
        found = losses.sum_in_chunks(right, head, vectors, batch["label"], counted)
        return (
            means
            | {"masked_accuracy": Mean(found, means["masked_lm"].weight, scale=0)},
            {},
        )

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return one example per chunk.

        Without a seed, segments and masks are the same every time.
        """
        config = self.config
        rows = config.evaluation.batch_size
        return document_batches(
            self.corpus,
            split,
            seed,
            config=config.masking,
            causal=config.model.causal,
            rows=rows,
        )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        (lines,), model = columns_of(records, self.columns), self.config.model
        rows = self.config.evaluation.batch_size
        return blank_batches(
            self.corpus,
            lines or (),
            causal=model.causal,
            limit=model.max_length,
            rows=rows,
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"masks": for each [MASK], the most probable tokens with their
        probabilities}; {} for a split.
        """
        if "ids" not in outputs:
            return [{} for _ in batch["index"]]
        shown = self.corpus.tokenizers["text"].shown
        found = zip(
            outputs["ids"], outputs["probabilities"], batch["masked"], strict=True
        )
        return [
            {
                "masks": [
                    dict(zip(shown(tokens), map(float, probability), strict=True))
                    for tokens, probability in zip(
                        ids[:count], probabilities, strict=False
                    )
                ]
            }
            for ids, probabilities, count in found
        ]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the objective as "loss", the perplexity of masked tokens, and the
        accuracies.
        """
        if not means:
            return {}
        perplexity = metrics.loss_and_perplexity({"loss": means["masked_lm"]})[
            "perplexity"
        ]
        accuracies = {
            name: value for name, value in means.items() if name.endswith("accuracy")
        }
        return {
            "loss": means["masked_lm"] + means.get("next_sentence", 0.0),
            "perplexity": perplexity,
            **accuracies,
        }

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, model = np.random.default_rng(seed or 0), self.config.model
        lengths = (
            np.full(rows, length)
            if seed is None
            else draw.integers(1, length + 1, rows)
        )
        most = (
            length - 1
            if model.causal
            else most_masked(length, self.config.masking.rate)
        )
        count = np.minimum(lengths, most)
        arrays = {
            "text": draw.integers(0, model.vocab_size, (rows, length)),
            "text_length": lengths,
            "second": draw.integers(0, lengths + 1),
            "paired": draw.integers(0, 2, rows),
            "follows": draw.integers(0, 2, rows),
            "positions": draw.integers(0, lengths[:, None], (rows, most)),
            "label": draw.integers(0, model.vocab_size, (rows, most)),
            "masked": count,
            "index": np.arange(rows),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        labels, _ = self.tokens("text", arrays["label"][0, : arrays["masked"][0]])
        return [
            "the first example of the first batch:",
            f"  {' '.join(tokens)}",
            f"  to predict: {' '.join(labels)}",
        ]
