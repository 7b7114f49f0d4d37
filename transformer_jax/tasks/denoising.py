"""Pre-training of encoder–decoders on documents: span corruption (Raffel et al. 2020)
and text infilling with sentence permutation (Lewis et al. 2020).

The model is that of `SequenceToSequence`, so a run of that task can start from the
parameters and the tokenizer of this one. What is new here are the examples, which are
made from one text.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
from etils import epath

from transformer_jax import fields, metrics
from transformer_jax.data.annotated import documents_file
from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus, Reader
from transformer_jax.data.denoising import (
    MASK,
    CorruptionConfig,
    denoising_batches,
    gap_batches,
    sentinel_tokens,
)
from transformer_jax.data.examples import columns_of
from transformer_jax.data.text import ParallelData, TextData
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.decoding import DecodingConfig
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.transformer import TransformerConfig
from transformer_jax.tasks.inputs import InputConfig
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.tasks.sequence_to_sequence_config import (
    SequenceToSequenceConfig,
    SequenceToSequenceEvaluation,
    SequenceToSequenceTraining,
)
from transformer_jax.training.metric import LOSS, PERPLEXITY
from transformer_jax.training.task import (
    Arrays,
    Attention,
    Columns,
    Config,
    DeviceArrays,
    EvaluationConfig,
    Forward,
    Inspected,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
)

TEXT = "text"  # the column of the sentences


@dataclasses.dataclass(frozen=True)
class DenoisingData(TextData):
    """Data from documents {split}.txt: a sentence per line, a blank line between
    documents. A tokenizer that is trained on them has the sentinels and the mask.
    """

    # tokens <extra_id_0>, <extra_id_1>, … of a tokenizer that is trained here, 100 as
    # in T5
    sentinels: int = fields.size(100, 16)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens that stand for missing text."""
        return (*sentinel_tokens(self.sentinels), MASK)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.max_length < 4:
            yield (
                "max_length",
                "must be at least 4: two tokens, the final sentinel and the end token",
            )
        if self.source != "files":
            yield (
                "source",
                "must be 'files': a tfds data set has no documents of sentences",
            )
        if self.vocabulary:
            yield (
                "vocabulary",
                "must be '': a vocab.txt has no tokens that stand for missing text",
            )
        if self.sentinels < 0:
            yield "sentinels", "must be at least 0, e.g. 100"


@dataclasses.dataclass(frozen=True)
class OneText(ParallelData):
    """A source and a target that are made from the same column."""

    source_language: str = TEXT
    target_language: str = TEXT
    for_missing: tuple[str, ...] = ()  # the tokens that stand for missing text

    @classmethod
    def of(cls, data: DenoisingData) -> "OneText":
        """Return the same data set as pairs."""
        names = [field.name for field in dataclasses.fields(TextData)]
        values = {name: getattr(data, name) for name in names}
        return cls(**values, for_missing=data.special_tokens)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.for_missing


@dataclasses.dataclass(frozen=True)
class DocumentsInput(InputConfig):
    """Text from documents of sentences."""

    more_columns: ClassVar[tuple[str, ...]] = ("document",)

    def reader(self) -> Reader:
        """Return the function that reads the files of a split."""
        return documents_file


