"""Language modeling: predict the next token at every position of running text, and continue prompts."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import decoding, losses, metrics
from transformer_jax.data import sources
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import columns_of
from transformer_jax.data.running_text import RunningTextData, text_batches
from transformer_jax.data.text import ladder_batches
from transformer_jax.decoding import SamplingConfig
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from transformer_jax.tasks.text import TextTask, TextTaskConfig, cache_and_causality
from transformer_jax.training.task import Arrays, Mean, Outputs, Params, Record, Work

ARCHITECTURES: dict[str, Any] = {"gpt": GPT, "recurrent_lm": RecurrentLM}


@dataclasses.dataclass(frozen=True)
class LanguageModelingConfig(TextTaskConfig):
    """The config sections of language modeling."""

    model: GPTConfig | RecurrentLMConfig
    data: RunningTextData
    decoding: SamplingConfig = dataclasses.field(metadata={"free": True})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with each other."""
        yield from super().problems()
        if self.decoding.max_extra >= self.model.max_length:
            yield (
                "decoding.max_extra",
                f"must be below model.max_length = {self.model.max_length}, which includes the prompt",
            )


class LanguageModeling(TextTask):
    """Prediction of the next token.

    A batch holds the arrays of `data.running_text.text_batches`. One of prompts, which the model continues, has only
    "text" (B, T), "text_length" (B,) and "index" (B,).
    """

    Config = LanguageModelingConfig
    metrics: ClassVar = {name: name for name in ("loss", "perplexity", "bits_per_byte")}

    def __init__(self, config: LanguageModelingConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir)
        self.model = ARCHITECTURES[config.model.architecture](config.model)
        self.corpus = self.make_corpus({"text": config.data.text_column}, workdir, sources.text_file)

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def _cross_entropy(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> Mean:
        """Return the mean over tokens of -log P(token | preceding tokens)."""
        valid, model = self.valid(batch, "text"), self.config.model
        rngs = None if key is None else {"dropout": key}
        packing = {"segments": batch["segment"], "positions": batch["position"]} if "segment" in batch else {}
        x, lm_head = self.model.apply({"params": params}, batch["text"], valid, **packing, rngs=rngs, method="hidden")
        counted = valid & (batch["counted"] > 0) if "counted" in batch else valid
        return Mean(*losses.next_token(lm_head, x, batch["target"], counted, model.vocab_size, model.dtype))

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> dict[str, Mean]:
        """Return L1 of Radford et al. 2018, eq. 1, per token."""
        return {"loss": self._cross_entropy(params, batch, key)}

    def evaluate(self, params: Params, batch: Mapping[str, jax.Array], greedy: bool) -> tuple[dict[str, Mean], Outputs]:
        """Return the loss of windows, or K continuations of each prompt: tokens (B, K, T), starting with the prompt."""
        if "target" in batch:
            return {"loss": self._cross_entropy(params, batch)}, {}
        special, options = self.corpus.special_ids("text"), self.config.decoding
        prompt, lengths = batch["text"], batch["text_length"]
        rows, width = prompt.shape
        max_length = min(width + options.max_extra, self.config.model.max_length)
        cache = self.model.apply({"params": params}, rows, max_length, method="init_cache")
        extend: Any = functools.partial(self.model.apply, {"params": self.model.for_extend(params)}, method="extend")
        repeat = functools.partial(jnp.repeat, repeats=decoding.copies(options, greedy), axis=0)

        def step(cache: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            logits, cache = extend(cache, token[:, None], position)
            return logits[:, 0], cache

        found = decoding.search(
            decoding.after_prompt(step, repeat(prompt), repeat(lengths)),
            cache,
            options,
            only_greedy=greedy,
            row_ids=batch["index"],
            vocab_size=self.corpus.tokenizers["text"].size,
            batch_size=rows,
            max_length=max_length - 1,
            bos_id=special.begin,
            eos_id=special.end,
            pad_id=special.pad,
        )
        first = jnp.broadcast_to(prompt[:, None, :1], (*found.tokens.shape[:2], 1))
        return {}, {"tokens": jnp.concatenate([first, found.tokens], axis=2)}

    def batches(self, split: str, seed: int | None) -> Batches:
        data, rows = self.config.data, self.config.evaluation.batch_size
        return text_batches(self.corpus, "text", split, seed, layout=data.layout, stride=data.stride, rows=rows)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of prompts. An empty prompt becomes a line break. Long prompts keep their last tokens."""
        (text,), config = columns_of(records, self.columns), self.config
        lines, rows = {"text": [line or "\n" for line in text or ()]}, config.evaluation.batch_size
        limit, key = config.model.max_length - config.decoding.max_extra, "model.max_length - decoding.max_extra"
        return ladder_batches(self.corpus, lines, rows=rows, limit=limit, what="input", end=False, key=key, tail=True)

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"continuation": text} for each prompt, or {"continuations": [text, …]} if there are several.

        The continuation of a prompt without tokens is "". Windows give {}.
        """
        if "tokens" not in outputs:
            return [{} for _ in batch["index"]]
        decode, most = self.corpus.tokenizers["text"].decode, self.config.decoding.max_extra
        found = zip(outputs["tokens"], batch["text_length"], strict=True)
        rows = [[decode(tokens[n : n + most]) if n else "" for tokens in drawn] for drawn, n in found]
        return [{"continuation": row[0]} if len(row) == 1 else {"continuations": row} for row in rows]

    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        """Return the loss in nats per token, the perplexity, and the bits per byte of the text."""
        ((tokens, size, _),) = references
        per_byte = {"bits_per_byte": means["loss"] * tokens / size / math.log(2)} if means else {}
        return metrics.loss_and_perplexity(means) | per_byte

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw, index = np.random.default_rng(seed or 0), np.arange(rows, dtype=np.int32)
        lengths = np.full(rows, length) if seed is None else draw.integers(1, length + 1, rows)
        ids = draw.integers(0, self.config.model.vocab_size, (rows, length + 1), np.int32)
        arrays = {"text": ids[:, :-1], "target": ids[:, 1:], "text_length": lengths.astype(np.int32), "index": index}
        if self.config.data.layout == "documents":  # two in a row
            place, second = np.arange(length, dtype=np.int32), draw.integers(1, length + 1, (rows, 1), np.int32)
            inside = place < lengths[:, None]
            arrays["segment"] = np.where(inside, 1 + (place >= second), 0).astype(np.int32)
            arrays["position"] = np.where(inside, place - second * (place >= second), 0).astype(np.int32)
        return arrays

    def work(self, batch: Arrays) -> Work:
        """Return the work on the documents of a batch, each of which sees only itself."""
        if "segment" in batch:
            segment = batch["segment"]
            of = segment + (segment.shape[1] + 1) * np.arange(len(segment))[:, None]
            batch = {"text_length": np.bincount(of[segment > 0])}
        return super().work(batch)

    def preview(self, arrays: Arrays) -> list[str]:
        first = {"text_length": (arrays["segment"] == 1).sum(axis=1)} if "segment" in arrays else {}
        return super().preview(arrays | first)

    def checks(self, params: Params, batch: Mapping[str, jax.Array]) -> Mapping[str, float]:
        apply: Any = functools.partial(self.model.apply, {"params": params})
        cache = apply(*batch["text"].shape, method="init_cache")
        extend = functools.partial(apply, method="extend")
        return cache_and_causality(apply, extend, cache, batch["text"], self.config.model.vocab_size)
