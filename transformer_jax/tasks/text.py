"""Base classes of tasks on tokenized text."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.text import Corpus
from transformer_jax.models.counting import forward_flops
from transformer_jax.training.task import Arrays, Config, Params, Task, Work


@dataclasses.dataclass(frozen=True)
class TextTaskConfig(Config):
    """The config sections of a task on tokenized text."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with each other."""
        yield from super().problems()
        if self.data.max_length > self.model.max_length:
            yield "data.max_length", f"must not exceed model.max_length = {self.model.max_length}"


class TextTask(Task):
    """A task whose batches hold padded ids (B, T) and their lengths (B,) for each stream of its corpus.

    `work` and `attention` are implemented for models of one stream, "text", which take tokens and a validity mask.
    """

    corpus: Corpus
    model: Any

    @staticmethod
    def valid(batch: Mapping[str, jax.Array], stream: str) -> jax.Array:
        """Return (B, T), True at tokens and False at padding."""
        return jnp.arange(batch[stream].shape[1])[None] < batch[f"{stream}_length"][:, None]

    def tokens(self, name: str, ids: np.ndarray) -> tuple[list[str], str]:
        tokenizer = self.corpus.tokenizers[name]
        return tokenizer.shown(ids), tokenizer.decode(ids)

    def fingerprint(self, training: bool) -> dict[str, str]:
        return self.corpus.fingerprint(training)

    def work(self, batch: Arrays) -> Work:
        lengths = batch["text_length"]
        return Work(int(lengths.sum()), 3 * float(forward_flops(self.config.model, lengths).sum()))

    def attention(
        self, params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[dict[tuple[str, str, str], jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:
        config = dataclasses.replace(self.config.model, attention_implementation="einsum")  # others return no weights
        model, text = self.model.clone(config=config), batch["text"]
        _, sown = model.apply({"params": params}, text, self.valid(batch, "text"), mutable="intermediates")
        return model.attention_maps(sown["intermediates"]), {"text": (text, batch["text_length"])}


def cache_and_causality(
    whole: Callable[[jax.Array], jax.Array],
    extend: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]],
    cache: Any,
    read: jax.Array,
    vocab_size: int,
) -> dict[str, float]:
    """Compare cached with uncached decoding, and measure how much logits depend on later inputs.

    The first value is the largest difference between the logits of `whole(read)`, which computes all positions at once,
    and those of `extend`, which extends `cache` token by token. The second value is the largest change in the logits of
    the first half of the positions when the inputs of the second half change. Both are relative to the largest logit.

    Args:
        whole: maps inputs (B, T) to logits (B, T, V).
        extend: maps (cache, inputs (B, 1), position) to (logits (B, 1, V), extended cache).
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
        return jnp.abs(apart).max() / jnp.abs(logits).max(), jnp.abs(leak[:, :half]).max() / jnp.abs(logits).max()

    apart, leak = differences()
    return {"cached = uncached decoding": float(apart), "no token is seen before its place": float(leak)}