@dataclasses.dataclass(frozen=True)
class DenoisingConfig(Config):
    """The config sections of this task."""

    model: TransformerConfig | RecurrentConfig | ConvS2SConfig
    data: DenoisingData
    denoising: CorruptionConfig
    training: SequenceToSequenceTraining
    evaluation: EvaluationConfig = dataclasses.field(metadata={"free": True})
    decoding: DecodingConfig = dataclasses.field(metadata={"free": True})

    @property
    def of_pairs(self) -> SequenceToSequenceConfig:
        """The config of the same model as a map from source to target."""
        sections = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        del sections["denoising"]
        keys = dataclasses.asdict(self.evaluation)
        sections["evaluation"] = SequenceToSequenceEvaluation(**keys)
        sections["data"] = OneText.of(self.data)
        sections["input"] = DocumentsInput()
        sections["source_vectors"] = VectorsConfig()
        sections["target_vectors"] = VectorsConfig()
        return SequenceToSequenceConfig(**sections)

    @property
    def columns(self) -> Columns:
        return Columns((TEXT,))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        source_size = self.model.source_vocab_size
        if self.model.target_vocab_size != source_size:
            yield (
                "model.target_vocab_size",
                f"must be equal to model.source_vocab_size = {source_size}: "
                "source and target have the same tokenizer",
            )
        for key, rule in self.of_pairs.problems():
            if key != "data.joint_tokenizer":  # no key of this task
                yield key, rule
        needed = self.denoising.sentinels(self.data.max_length)
        if self.data.sentinels < needed:
            yield (
                "data.sentinels",
                f"must be at least {needed}, the most in a text of data.max_length = "
                f"{self.data.max_length} with this denoising.rate and "
                f"denoising.mean_length: set it to {needed} or more",
            )

    def advice(self) -> Iterator[str]:
        """Yield warnings about settings that are allowed but unwise."""
        yield from self.of_pairs.advice()


class Denoising(Task, Inspected):
    """Prediction of what is missing in a text, or of the whole text.

    A batch is that of `SequenceToSequence`, see `data.denoising.denoising_batches`. In
    prediction, a sentinel or a mask in a text stands for what is missing. No text is
    written when a split is evaluated.
    """

    metrics: ClassVar = {"loss": LOSS, "perplexity": PERPLEXITY}
    corpus: Corpus

    def __init__(self, config: DenoisingConfig, workdir: epath.PathLike | None):
        self.pairs = SequenceToSequence(config.of_pairs, workdir)
        super().__init__(config, self.pairs.corpus)

    # On the device.

    def init(self, key: jax.Array) -> Params:
        return self.pairs.init(key)

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """See `SequenceToSequence.loss`."""
        return self.pairs.loss(params, batch, key, step)

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the cross-entropy without smoothing, or for text to fill in, the
        outputs of `SequenceToSequence.evaluate`.
        """
        if "target" not in batch:
            return self.pairs.evaluate(params, batch, greedy)
        return self.pairs.means(params, batch), {}

    def attention(self, params: Params, batch: DeviceArrays) -> Attention:
        """See `SequenceToSequence.attention`."""
        return self.pairs.attention(params, batch)

    def completed(self, params: Params, batch: DeviceArrays) -> DeviceArrays:
        """See `SequenceToSequence.completed`."""
        return self.pairs.completed(params, batch)

    def forward(self, params: Params, batch: DeviceArrays) -> Forward:
        """See `SequenceToSequence.forward`."""
        return self.pairs.forward(params, batch)

    def checks(self, params: Params, batch: DeviceArrays) -> Mapping[str, float]:
        """See `SequenceToSequence.checks`."""
        return self.pairs.checks(params, batch)

    # On the host.

    def batches(self, split: str, seed: int | None) -> Batches:
        """Return one example per chunk.

        Without a seed, the noise is the same every time.
        """
        config = self.config
        rows = config.evaluation.batch_size
        return denoising_batches(
            self.corpus, split, seed, config=config.denoising, rows=rows
        )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        (lines,) = columns_of(records, *self.config.columns)
        return gap_batches(
            self.corpus,
            lines or (),
            limit=self.config.model.max_length,
            rows=self.config.evaluation.batch_size,
        )

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        batch = super().dummy_batch(rows, length, seed, True)
        if not references:
            del batch["target"], batch["target_length"]
        return batch

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return what `SequenceToSequence.decode` returns; {} for a split."""
        if "tokens" not in outputs:
            return [{} for _ in batch["index"]]
        return self.pairs.decode(outputs, batch)

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss and the perplexity over all tokens of the targets."""
        return dict(metrics.loss_and_perplexity(means))

    def preview(self, arrays: Arrays) -> list[str]:
        """See `SequenceToSequence.preview`."""
        return self.pairs.preview(arrays)
