"""Language modeling: predict the next token at every position of running text, and
continue prompts.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from etils import epath

from transformer_jax import losses, metrics
from transformer_jax.data import sources
from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.running_text import (
    RunningTextData,
    ids_sha256,
    read_text,
    same_by_line,
    text_batches,
)
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.decoding import Continuations, GenerationConfig, Writer
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from transformer_jax.models.stack import unstack_layers
from transformer_jax.tasks import text
from transformer_jax.tasks.continuations import ContinuedTexts, prompt_batches
from transformer_jax.tasks.text_scoring import TextScoring
from transformer_jax.tasks.word_tables import WordTable
from transformer_jax.training.metric import BITS_PER_BYTE, LOSS, PERPLEXITY
from transformer_jax.training.task import (
    Arrays,
    DeviceArrays,
    GivenTable,
    Growing,
    Inspected,
    Mean,
    Means,
    Outputs,
    Params,
    Piece,
    Predictions,
    Record,
    Scores,
    Scoring,
    Step,
    Task,
)

ARCHITECTURES: dict[str, Any] = {"gpt": GPT, "recurrent_lm": RecurrentLM}
TRAINING_IDS = "tokens of the training data"  # name in the fingerprint
PIECE = 32  # tokens written between two searches for stop strings


@dataclasses.dataclass(frozen=True)
class LanguageModelingConfig(text.TextTaskConfig):
    """The config sections of language modeling."""

    model: GPTConfig | RecurrentLMConfig
    data: RunningTextData
    decoding: GenerationConfig = dataclasses.field(metadata={"free": True})
    vectors: VectorsConfig

    @property
    def given_tables(self) -> tuple[GivenTable, ...]:
        if not self.vectors.file:
            return ()
        of_tokens = self.model.token_vectors
        path = "embedding/table"
        return (WordTable("vectors", self.vectors, of_tokens, "text", path),)

    @property
    def longest_input(self) -> int:
        return self.model.max_length - self.fitted_decoding.max_extra

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        if self.model.max_length < 2:
            yield (
                "model.max_length",
                "must be at least 2: a token of the prompt, and one that follows",
            )

    def advice(self) -> Iterator[str]:
        """Yield warnings about settings that are allowed but unwise."""
        yield from super().advice()
        if (fitted := self.fitted_decoding) != self.decoding:
            yield (
                f"config.decoding.max_extra = {self.decoding.max_extra}: "
                f"continuations have at most {fitted.max_extra} tokens, half of "
                f"model.max_length = {self.model.max_length}, which includes the prompt"
            )

    @property
    def fitted_decoding(self) -> GenerationConfig:
        """The section `decoding`, with a `max_extra` that leaves room for prompts."""
        fits = self.decoding.max_extra < self.model.max_length
        most = self.decoding.max_extra if fits else self.model.max_length // 2
        return dataclasses.replace(self.decoding, max_extra=most)


def _piece(written: Continuations, rows: int) -> Piece:
    """Return the arrays that the host reads, (B, K, …), and the whole as the state."""
    names = ("tokens", "log_probabilities", "finished", "written")
    arrays = {name: getattr(written, name) for name in names}
    outputs = {name: x.reshape(rows, -1, *x.shape[1:]) for name, x in arrays.items()}
    return Piece(outputs, state=written)


class LanguageModeling(Task, Growing, Scoring, Inspected):
    """Prediction of the next token.

    A batch holds the arrays of `data.running_text.text_batches`. One of prompts, which
    the model continues, has only "text" (B, T), "text_length" (B,) and "index" (B,).
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "perplexity": PERPLEXITY,
        "bits_per_byte": BITS_PER_BYTE,
    }
    corpus: Corpus

    def __init__(self, config: LanguageModelingConfig, workdir: epath.PathLike | None):
        config = dataclasses.replace(config, decoding=config.fitted_decoding)
        options = config.decoding
        streams = {"text": config.data.text_column}
        corpus = text.make_corpus(config, streams, workdir, sources.text_file)
        self.model = ARCHITECTURES[config.model.architecture](config.model)
        self.shown = text.shown_by(corpus)
        network = text.Network(self.model, self.shown, outcomes=self.shown)
        super().__init__(config, corpus, network)
        self.texts = ContinuedTexts(corpus, options)
        self.piece = PIECE if options.stop_strings else options.max_extra
        self.growing = "continuation" if options.n_best == 1 else ""

    # Prediction of the next token of a text.

    def _cross_entropy(
        self, params: Params, batch: DeviceArrays, key: jax.Array | None = None
    ) -> Mean:
        """Return the mean over tokens of -log P(token | preceding tokens)."""
        valid = text.valid(batch)
        packing = {}
        if "segment" in batch:
            packing = {"segments": batch["segment"], "positions": batch["position"]}
        x, head = self.model.apply(
            {"params": params},
            batch["text"],
            valid,
            **packing,
            rngs=None if key is None else {"dropout": key},
            method=text.hidden_and_head,
        )
        counted = valid & (batch["counted"] > 0) if "counted" in batch else valid
        total, weight = losses.token_cross_entropy(head, x, batch["target"], counted)
        return Mean(total, weight)

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """Return L1 of Radford et al. 2018, eq. 1, per token."""
        return {"loss": self._cross_entropy(params, batch, key)}

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs | Piece]:
        """Return the loss of windows, or the beginning of the K continuations of each
        prompt, see `ContinuedTexts`.
        """
        if "target" in batch:
            return {"loss": self._cross_entropy(params, batch)}, {}
        writer = self._writer(params, greedy)
        prompts = batch["text"]
        rows, width = prompts.shape
        cache = self._start(params, rows, width + self.config.decoding.max_extra)
        written = writer.begin(cache, prompts, batch["text_length"])
        return {}, _piece(written, rows)

    # Continuations of a prompt, see `Growing`.

    def grow(
        self,
        params: Params,
        batch: DeviceArrays,
        state: Any,
        going_on: jax.Array,
        steps: int,
        greedy: bool,
    ) -> Piece:
        rows, width = batch["text"].shape
        state = state._replace(finished=state.finished | ~going_on.reshape(-1))
        written = self._writer(params, greedy).proceed(
            state, width, batch["text_length"], batch["index"], steps
        )
        return _piece(written, rows)

    def unfinished(self, outputs: Arrays, batch: Arrays) -> np.ndarray:
        return self.texts.unfinished(outputs, batch)

    def scorer(self) -> TextScoring:
        return TextScoring(self.config, self.model, self.corpus)

    def _start(self, params: Params, rows: int, room: int) -> Any:
        method = self.model.start
        return self.model.apply({"params": params}, rows, room, method=method)

    def _extend(self, params: Params) -> Any:
        """Return the model's function that reads tokens into a cache."""
        return functools.partial(
            self.model.apply,
            {"params": unstack_layers(params)},
            method=self.model.extend,
        )

    def _writer(self, params: Params, greedy: bool) -> Writer:
        begin, end, pad = self.corpus.optional_ids("text")
        return Writer(
            self._extend(params),
            self.config.decoding,
            greedy,
            self.corpus.size("text"),
            begin,
            end,
            pad,
        )

    # On the host.

    def batches(self, split: str, seed: int | None) -> Batches:
        data = self.config.data
        return text_batches(
            self.corpus,
            "text",
            split,
            seed,
            layout=data.layout,
            stride=data.validation_stride,
            begin=self.config.decoding.prepend_begin,
            rows=self.config.evaluation.batch_size,
        )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """See `prompt_batches`."""
        config = self.config
        return prompt_batches(
            records,
            self.corpus,
            config.decoding,
            max_length=config.model.max_length,
            rows=config.evaluation.batch_size,
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return what `ContinuedTexts.decode` returns, or {} for each window."""
        if "tokens" not in outputs:
            return [{} for _ in batch["index"]]
        return self.texts.decode(outputs, batch)

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss in nats per token, the perplexity, and the bits per byte of
        the text.

        There are no bits per byte if only ends are predicted, because every document
        has one token.
        """
        ((tokens, size, _),) = references
        scores: Scores = {**metrics.loss_and_perplexity(means)}
        if means and size:
            bits = means["loss"] * tokens / size / math.log(2)
            scores["bits_per_byte"] = bits
        return scores

    def fingerprint(
        self, training: bool, stored: Collection[str] | None = None
    ) -> dict[str, str]:
        """See `Task.fingerprint`.

        Checkpoints without the hash of the tokens are of texts encoded line by line.
        """
        hashes = self.corpus.fingerprint(training)
        if not training:
            return hashes
        data = self.config.data
        begin = self.config.decoding.prepend_begin
        where = (self.corpus, "text", data.train_split, data.layout)
        lacking = stored is not None and TRAINING_IDS not in stored
        if lacking and not begin and same_by_line(*where):
            return hashes
        ids = read_text(*where, begin, sized=False)
        return hashes | {TRAINING_IDS: ids_sha256(ids)}

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        dummies = text.Dummies((rows,), length, seed)
        random = dummies.random
        size = self.config.model.vocab_size
        ids = random.integers(0, size, (rows, length + 1), np.int32)
        arrays = {
            "text": ids[:, :-1],
            "text_length": dummies.lengths.astype(np.int32),
            "index": np.arange(rows, dtype=np.int32),
        }
        if not references:
            return arrays
        arrays["target"] = ids[:, 1:]
        if self.config.data.layout == "documents":  # two in a row
            position = np.arange(length, dtype=np.int32)
            second = random.integers(1, length + 1, (rows, 1), np.int32)
            segment = 1 + (position >= second)
            valid = position < dummies.lengths[:, None]
            arrays["segment"] = np.where(valid, segment, 0).astype(np.int32)
            inside = position - second * (position >= second)
            arrays["position"] = np.where(valid, inside, 0).astype(np.int32)
        return arrays

    def preview(self, arrays: Arrays) -> list[str]:
        if "segment" in arrays:  # the first of the documents in a row
            first = (arrays["segment"] == 1).sum(axis=1)
            arrays = arrays | {"text_length": first}
        return text.preview(arrays, self.shown)

    def checks(self, params: Params, batch: DeviceArrays) -> Mapping[str, float]:
        ids = batch["text"]
        whole: Any = functools.partial(self.model.apply, {"params": params})
        cache = self._start(params, *ids.shape)
        return text.cache_and_causality(
            whole, self._extend(params), cache, ids, self.config.model.vocab_size
        )
