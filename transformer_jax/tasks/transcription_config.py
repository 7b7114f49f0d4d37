"""The config of transcription, and the rules between its sections."""

import dataclasses
from collections.abc import Iterator

from transformer_jax import fields
from transformer_jax.data.text import ParallelData
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.decoding import DecodingConfig
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.transformer import TransformerConfig
from transformer_jax.tasks.sequence_to_sequence_config import (
    SequenceToSequenceConfig,
    SequenceToSequenceEvaluation,
    SequenceToSequenceTraining,
)
from transformer_jax.tasks.speech import SpeechInput
from transformer_jax.training.task import (
    Columns,
    Config,
    EvaluationConfig,
    GivenTable,
    TrainingConfig,
)


@dataclasses.dataclass(frozen=True)
class TranscriptionTraining(TrainingConfig):
    """The training keys of the engine and of this objective.

    label_smoothing: ε, of the attention decoder alone.
    ctc_weight: λ, the share of CTC in the objective. 0: there is no CTC. 1: there is no
        attention decoder.
    """

    label_smoothing: float = 0.1
    ctc_weight: float = fields.outputs(0.3)

    @property
    def loss_label(self) -> str:
        return self.of_decoder.loss_label

    @property
    def of_decoder(self) -> SequenceToSequenceTraining:
        """The keys that the attention decoder has, too."""
        keys = dataclasses.asdict(self)
        del keys["ctc_weight"]
        return SequenceToSequenceTraining(**keys)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from self.of_decoder.problems()
        if not 0 <= self.ctc_weight <= 1:
            yield "ctc_weight", "must be in [0, 1]: 0 for attention alone, 1 for CTC"


@dataclasses.dataclass(frozen=True)
class TranscriptionDecoding(DecodingConfig):
    """The keys of a search, and the weight of CTC.

    ctc_weight: μ, the share of CTC in the score of an output. 0: the attention decoder
        alone. 1: CTC alone; with `beam_size` 1, the labels of the most probable
        alignment.
    """

    ctc_weight: float = 0.3

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if not 0 <= self.ctc_weight <= 1:
            yield "ctc_weight", "must be in [0, 1]: 0 for attention alone, 1 for CTC"


@dataclasses.dataclass(frozen=True)
class TranscriptionConfig(Config):
    """The config sections of transcription."""

    model: TransformerConfig | RecurrentConfig | ConvS2SConfig
    data: ParallelData
    input: SpeechInput
    target_vectors: VectorsConfig
    training: TranscriptionTraining
    evaluation: EvaluationConfig = dataclasses.field(metadata={"free": True})
    decoding: TranscriptionDecoding = dataclasses.field(metadata={"free": True})

    @property
    def without_ctc(self) -> SequenceToSequenceConfig:
        """The config of the same task without CTC."""
        sections = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        sections["source_vectors"] = VectorsConfig()
        sections["training"] = self.training.of_decoder
        keys = dataclasses.asdict(self.evaluation)
        sections["evaluation"] = SequenceToSequenceEvaluation(**keys)
        return SequenceToSequenceConfig(**sections)

    @property
    def given_tables(self) -> tuple[GivenTable, ...]:
        return tuple(
            dataclasses.replace(table, path=f"model/{table.path}")
            for table in self.without_ctc.given_tables
        )

    @property
    def columns(self) -> Columns:
        return self.without_ctc.columns

    @property
    def longest(self) -> tuple[str, int]:
        return self.without_ctc.longest

    @property
    def longest_input(self) -> int:
        return self.without_ctc.longest_input

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from self.without_ctc.problems()
        if self.data.references > 1:
            yield "data.references", "must be 1: a recording has one text"
        if self.data.table:
            yield (
                "data.table",
                (
                    "must be '': write a table for each split, "
                    "e.g. train.tsv, with a line for each recording"
                ),
            )
        trained = self.training.ctc_weight
        if trained == 1 and self.training.label_smoothing > 0:
            yield (
                "training.label_smoothing",
                "must be 0.0 with training.ctc_weight = 1, which trains no decoder",
            )
        if trained == 1 and self.target_vectors.file:
            yield (
                "target_vectors.file",
                "must be '' with training.ctc_weight = 1, which reads no tokens",
            )
        if self.decoding.renormalize and 0 < self.decoding.ctc_weight < 1:
            yield (
                "decoding.renormalize",
                (
                    "must be False with decoding.ctc_weight between 0 and 1: it would "
                    "change the weighted sum by which outputs are ranked"
                ),
            )
        if self.decoding.ctc_weight > 0 and trained == 0:
            yield (
                "decoding.ctc_weight",
                "must be 0 with training.ctc_weight = 0, which trains no CTC",
            )
        if self.decoding.ctc_weight < 1 and trained == 1:
            yield (
                "decoding.ctc_weight",
                "must be 1 with training.ctc_weight = 1, which trains no decoder",
            )

    def advice(self) -> Iterator[str]:
        """Yield warnings about settings that are allowed but unwise."""
        yield from self.without_ctc.advice()
