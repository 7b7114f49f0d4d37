"""The config of sequence to sequence, and the rules between its sections."""

import dataclasses
from collections.abc import Iterator

from transformer_jax import metrics
from transformer_jax.data.text import ParallelData
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.decoding import DecodingConfig
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.transformer import TransformerConfig
from transformer_jax.tasks.chosen_scores import CHOSEN_BY, rules_of
from transformer_jax.tasks.inputs import InputConfig
from transformer_jax.tasks.text import TextTaskConfig
from transformer_jax.tasks.word_tables import WordTable
from transformer_jax.training.task import (
    Columns,
    EvaluationConfig,
    TrainingConfig,
)

# scores that need data.references above 1
SEVERAL_REFERENCES = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "chrf")
WIDE_BEAM = 50  # larger beams cause a warning about their cost


@dataclasses.dataclass(frozen=True)
class SequenceToSequenceTraining(TrainingConfig):
    """The training keys of the engine and of this objective."""

    label_smoothing: float = 0.1  # ε
    # λ of doubly stochastic attention (Xu et al. 2015, eq. 14), 1.0 there; 0: none
    attention_regularization: float = 0.0

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if not 0 <= self.label_smoothing < 1:
            yield "label_smoothing", "must be in [0, 1), e.g. 0.1; 0 disables it"
        if self.attention_regularization < 0:
            yield (
                "attention_regularization",
                "must be at least 0, e.g. 1.0; 0 disables it",
            )

    @property
    def loss_label(self) -> str:
        terms = []
        if self.label_smoothing:
            terms.append("label smoothing")
        if self.attention_regularization:
            terms.append("attention regularization")
        return f"loss (with {' and '.join(terms)})" if terms else "loss"


@dataclasses.dataclass(frozen=True)
class SequenceToSequenceEvaluation(EvaluationConfig):
    """The engine's keys, the tokenizer of BLEU, and further scores.

    bleu_tokenizer: the tokenizer of sacreBLEU for the metric `bleu`. "13a" splits at
    spaces and around ASCII punctuation, "intl" around all Unicode punctuation and
    symbols, "none" at spaces only. For languages without spaces, "zh" splits Chinese
    into characters and "char" does so with any text; "ja-mecab" and "ko-mecab" split
    Japanese and Korean into morphemes and need the extras "ja" and "ko" of this
    package. Scores by different tokenizers are not comparable; `bleu_signature` names
    the tokenizer.

    text_scores: further scores. "rouge" adds `rouge_1`, `rouge_2`, `rouge_l` and
    `rouge_lsum`, for summaries in English, and needs the extra "rouge" of this package.
    "gleu" adds `gleu`, for grammar correction. text_scores.py defines both.
    """

    bleu_tokenizer: str = "13a"
    text_scores: tuple[str, ...] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.bleu_tokenizer not in metrics.BLEU_TOKENIZERS:
            yield (
                "bleu_tokenizer",
                (
                    f"must be one of {', '.join(metrics.BLEU_TOKENIZERS)}; "
                    "use 13a if in doubt"
                ),
            )
        elif extra := metrics.missing_extra(self.bleu_tokenizer):
            yield (
                "bleu_tokenizer",
                (
                    "needs MeCab and its dictionary: "
                    f"pip install -c constraints.txt -e '.[{extra}]' "
                    "in the folder of transformer_jax, or set it to another, e.g. char"
                ),
            )
        for rule in rules_of(self.text_scores):
            yield "text_scores", rule


