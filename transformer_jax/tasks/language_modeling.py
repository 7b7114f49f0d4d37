"""Language modeling: predict the next token at every position of running text,
continue prompts, and score texts.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import losses, metrics
from transformer_jax.data import sources
from transformer_jax.data.batching import Batches
from transformer_jax.data.continuations import Prompt
from transformer_jax.data.examples import as_object
from transformer_jax.data.running_text import (
    RunningTextData,
    ids_sha256,
    read_text,
    same_by_line,
    text_batches,
)
from transformer_jax.data.scoring import scored_batches
from transformer_jax.data.sources import DataError
from transformer_jax.data.text import ladder_batches
from transformer_jax.decoding import Continuations, GenerationConfig, Writer
from transformer_jax.decoding.sampling import log_probability
from transformer_jax.decoding.stopping import before_end, certain, cut_at
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.layers import Head
from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from transformer_jax.models.stack import unstack_layers
from transformer_jax.tasks.text import TextTask, TextTaskConfig, cache_and_causality
from transformer_jax.tasks.work import training_work
from transformer_jax.training.metric import BITS_PER_BYTE, LOSS, PERPLEXITY
from transformer_jax.training.task import (
    Arrays,
    Mean,
    Outputs,
    Params,
    Record,
    Task,
    Work,
)

ARCHITECTURES: dict[str, Any] = {"gpt": GPT, "recurrent_lm": RecurrentLM}
TRAINING_IDS = "tokens of the training data"  # name in the fingerprint
PIECE = 32  # tokens written between two searches for stop strings


def hidden_and_head(model: Any, *args: Any, **options: Any) -> tuple[jax.Array, Head]:
    """Return `hidden` of a language model, given its arguments, and `head`.

    Pass it to `model.apply` as the method.
    """
    return model.hidden(*args, **options), model.head()


@dataclasses.dataclass(frozen=True)
class LanguageModelingConfig(TextTaskConfig):
    """The config sections of language modeling."""

    model: GPTConfig | RecurrentLMConfig
    data: RunningTextData
    decoding: GenerationConfig = dataclasses.field(metadata={"free": True})

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


def _outputs(written: Continuations, rows: int) -> Outputs:
    """Return the parts that the host reads, (B, K, …), and the whole as the state."""
    read = {
        name: getattr(written, name)
        for name in ("tokens", "log_probabilities", "finished", "written")
    }
    return {name: x.reshape(rows, -1, *x.shape[1:]) for name, x in read.items()} | {
        "state": written
    }


class LanguageModeling(TextTask):
    """Prediction of the next token.

    A batch holds the arrays of `data.running_text.text_batches`. One of prompts, which
    the model continues, has only "text" (B, T), "text_length" (B,) and "index" (B,).
    """

    Config = LanguageModelingConfig
    metrics: ClassVar = {
        "loss": LOSS,
        "perplexity": PERPLEXITY,
        "bits_per_byte": BITS_PER_BYTE,
    }

    def __init__(self, config: LanguageModelingConfig, workdir: epath.PathLike | None):
        config = dataclasses.replace(config, decoding=config.fitted_decoding)
        super().__init__(config, workdir)
        self.model = ARCHITECTURES[config.model.architecture](config.model)
        self.corpus = self.make_corpus(
            {"text": config.data.text_column}, workdir, sources.text_file
        )
        self.piece = (
            PIECE if config.decoding.stop_strings else config.decoding.max_extra
        )
        self.growing = "continuation" if config.decoding.n_best == 1 else ""

    @property
    def scorer(self) -> Task:
        return TextScoring(self.config, self.corpus.workdir)

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def _cross_entropy(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
    ) -> Mean:
        """Return the mean over tokens of -log P(token | preceding tokens)."""
        valid = self.valid(batch, "text")
        packing = {}
        if "segment" in batch:
            packing = {"segments": batch["segment"], "positions": batch["position"]}
        x, head = self.model.apply(
            {"params": params},
            batch["text"],
            valid,
            **packing,
            rngs=None if key is None else {"dropout": key},
            method=hidden_and_head,
        )
        counted = valid & (batch["counted"] > 0) if "counted" in batch else valid
        total, weight = losses.next_token(head, x, batch["target"], counted)
        return Mean(total, weight)

    def loss(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int,
    ) -> dict[str, Mean]:
        """Return L1 of Radford et al. 2018, eq. 1, per token."""
        return {"loss": self._cross_entropy(params, batch, key)}

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the loss of windows, or the beginning of the K continuations of each
        prompt.

        For E = `decoding.max_extra`, the outputs are tokens and log_probabilities (B,
        K, E), finished (B, K), and the number of tokens written (B, K).
        """
        if "target" in batch:
            return {"loss": self._cross_entropy(params, batch)}, {}
        writer = self._writer(params, greedy)
        prompts = batch["text"]
        rows, width = prompts.shape
        room = width + self.config.decoding.max_extra
        cache = self._start(params, rows, room)
        return {}, _outputs(writer.begin(cache, prompts, batch["text_length"]), rows)

    def resume(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        state: Any,
        going_on: jax.Array,
        steps: int,
        greedy: bool,
    ) -> Outputs:
        state = state._replace(finished=state.finished | ~going_on.reshape(-1))
        rows, width = batch["text"].shape
        writer, lengths = self._writer(params, greedy), batch["text_length"]
        return _outputs(
            writer.proceed(state, width, lengths, batch["index"], steps), rows
        )

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

    def batches(self, split: str, seed: int | None) -> Batches:
        data, begin = self.config.data, self.config.decoding.prepend_begin
        options: Any = {
            "layout": data.layout,
            "stride": data.validation_stride,
            "begin": begin,
        }
        return text_batches(
            self.corpus,
            "text",
            split,
            seed,
            **options,
            rows=self.config.evaluation.batch_size,
        )

    def fingerprint(self, training: bool) -> dict[str, str]:
        hashes = super().fingerprint(training)
        if training:
            data, begin = self.config.data, self.config.decoding.prepend_begin
            text = read_text(
                self.corpus, "text", data.train_split, data.layout, begin, sized=False
            )
            hashes[TRAINING_IDS] = ids_sha256(text)
        return hashes

    def unchanged(self, name: str) -> bool:
        """See `Task.unchanged`.

        Checkpoints without the hash of the tokens are of texts encoded line by line.
        """
        data = self.config.data
        begins = self.config.decoding.prepend_begin
        return (
            name == TRAINING_IDS
            and not begins
            and same_by_line(self.corpus, "text", data.train_split, data.layout)
        )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of prompts.

        An empty prompt becomes a line break, unless the begin id precedes prompts. Long
        prompts keep their last tokens, and their begin id.

        A prompt is a text, an object {"text": text}, or {"turns": [text, …]}, in which
        `decoding.turn_separator` follows every turn. A text may also be such an object
        as JSON.
        """
        config, begin = self.config, self.config.decoding.prepend_begin
        empty = "" if begin else "\n"
        lines = {
            "text": [
                self._prompt(record, i) or empty for i, record in enumerate(records, 1)
            ]
        }
        limit, key = (
            config.model.max_length - config.decoding.max_extra,
            "model.max_length - decoding.max_extra",
        )
        rows = config.evaluation.batch_size
        options: Any = {
            "what": "input",
            "begin": begin,
            "end": False,
            "key": key,
            "tail": True,
        }
        return ladder_batches(self.corpus, lines, rows=rows, limit=limit, **options)

    def _prompt(self, record: Record, number: int) -> str:
        match as_object(record, ("text", "turns"), number):
            case {"text": str(text), **others} if not others:
                return text
            case {"turns": [*turns], **others} if (
                not others and turns and all(isinstance(x, str) for x in turns)
            ):
                return "".join(
                    turn + self.config.decoding.turn_separator for turn in turns
                )
        raise DataError(
            f"record {number} is {record!r:.80}: a prompt is a line of text, "
            '{"text": "…"} or {"turns": ["…", "…"]} with at least one turn'
        )

    def unfinished(self, outputs: Arrays, batch: Arrays) -> np.ndarray | None:
        return self._going_on(outputs, batch) if "tokens" in outputs else None

    def _going_on(self, outputs: Arrays, batch: Arrays) -> np.ndarray:
        stop = self.config.decoding.stop_strings
        going_on = ~outputs["finished"] & (
            outputs["written"] < self.config.decoding.max_extra
        )
        for row, number in zip(*np.nonzero(going_on), strict=True) if stop else ():
            text = self._prompt_of(batch, row).continuation(
                outputs["tokens"][row, number]
            )
            going_on[row, number] = cut_at(text, stop) is None
        return going_on

    def _prompt_of(self, batch: Arrays, row: int) -> Prompt:
        return Prompt(
            self.corpus.tokenizers["text"],
            batch["text"][row, : batch["text_length"][row]].tolist(),
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"continuation": text} for each prompt, or {"continuations": [text,
        …]}, best first, if `n_best` > 1.

        A continuation ends before the first stop string, and the best has the largest
        log-probability up to there. One that is unfinished lacks what may still change.
        That of a prompt without tokens is "". Windows give {}.
        """
        if "tokens" not in outputs:
            return [{} for _ in batch["index"]]
        parts = (
            outputs["tokens"],
            outputs["log_probabilities"],
            self._going_on(outputs, batch),
        )
        drawn = [
            list(
                map(
                    functools.partial(self._text, self._prompt_of(batch, row)),
                    *continuations,
                )
            )
            for row, continuations in enumerate(zip(*parts, strict=True))
        ]
        rows = [
            [text for text, _ in sorted(row, key=lambda found: -found[1])]
            for row in drawn
        ]
        return [
            {"continuation": row[0]} if len(row) == 1 else {"continuations": row}
            for row in rows
        ]

    def _text(
        self,
        prompt: Prompt,
        tokens: np.ndarray,
        log_probabilities: np.ndarray,
        unfinished: bool,
    ) -> tuple[str, float]:
        """Return the text of a continuation, and the log-probability of its tokens
        up to the first stop string.
        """
        stop = self.config.decoding.stop_strings
        tokens = before_end(tokens, self.config.decoding.end_ids)

        def until_stop(length: int) -> str | None:
            return cut_at(prompt.continuation(tokens[:length]), stop)

        lengths = range(len(tokens) + 1)
        if (text := until_stop(lengths[-1])) is not None:
            end = bisect.bisect_left(
                lengths, True, key=lambda length: until_stop(length) is not None
            )
            return text, float(log_probabilities[:end].sum())
        text = prompt.continuation(tokens)
        return certain(text, stop) if unfinished else text, float(
            log_probabilities.sum()
        )

    def score(
        self,
        means: Mapping[str, float],
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the loss in nats per token, the perplexity, and the bits per byte of
        the text.

        There are no bits per byte if only ends are predicted, because every document
        has one token.
        """
        ((tokens, size, _),) = references
        per_byte = (
            {"bits_per_byte": means["loss"] * tokens / size / math.log(2)}
            if means and size
            else {}
        )
        return metrics.loss_and_perplexity(means) | per_byte

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, index = np.random.default_rng(seed or 0), np.arange(rows, dtype=np.int32)
        lengths = (
            np.full(rows, length)
            if seed is None
            else draw.integers(1, length + 1, rows)
        )
        ids = draw.integers(
            0, self.config.model.vocab_size, (rows, length + 1), np.int32
        )
        arrays = {
            "text": ids[:, :-1],
            "target": ids[:, 1:],
            "text_length": lengths.astype(np.int32),
            "index": index,
        }
        if self.config.data.layout == "documents":  # two in a row
            place, second = (
                np.arange(length, dtype=np.int32),
                draw.integers(1, length + 1, (rows, 1), np.int32),
            )
            inside = place < lengths[:, None]
            arrays["segment"] = np.where(inside, 1 + (place >= second), 0).astype(
                np.int32
            )
            arrays["position"] = np.where(
                inside, place - second * (place >= second), 0
            ).astype(np.int32)
        return arrays

    def work(self, batch: Arrays) -> Work:
        if "segment" not in batch:
            return super().work(batch)
        tokens = int((batch["segment"] > 0).sum())
        return training_work(self, batch, tokens, tokens / batch["text"].size)

    def preview(self, arrays: Arrays) -> list[str]:
        first = (
            {"text_length": (arrays["segment"] == 1).sum(axis=1)}
            if "segment" in arrays
            else {}
        )
        return super().preview(arrays | first)

    def checks(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> Mapping[str, float]:
        text = batch["text"]
        whole: Any = functools.partial(self.model.apply, {"params": params})
        cache = self._start(params, *text.shape)
        return cache_and_causality(
            whole, self._extend(params), cache, text, self.config.model.vocab_size
        )


class TextScoring(LanguageModeling):
    """The log-likelihood of given texts, with the parameters of a language model."""

    @property
    def scorer(self) -> Task:
        return self

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """See `scored_batches`."""
        limit, rows = self.config.model.max_length, self.config.evaluation.batch_size
        begin = self.config.decoding.prepend_begin
        return scored_batches(
            self.corpus, "text", records, limit=limit, rows=rows, begin=begin
        )

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the log-likelihood of the tokens of each row that count (B,), and
        their number (B,).
        """
        valid = self.valid(batch, "text")
        x, head = self.model.apply(
            {"params": params}, batch["text"], valid, method=hidden_and_head
        )

        def one_place(of: tuple[jax.Array, jax.Array]) -> jax.Array:
            vector, token = of
            return log_probability(head(vector[:, None])[:, 0], token)

        # One place at a time, so that the logits of all places are never in memory.
        found = jax.lax.map(one_place, (jnp.swapaxes(x, 0, 1), batch["target"].T)).T
        counted = valid & (batch["counted"] > 0)
        return {}, {
            "log_likelihood": jnp.where(counted, found, 0.0).sum(axis=1),
            "count": counted.sum(axis=1),
        }

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"log_likelihood", "tokens"} for each row.

        `Batches.join` makes the scores of texts from them.
        """
        columns = outputs["log_likelihood"].tolist(), outputs["count"].tolist()
        return [
            {"log_likelihood": total, "tokens": count}
            for total, count in zip(*columns, strict=True)
        ]
