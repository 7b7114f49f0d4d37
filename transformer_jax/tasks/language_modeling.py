"""Language modelling: windows of running text, the next token at every position, continuations of a prompt."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import decoding, losses, metrics
from transformer_jax.data import sources
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import columns_of
from transformer_jax.data.text import Corpus, Stream, TextData, ladder_batches, window_batches
from transformer_jax.decoding import SamplingConfig
from transformer_jax.models.counting import forward_flops
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.tasks.text import TextTask, cache_and_causality
from transformer_jax.training.task import Arrays, Config, Mean, Outputs, Params, Record, Work


@dataclasses.dataclass(frozen=True)
class LanguageModelingConfig(Config):
    """The sections of this task. `data.max_length` is the length of a window."""

    model: GPTConfig
    data: TextData
    decoding: SamplingConfig = dataclasses.field(metadata={"free": True})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that do not go together."""
        yield from super().problems()
        if self.data.max_length > self.model.max_length:
            yield "data.max_length", f"must not be beyond model.max_length = {self.model.max_length}"


class LanguageModeling(TextTask):
    """A batch holds "text" (B, T), the "target" (B, T) that follows each token, "text_length" (B,) and "index" (B,).

    A prompt has no target: the model continues it.
    """

    Config = LanguageModelingConfig

    def __init__(self, config: LanguageModelingConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir)
        self.model = GPT(config.model)
        self.streams = {"text": Stream("text", "tokenizer.json", config.model.vocab_size, "model.vocab_size")}
        self.corpus = Corpus(config.data, self.streams, workdir, sources.text_file)

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def _cross_entropy(self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> Mean:
        """Return the mean over tokens of -log P(token | those before)."""
        valid, model = self.valid(batch, "text"), self.config.model
        rngs = None if key is None else {"dropout": key}
        hidden: Any = self.model.apply({"params": params}, batch["text"], valid, rngs=rngs, method="hidden")
        x, lm_head = hidden
        return Mean(*losses.next_token(lm_head, x, batch["target"], valid, model.vocab_size, model.dtype))

    def loss(
        self, params: Params, batch: Mapping[str, jax.Array], key: jax.Array, step: jax.Array | int
    ) -> dict[str, Mean]:
        """Return L1 of Radford et al. 2018, eq. 1, per token."""
        return {"loss": self._cross_entropy(params, batch, key)}

    def evaluate(self, params: Params, batch: Mapping[str, jax.Array], greedy: bool) -> tuple[dict[str, Mean], Outputs]:
        """Return the loss of windows; of prompts the K continuations: tokens (B, K, T), the prompt first."""
        if "target" in batch:
            return {"loss": self._cross_entropy(params, batch)}, {}
        prompt, lengths, options = batch["text"], batch["text_length"], self.config.decoding
        rows, width = prompt.shape
        max_length = min(width + options.max_extra, self.config.model.max_length)
        cache = self.model.apply({"params": params}, rows, max_length, method="init_cache")
        extend: Any = functools.partial(self.model.apply, {"params": self.model.for_extend(params)}, method="extend")
        repeat = functools.partial(jnp.repeat, repeats=decoding.copies(options, greedy), axis=0)

        def step(cache: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            logits, cache = extend(cache, token[:, None], position)
            return logits[:, 0], cache

        special = self.corpus.special_ids("text")
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
        first = jnp.broadcast_to(batch["text"][:, None, :1], (*found.tokens.shape[:2], 1))
        return {}, {"tokens": jnp.concatenate([first, found.tokens], axis=2)}

    def batches(self, split: str, seed: int | None) -> Batches:
        return window_batches(self.corpus, "text", split, seed, rows=self.config.evaluation.batch_size)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of prompts. An empty prompt becomes a line break, after which anything may follow."""
        (text,), config = columns_of(records, self.columns), self.config
        lines = {"text": [line or "\n" for line in text or ()]}
        limit = max(config.model.max_length - config.decoding.max_extra, 1)
        return ladder_batches(
            self.corpus, lines, rows=config.evaluation.batch_size, limit=limit, what="input", end=False
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"text"}: prompt and continuation; with `decoding.n_best` above 1 {"texts"}; {} for windows."""
        if "tokens" not in outputs:
            return [{} for _ in batch["index"]]
        decode = self.corpus.tokenizers["text"].decode
        rows = [[decode(tokens) for tokens in row] for row in outputs["tokens"]]
        return [{"text": row[0]} if len(row) == 1 else {"texts": row} for row in rows]

    def score(
        self, means: Mapping[str, float], predictions: Sequence[dict[str, Any]], references: Sequence[Any]
    ) -> dict[str, float | str]:
        """Return loss in nats per token, perplexity and bits per byte of the text."""
        per_byte = sum(tokens for tokens, _ in references) / sum(size for _, size in references)
        scores = metrics.loss_and_perplexity(means)
        return scores | {"bits_per_byte": means["loss"] * per_byte / math.log(2)}

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw = np.random.default_rng(seed or 0)
        lengths = np.full(rows, length) if seed is None else draw.integers(1, length + 1, rows)
        ids = draw.integers(0, self.config.model.vocab_size, (rows, length + 1), np.int32)
        index = np.arange(rows, dtype=np.int32)
        return {"text": ids[:, :-1], "target": ids[:, 1:], "text_length": lengths.astype(np.int32), "index": index}

    def work(self, batch: Arrays) -> Work:
        lengths = batch["text_length"]
        return Work(int(lengths.sum()), 3 * float(forward_flops(self.config.model, lengths).sum()))

    def preview(self, arrays: Arrays) -> list[str]:
        tokens = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        return ["the first window of the first batch:", f"  {' '.join(tokens)!r}"]

    def checks(self, params: Params, batch: Mapping[str, jax.Array]) -> Mapping[str, float]:
        apply: Any = functools.partial(self.model.apply, {"params": params})
        cache = apply(*batch["text"].shape, method="init_cache")
        extend = functools.partial(apply, method="extend")
        return cache_and_causality(apply, extend, cache, batch["text"], self.config.model.vocab_size)

    def attention(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[dict[tuple[str, str, str], jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:
        model = GPT(dataclasses.replace(self.config.model, attention_implementation="einsum"))
        _, sown = model.apply({"params": params}, batch["text"], self.valid(batch, "text"), mutable="intermediates")
        return model.attention_maps(sown["intermediates"]), {"text": (batch["text"], batch["text_length"])}
