"""What tasks over tokenized text have in common."""

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
    """The sections of a task over tokenized text."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that do not go together."""
        yield from super().problems()
        if self.data.max_length > self.model.max_length:
            yield "data.max_length", f"must not be beyond model.max_length = {self.model.max_length}"


class TextTask(Task):
    """A task whose batches hold, for each stream of its corpus, padded ids (B, T) and their lengths (B,).

    `work` and `attention` are those of a model of one stream, "text", that is called with tokens and validity.
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
    """Compare the logits of all positions at once, `whole(read)`, with those of a cache, extended token by token.

    read (B, T) are the decoder's inputs; logits are (B, T, V). The second figure is how much the logits of the first
    half change with the inputs of the second. Both are relative to the largest logit.
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