@dataclasses.dataclass(frozen=True)
class SequenceToSequenceConfig(TextTaskConfig):
    """The config sections of this task."""

    model: TransformerConfig | RecurrentConfig | ConvS2SConfig
    data: ParallelData
    input: InputConfig
    source_vectors: VectorsConfig
    target_vectors: VectorsConfig
    training: SequenceToSequenceTraining
    evaluation: SequenceToSequenceEvaluation = dataclasses.field(
        metadata={"free": True}
    )
    decoding: DecodingConfig = dataclasses.field(metadata={"free": True})

    @property
    def given_tables(self) -> tuple[WordTable, ...]:
        tables = []
        for side, options in (
            ("source", self.source_vectors),
            ("target", self.target_vectors),
        ):
            if options.file:
                of_tokens = self.model.token_vectors
                if side == "source":
                    of_tokens = of_tokens._replace(is_output=False)
                path = f"{side}_embedding/table"
                tables.append(
                    WordTable(f"{side}_vectors", options, of_tokens, side, path)
                )
        return tuple(tables)

    @property
    def columns(self) -> Columns:
        return Columns((self.data.source_language, self.data.target_language))

    @property
    def longest(self) -> tuple[str, int]:
        source = self.input.stream(self.data.source_language)
        if source is None or source.limit is None:
            return super().longest
        if source.limit < self.data.max_length:
            return super().longest
        return source.limit_words, source.limit

    @property
    def longest_input(self) -> int:
        source = self.input.stream(self.data.source_language)
        return super().longest_input if source is None else self.longest[1]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        model = self.model
        data = self.data
        yield from self.input.conflicts(model, data)
        if (
            self.input.modality == "tokens"
            and data.joint_tokenizer
            and model.source_vocab_size != model.target_vocab_size
        ):
            yield (
                "data.joint_tokenizer",
                (
                    "requires equal vocabulary sizes, "
                    f"but model.source_vocab_size = {model.source_vocab_size} "
                    f"and model.target_vocab_size = {model.target_vocab_size}: "
                    "make them equal, or set this key to False"
                ),
            )
        if self.input.modality != "tokens" and any(data.source_frame):
            yield (
                "data.source_frame",
                f"must be () with input.modality = {self.input.modality!r}",
            )
        yield from self._problems_of_vectors()
        yield from self._problems_of_captions()
        yield from self._problems_of_scores()
        if self.decoding.beam_size > model.target_vocab_size:
            yield (
                "decoding.beam_size",
                (
                    "must not exceed "
                    f"model.target_vocab_size = {model.target_vocab_size}, "
                    "the number of tokens to choose from; 4 to 10 are usual"
                ),
            )
        if self.decoding.first_id >= model.target_vocab_size:
            yield (
                "decoding.first_id",
                (
                    "must be below "
                    f"model.target_vocab_size = {model.target_vocab_size}, or -1"
                ),
            )
        if model.shares_tables and not data.joint_tokenizer and not self.init_from:
            yield (
                "model.tie_embeddings",
                (
                    "requires data.joint_tokenizer = True, or the tokenizers "
                    "of an init_from in which both have the same ids; "
                    "otherwise set it to 'decoder'"
                ),
            )

    def _problems_of_vectors(self) -> Iterator[tuple[str, str]]:
        """Yield problems with word vectors of a source that has no embedding of its
        own.
        """
        if not self.source_vectors.file:
            return
        if self.input.modality != "tokens":
            yield (
                "source_vectors.file",
                f"must be '' with input.modality = {self.input.modality!r}",
            )
        if self.model.shares_tables:
            yield (
                "source_vectors.file",
                (
                    "must be '', because source and target share one embedding: "
                    "set target_vectors.file, or model.tie_embeddings to 'decoder'"
                ),
            )

    def _problems_of_captions(self) -> Iterator[tuple[str, str]]:
        """Yield problems with several references, and with attention to a source that
        no encoder reads.
        """
        model = self.model
        chosen = self.checkpoint.best_metric
        if chosen in SEVERAL_REFERENCES and self.data.references == 1:
            rule = "needs data.references above 1: choose bleu_tokenized or loss"
            yield "checkpoint.best_metric", rule
        has_alignment = isinstance(model, RecurrentConfig) and model.attention != "none"
        if self.training.attention_regularization and not has_alignment:
            yield (
                "training.attention_regularization",
                "needs a recurrent model with attention: set it to 0.0",
            )
        if (
            isinstance(model, RecurrentConfig)
            and model.encoder == "none"
            and self.input.modality == "tokens"
            and model.embedding_dim != model.encoder_dim
        ):
            yield (
                "model.encoder_dim",
                (
                    f"must be equal to model.embedding_dim = {model.embedding_dim} "
                    "with model.encoder = 'none', whose vectors are the embeddings"
                ),
            )

    def _problems_of_scores(self) -> Iterator[tuple[str, str]]:
        """Yield problems with the scores of `evaluation.text_scores`."""
        scores = self.evaluation.text_scores
        best = self.checkpoint.best_metric
        if best in CHOSEN_BY and CHOSEN_BY[best] not in scores:
            yield (
                "checkpoint.best_metric",
                (
                    f"needs evaluation.text_scores = ({CHOSEN_BY[best]!r},): "
                    "set it, or choose bleu or loss"
                ),
            )
        if "gleu" in scores and self.input.modality != "tokens":
            yield (
                "evaluation.text_scores",
                (
                    "'gleu' needs a source that is text, "
                    f"and input.modality = {self.input.modality!r}: leave it out"
                ),
            )

    def advice(self) -> Iterator[str]:
        """Yield warnings about settings that are allowed but unwise."""
        yield from super().advice()
        if self.decoding.beam_size > WIDE_BEAM:
            yield (
                f"config.decoding.beam_size = {self.decoding.beam_size}: "
                f"the search takes {self.decoding.beam_size} times the work of greedy "
                "search; 4 to 10 are usual, and wider beams seldom score better"
            )
        if self.model.needs_warmup and self.optimizer.warmup_steps == 0:
            yield (
                "config.optimizer.warmup_steps = 0 with config.model.norm = 'post': "
                "post-LN seldom trains without warm-up (Xiong et al. "
                "2020); set it to a few thousand steps, or model.norm to 'pre'"
            )
