"""Pre-training of ELECTRA: detection of replaced tokens (Clark et al. 2020).

The discriminator has the parameters "bert/…", so a run that fine-tunes a BERT can start
from a run of this task. What is left out there is the generator.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax import fields, losses, metrics
from transformer_jax.data.annotated import documents_file
from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.examples import columns_of
from transformer_jax.data.masking import (
    MaskingConfig,
    blank_batches,
    document_batches,
)
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.models.bert import BertConfig
from transformer_jax.models.electra import Electra, replace, sample
from transformer_jax.models.layers import Head
from transformer_jax.tasks import text
from transformer_jax.tasks.bert_pretraining import (
    DocumentsData,
    dummy_documents,
    given_tables,
    masked_positions,
)
from transformer_jax.tasks.sentence_embeddings import SentenceEmbeddings
from transformer_jax.training.metric import LOSS, PERPLEXITY, Metric
from transformer_jax.training.task import (
    Arrays,
    DeviceArrays,
    Embedding,
    GivenTable,
    Mean,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
    TrainingConfig,
)

# Number that is folded into the keys of the generator's draws, so that they are no keys
# of dropout. It is larger than any step.
DRAWS = 2**31


@dataclasses.dataclass(frozen=True)
class ElectraMasking(MaskingConfig):
    """Choices of the generator's examples.

    The defaults are those of the authors' code. In the paper, all chosen tokens are
    replaced by [MASK].
    """

    mask_share: float = 0.85
    random_share: float = 0.0
    next_sentence: bool = fields.outputs(False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.next_sentence:
            yield "next_sentence", "must be False: ELECTRA has no such objective"


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    """The sizes of the generator. The other keys are those of the discriminator.

    The defaults are a third of BERT base (Clark et al. 2020, Table 6).
    """

    num_layers: int = fields.size(12, 2, is_model=True)
    d_model: int = fields.size(256, 16, is_model=True)
    d_ff: int = fields.size(1024, 24, is_model=True)
    head_dim: int = fields.size(64, 2, is_model=True)  # d_model / number of heads

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for field, value in dataclasses.asdict(self).items():
            if value < 1:
                yield field, "must be at least 1"
        if self.head_dim > 0 and self.d_model % self.head_dim:
            yield "d_model", f"must be a multiple of head_dim = {self.head_dim}"

    def model(self, discriminator: BertConfig) -> BertConfig:
        """Return the generator's config, with the discriminator's embeddings."""
        width = discriminator.embedding_width
        return dataclasses.replace(
            discriminator,
            num_layers=self.num_layers,
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_heads=self.d_model // self.head_dim,
            num_kv_heads=0,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            embedding_dim=0 if width == self.d_model else width,
        )


@dataclasses.dataclass(frozen=True)
class ElectraTraining(TrainingConfig):
    """The training keys of the engine and of this objective."""

    discriminator_weight: float = 50.0  # λ

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if not self.discriminator_weight > 0:
            yield "discriminator_weight", "must be positive, e.g. 50"


@dataclasses.dataclass(frozen=True)
class ElectraConfig(text.TextTaskConfig):
    """The config sections of ELECTRA. `model` is the discriminator."""

    model: BertConfig
    data: DocumentsData
    masking: ElectraMasking
    vectors: VectorsConfig
    training: ElectraTraining
    generator: GeneratorConfig

    @property
    def given_tables(self) -> tuple[GivenTable, ...]:
        return given_tables(self.vectors, self.model)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        if self.model.causal:
            yield "model.causal", "must be False: ELECTRA reads in both directions"


def _without_masks(arrays: Arrays) -> Arrays:
    """Return the arrays that the discriminator reads."""
    return {
        name: array
        for name, array in arrays.items()
        if name not in ("positions", "masked")
    }


class ElectraPretraining(Task, Embedding):
    """Prediction of masked tokens by a generator, and of the tokens that it replaced
    by a discriminator.

    The objective is L_MLM + λ · L_Disc (Section 2). The generator's samples take the
    place of the masked tokens. A sample that is the original token counts as original.
    The discriminator's loss does not reach the generator through the samples, but both
    train the embeddings.

    A batch holds the arrays of `data.masking.document_batches`. The prediction for a
    text is the probability of each of its tokens that it was replaced.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "perplexity": PERPLEXITY,
        "masked_accuracy": Metric("masked_accuracy", better="higher"),
        "replaced_loss": Metric("replaced_loss", better="lower"),
        "replaced_accuracy": Metric("replaced_accuracy", better="higher"),
        "replaced_recall": Metric("replaced_recall", better="higher"),
    }
    corpus: Corpus

    def __init__(self, config: ElectraConfig, workdir: epath.PathLike | None):
        corpus = text.make_corpus(
            config, {"text": "text"}, workdir, documents_file, ("document",)
        )
        self.model = Electra(config.model, config.generator.model(config.model))
        self.shown = text.shown_by(corpus)
        arrange = text.segmented if config.model.has_segments else text.unsegmented
        network = text.Network(self.model, self.shown, arrange)
        super().__init__(config, corpus, network)

    def _generated(
        self, params: Params, batch: DeviceArrays, key: jax.Array | None = None
    ) -> tuple[jax.Array, Head]:
        """Return the generator's vectors at masked positions, and their map to
        logits.
        """
        generated: Any = self.model.apply(
            {"params": params},
            *self.network.arguments(batch),
            batch["positions"],
            rngs=None if key is None else {"dropout": key},
            method=Electra.generate,
        )
        return generated

    def _draws(self, batch: DeviceArrays, step: Step) -> jax.Array:
        """Return a key for each row (B,), by the seed, the step and the number of the
        example alone.

        So the samples are the same on any mesh and with any number of microbatches.
        """
        key = jax.random.fold_in(jax.random.key(self.config.training.seed), DRAWS)
        of_step = jax.random.fold_in(key, step)
        return jax.vmap(jax.random.fold_in, (None, 0))(of_step, batch["index"])

    def _means(
        self,
        params: Params,
        batch: DeviceArrays,
        generated: tuple[jax.Array, Head],
        draws: jax.Array,
        key: jax.Array | None = None,
    ) -> Means:
        """Return the two terms of the objective, and metrics of the discriminator.

        `generated` is what `_generated` returns. The tokens of row b are drawn with
        draws[b].
        """
        vectors, head = generated
        counted = masked_positions(batch)
        positions = batch["positions"]
        labels = batch["label"]
        masked = losses.token_cross_entropy(head, vectors, labels, counted)

        ids = sample(head, vectors, draws, self.corpus.size("text"))
        original = replace(batch["text"], positions, counted, labels)
        corrupted = replace(batch["text"], positions, counted, ids)
        replaced = original != corrupted
        logits = self.network.output(params, {**batch, "text": corrupted}, key)
        present = text.valid(batch)
        loss, count = losses.binary_cross_entropy(logits, replaced, present)

        def share(chosen: jax.Array) -> Mean:
            return Mean((chosen & present).sum().astype(jnp.float32), count, scale=0)

        noticed = logits > 0
        weight = self.config.training.discriminator_weight
        return {
            "masked_lm": Mean(*masked),
            "replaced_tokens": Mean(loss, count, scale=weight),
            "replaced_accuracy": share(noticed == replaced),
            "replaced_share": share(replaced),
            "replaced_and_noticed": share(replaced & noticed),
        }

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        of_generator, of_discriminator = jax.random.split(key)
        generated = self._generated(params, batch, of_generator)
        draws = self._draws(batch, step)
        return self._means(params, batch, generated, draws, of_discriminator)

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the means, or for texts to predict from, the probabilities (B, T).

        What the generator draws is the same in every evaluation.
        """
        if "label" not in batch:
            logits = self.network.output(params, batch)
            return {}, {"probabilities": jax.nn.sigmoid(logits)}
        generated = self._generated(params, batch)
        means = self._means(params, batch, generated, self._draws(batch, 0))
        vectors, head = generated
        counted = masked_positions(batch)
        total = losses.correct_tokens(head, vectors, batch["label"], counted)
        weight = means["masked_lm"].weight
        return means | {"masked_accuracy": Mean(total, weight, scale=0)}, {}

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return one example per chunk.

        Without a seed, texts and masks are the same every time.
        """
        config = self.config
        batches = document_batches(
            self.corpus,
            split,
            seed,
            config=config.masking,
            causal=False,
            rows=config.evaluation.batch_size,
        )
        # the entropy of the masked tokens is no measure of the whole objective
        return batches._replace(baseline=None)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        (lines,) = columns_of(records, *self.config.columns)
        batches = blank_batches(
            self.corpus,
            lines or (),
            causal=False,
            limit=self.config.model.max_length,
            rows=self.config.evaluation.batch_size,
        )
        return batches._replace(load=lambda batch: _without_masks(batches.load(batch)))

    def embedder(self, pooling: str) -> SentenceEmbeddings:
        """See `Embedding`. The discriminator's encoder embeds the texts."""
        return SentenceEmbeddings(self.config, self.network, self.corpus, pooling)

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"tokens": the tokens of the text, with [CLS] and [SEP], "replaced":
        the probability of each that it was replaced}; {} for a split.
        """
        if "probabilities" not in outputs:
            return [{} for _ in batch["index"]]
        rows = zip(
            batch["text"], batch["text_length"], outputs["probabilities"], strict=True
        )
        shown = self.corpus.tokenizers["text"].shown
        return [
            {
                "tokens": shown(ids[:length]),
                "replaced": [float(p) for p in probabilities[:length]],
            }
            for ids, length, probabilities in rows
        ]

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the objective as "loss", the generator's perplexity of masked tokens,
        the discriminator's loss, and the accuracies. The recall is the share of the
        replaced tokens that are noticed.
        """
        if not means:
            return {}
        masked = means["masked_lm"]
        replaced = means["replaced_tokens"]
        share = means["replaced_share"]
        perplexity = metrics.loss_and_perplexity({"loss": masked})["perplexity"]
        weight = self.config.training.discriminator_weight
        return {
            "loss": masked + weight * replaced,
            "perplexity": perplexity,
            "masked_accuracy": means["masked_accuracy"],
            "replaced_loss": replaced,
            "replaced_accuracy": means["replaced_accuracy"],
            "replaced_recall": means["replaced_and_noticed"] / share if share else 0.0,
        }

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        arrays = dummy_documents(self.config, rows, length, seed, references)
        return arrays if references else _without_masks(arrays)

    def preview(self, arrays: Arrays) -> list[str]:
        labels, _ = self.shown(arrays["label"][0, : arrays["masked"][0]])
        lines = text.preview(arrays, self.shown, "example")
        return [*lines, f"  masked: {' '.join(labels)}"]
