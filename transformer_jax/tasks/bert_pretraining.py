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
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.examples import columns_of
from transformer_jax.data.masking import (
    MaskingConfig,
    blank_batches,
    document_batches,
    most_masked,
)
from transformer_jax.data.text import TextData
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.models.bert import BertConfig, Pretraining
from transformer_jax.tasks import text
from transformer_jax.tasks.pseudo_likelihood import PseudoLikelihood
from transformer_jax.tasks.sentence_embeddings import SentenceEmbeddings
from transformer_jax.tasks.word_tables import WordTable
from transformer_jax.training.metric import LOSS, PERPLEXITY, Metric
from transformer_jax.training.task import (
    Arrays,
    DeviceArrays,
    Embedding,
    GivenTable,
    Inspected,
    Mean,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Scoring,
    Step,
    Task,
)

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


def given_tables(vectors: VectorsConfig, model: BertConfig) -> tuple[GivenTable, ...]:
    """Return the embedding of tokens, if it starts with word vectors."""
    if not vectors.file:
        return ()
    # the head of masked tokens has no table of its own
    of_tokens = model.token_vectors._replace(is_output=True)
    return (WordTable("vectors", vectors, of_tokens, "text", "bert/embedding/table"),)


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(text.TextTaskConfig):
    """The config sections of pre-training."""

    model: BertConfig
    data: DocumentsData
    masking: MaskingConfig
    vectors: VectorsConfig

    @property
    def given_tables(self) -> tuple[GivenTable, ...]:
        return given_tables(self.vectors, self.model)

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
        if self.masking.next_sentence and not self.model.has_segments:
            yield (
                "masking.next_sentence",
                (
                    f"must be False with model.num_segments = "
                    f"{self.model.num_segments}, which does not tell the two segments "
                    "of a pair apart"
                ),
            )
        for field in dataclasses.fields(MaskingConfig):
            changed = getattr(self.masking, field.name) != field.default
            if self.model.causal and field.name in UNUSED and changed:
                yield (
                    f"masking.{field.name}",
                    f"has no effect with model.causal: set it to {field.default}",
                )


def masked_positions(batch: DeviceArrays) -> jax.Array:
    """Return (B, P), True at the positions to predict."""
    count = jnp.where(batch["text_length"] > 0, batch["masked"], 0)
    return jnp.arange(batch["positions"].shape[1])[None] < count[:, None]


def dummy_documents(
    config: PretrainingConfig,
    rows: int,
    length: int,
    seed: int | None,
    references: bool,
) -> Arrays:
    """Return the arrays of `data.masking.document_batches` for `Task.dummy_batch`."""
    model = config.model
    dummies = text.Dummies((rows,), length, seed)
    random = dummies.random
    most = most_masked(length, config.masking.rate)
    if model.causal:
        most = length - 1
    arrays = {
        "text": random.integers(0, model.vocab_size, (rows, length)),
        "text_length": dummies.lengths,
        "second": dummies.positions(),
        "paired": random.integers(0, 2, rows),
        "follows": random.integers(0, 2, rows),
        "positions": random.integers(0, dummies.lengths[:, None], (rows, most)),
        "label": random.integers(0, model.vocab_size, (rows, most)),
        "masked": np.minimum(dummies.lengths, most),
        "index": np.arange(rows),
    }
    if not references:
        for name in ("paired", "follows", "label"):
            del arrays[name]
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def masked_lm_logits(
    model: Pretraining,
    tokens: jax.Array,
    valid: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """Return the logits of the head of masked tokens at all positions (B, T, V).

    Pass it to `model.apply` as the method.
    """
    vectors, head, _ = model(tokens, valid, segments)
    return head(vectors)


class BertPretraining(Task, Scoring, Embedding, Inspected):
    """Prediction of masked tokens, and of whether one segment follows another.

    A batch holds the arrays of `data.masking.document_batches`. A causal model predicts
    every next token instead. In prediction, [MASK] in a text stands for a token to
    predict. Given texts are scored by their `PseudoLikelihood`.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "perplexity": PERPLEXITY,
        "masked_accuracy": Metric("masked_accuracy", better="higher"),
        "next_sentence_accuracy": Metric("next_sentence_accuracy", better="higher"),
    }
    corpus: Corpus

    def __init__(self, config: PretrainingConfig, workdir: epath.PathLike | None):
        corpus = text.make_corpus(
            config, {"text": "text"}, workdir, documents_file, ("document",)
        )
        self.model = Pretraining(config.model)
        self.shown = text.shown_by(corpus)
        arrange = text.segmented if config.model.has_segments else text.unsegmented
        network = text.Network(
            self.model,
            self.shown,
            arrange,
            outcomes=self.shown,
            logits=masked_lm_logits,
        )
        super().__init__(config, corpus, network)

    def _forward(
        self, params: Params, batch: DeviceArrays, key: jax.Array | None = None
    ) -> Any:
        """Return the vectors of masked positions, their map to logits, and the
        next-sentence logits.
        """
        return self.model.apply(
            {"params": params},
            *self.network.arguments(batch),
            batch["positions"],
            rngs=None if key is None else {"dropout": key},
        )

    def _means(self, outputs: Any, batch: DeviceArrays, counted: jax.Array) -> Means:
        vectors, head, follows = outputs
        masked = losses.token_cross_entropy(head, vectors, batch["label"], counted)
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

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        return self._means(
            self._forward(params, batch, key), batch, masked_positions(batch)
        )

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the means with the accuracy, or for text to predict from, the most
        probable tokens (B, P, SHOWN).
        """
        outputs = self._forward(params, batch)
        counted = masked_positions(batch)
        vectors, head, _ = outputs
        if "label" not in batch:
            size = self.corpus.size("text")  # ids beyond it are no tokens
            logits = head(vectors)[..., :size]
            probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits), min(SHOWN, size))
            return {}, {"probabilities": probabilities, "ids": ids}
        means = self._means(outputs, batch, counted)
        total = losses.correct_tokens(head, vectors, batch["label"], counted)
        weight = means["masked_lm"].weight
        return means | {"masked_accuracy": Mean(total, weight, scale=0)}, {}

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return one example per chunk.

        Without a seed, segments and masks are the same every time.
        """
        config = self.config
        return document_batches(
            self.corpus,
            split,
            seed,
            config=config.masking,
            causal=config.model.causal,
            rows=config.evaluation.batch_size,
        )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        (lines,) = columns_of(records, *self.config.columns)
        model = self.config.model
        return blank_batches(
            self.corpus,
            lines or (),
            causal=model.causal,
            limit=model.max_length,
            rows=self.config.evaluation.batch_size,
        )

    def scorer(self) -> PseudoLikelihood:
        return PseudoLikelihood(self.config, self.network, self.corpus)

    def embedder(self, pooling: str) -> SentenceEmbeddings:
        return SentenceEmbeddings(self.config, self.network, self.corpus, pooling)

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"masks": for each [MASK], the most probable tokens with their
        probabilities}; {} for a split.
        """
        if "ids" not in outputs:
            return [{} for _ in batch["index"]]
        shown = self.corpus.tokenizers["text"].shown
        rows = zip(
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
            for ids, probabilities, count in rows
        ]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
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

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        return dummy_documents(self.config, rows, length, seed, references)

    def preview(self, arrays: Arrays) -> list[str]:
        labels, _ = self.shown(arrays["label"][0, : arrays["masked"][0]])
        lines = text.preview(arrays, self.shown, "example")
        return [*lines, f"  to predict: {' '.join(labels)}"]
