"""Base classes of tasks on tokenized text."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.data.text import Corpus, Reader, Stream
from transformer_jax.tasks.work import training_work
from transformer_jax.training.task import Arrays, Config, Params, Task, Work


@dataclasses.dataclass(frozen=True)
class TextTaskConfig(Config):
    """The config sections of a task on tokenized text."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        if self.data.max_length > self.model.max_length:
            yield (
                "data.max_length",
                f"must not exceed model.max_length = {self.model.max_length}",
            )


class TextTask(Task):
    """A task whose batches hold padded ids (B, T) and their lengths (B,) for each
    stream of its corpus.

    `init`, `work` and `attention` are implemented for models of one stream, "text",
    which take tokens and a validity mask.
    """

    input_arrays: tuple[str, ...] = ("text", "text_length", "second", "index")
    corpus: Corpus
    model: Any

    def make_corpus(
        self,
        streams: Mapping[str, str],
        workdir: epath.PathLike | None,
        read: Reader,
        others: tuple[str, ...] = (),
    ) -> Corpus:
        """Return the corpus.

        `streams` maps names in a batch to columns, which share one tokenizer.
        """
        config = self.config
        shared = {
            name: Stream(
                column, "tokenizer.json", config.model.vocab_size, "model.vocab_size"
            )
            for name, column in streams.items()
        }
        return Corpus(
            config.data, shared, workdir, read, others, start=config.init_from or None
        )

    @staticmethod
    def valid(batch: Mapping[str, jax.Array], stream: str) -> jax.Array:
        """Return (B, T), True at tokens and False at padding."""
        return (
            jnp.arange(batch[stream].shape[1])[None]
            < batch[f"{stream}_length"][:, None]
        )

    def tokens(self, name: str, ids: np.ndarray) -> tuple[list[str], str]:
        tokenizer = self.corpus.tokenizers[name]
        return tokenizer.shown(ids), tokenizer.decode(ids)

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        return ["the first text of the first batch:", f"  {' '.join(tokens)}"]

    def fingerprint(self, training: bool) -> dict[str, str]:
        return self.corpus.fingerprint(training)

    def work(self, batch: Arrays) -> Work:
        tokens = int(batch["text_length"].sum())
        return training_work(self, batch, tokens, tokens / batch["text"].size)

    def attention(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[
        dict[tuple[str, str, str], jax.Array], dict[str, tuple[jax.Array, jax.Array]]
    ]:
        model = self.model.clone(config=with_weights(self.config.model))
        _, sown = model.apply(
            {"params": params}, *self.arguments(batch), mutable="intermediates"
        )
        return model.attention_maps(sown.get("intermediates", {})), {
            "text": (batch["text"], batch["text_length"])
        }

    def init(self, key: jax.Array) -> Params:
        return self.model.init(
            key, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
        )["params"]

    def arguments(self, batch: Mapping[str, jax.Array]) -> tuple[Any, ...]:
        """Return the arguments of the model."""
        return batch["text"], self.valid(batch, "text")


def segmented(
    batch: Mapping[str, jax.Array], valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the arguments of BERT's encoder: token ids, validity and segments, each
    (B, T).

    A batch may hold "second" (B,), the place at which the second segment starts.
    Without it, there is one segment.
    """
    text = batch["text"]
    if "second" not in batch:
        return text, valid, None
    return (
        text,
        valid,
        (jnp.arange(text.shape[1])[None] >= batch["second"][:, None]).astype(jnp.int32),
    )


def with_weights(config: Any) -> Any:
    """Return the config of a model with the one implementation of attention that
    returns weights, if it has several.
    """
    if "attention_implementation" not in {
        field.name for field in dataclasses.fields(config)
    }:
        return config
    return dataclasses.replace(config, attention_implementation="einsum")


def cache_and_causality(
    whole: Callable[[jax.Array], jax.Array],
    extend: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]],
    cache: Any,
    read: jax.Array,
    vocab_size: int,
) -> dict[str, float]:
    """Compare cached with uncached decoding, and measure how much logits depend on
    later inputs.

    The first value is the largest difference between the logits of `whole(read)`, which
    computes all positions at once, and those of `extend`, which extends `cache` token
    by token. The second value is the largest change in the logits of the first half of
    the positions when the inputs of the second half change. Both are relative to the
    largest logit.

    Args:
        whole: maps inputs (B, T) to logits (B, T, V).
        extend: maps (cache, inputs (B, 1), position) to (logits (B, 1, V), extended
            cache).
        cache: an empty cache for T positions.
        read: (B, T) inputs of the decoder.
        vocab_size: only the first `vocab_size` logits are compared.
    """

    @jax.jit
    def differences() -> tuple[jax.Array, jax.Array]:
        logits, half = whole(read)[..., :vocab_size], read.shape[1] // 2
        past, columns = cache, []
        for t in range(read.shape[1]):
            column, past = extend(past, read[:, t : t + 1], t)
            columns.append(column)
        apart = logits - jnp.concatenate(columns, axis=1)[..., :vocab_size]
        leak = logits - whole(read.at[:, half:].set(0))[..., :vocab_size]
        return jnp.abs(apart).max() / jnp.abs(logits).max(), jnp.abs(
            leak[:, :half]
        ).max() / jnp.abs(logits).max()

    apart, leak = differences()
    return {
        "cached = uncached decoding": float(apart),
        "no token is seen before its place": float(leak),
    }
