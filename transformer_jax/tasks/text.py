"""Shared parts of tasks on tokenized text: the corpus, validity, the model, synthetic
batches, and what people see of a batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.data.corpus import Corpus, Reader
from transformer_jax.data.streams import Tokens
from transformer_jax.models.layers import Head
from transformer_jax.training.task import (
    Arrays,
    Attention,
    Axis,
    Config,
    DeviceArrays,
    Forward,
    Params,
    Shown,
    check_rows,
)

Maps = dict[tuple[str, str, str], jax.Array]


@dataclasses.dataclass(frozen=True)
class TextTaskConfig(Config):
    """The config sections of a task on tokenized text."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        yield from length_problems(self)


def length_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, rule and remedy) if the texts are longer than what the model
    reads.
    """
    if config.data.max_length > config.model.max_length:
        yield (
            "data.max_length",
            f"must not exceed model.max_length = {config.model.max_length}",
        )


def make_corpus(
    config: Any,
    streams: Mapping[str, str],
    workdir: epath.PathLike | None,
    read: Reader,
    others: tuple[str, ...] = (),
) -> Corpus:
    """Return the corpus of a task whose texts share one tokenizer.

    `streams` maps names in a batch to columns. `others` are further columns.
    """
    size = config.model.vocab_size
    shared = {
        name: Tokens(column, "tokenizer.json", size, "model.vocab_size")
        for name, column in streams.items()
    }
    start = config.init_from or None
    return Corpus(config.data, shared, workdir, read, others, start=start)


def split_columns(
    corpus: Corpus, split: str, names: Sequence[str]
) -> tuple[list[Sequence[str]], str]:
    """Return columns of a split of a table, and the source of its rows for messages."""
    table = corpus.open(split)
    source = f"{table.where}, split {split}"
    if table.first_line not in (0, 2):
        source += f" (row 1 is line {table.first_line})"
    return [table.column(name) for name in names], source


def valid(batch: DeviceArrays, stream: str = "text") -> jax.Array:
    """Return (B, T), True at tokens and False at padding."""
    positions = jnp.arange(batch[stream].shape[1])[None]
    return positions < batch[f"{stream}_length"][:, None]


def segmented(
    batch: DeviceArrays, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the arguments of an encoder of texts: token ids, validity and segments,
    each (B, T).

    A batch may hold "second" (B,), the position at which the second segment starts.
    Without it, there is one segment, and the third argument is None.
    """
    text = batch["text"]
    if "second" not in batch:
        return text, valid, None
    positions = jnp.arange(text.shape[1])[None]
    segments = (positions >= batch["second"][:, None]).astype(jnp.int32)
    return text, valid, segments


def unsegmented(batch: DeviceArrays, valid: jax.Array) -> tuple[Any, ...]:
    """Return the arguments of an encoder that does not tell the texts of a pair apart:
    token ids and validity, each (B, T), and None.
    """
    return batch["text"], valid, None


def hidden_and_head(model: Any, *args: Any, **options: Any) -> tuple[jax.Array, Head]:
    """Return `hidden` of a language model, given its arguments, and `head`.

    Pass it to `model.apply` as the method.
    """
    return model.hidden(*args, **options), model.head()


@dataclasses.dataclass(frozen=True)
class Network:
    """A model that reads the stream "text" of a batch, see `training.task.Network`.

    model: the Flax module. Its first arguments are ids and their validity, both (B, T).
    shown: the function from ids to their readable tokens and their text.
    arrange: the function from a batch and its validity (B, T) to the arguments of the
        model.
    views: the number of rows that the model reads for each row of a batch.
    outcomes: the function from numbers of outcomes to their names. None: the numbers.
    logits: the method of the model that returns logits. None: the model itself.
    """

    model: nn.Module
    shown: Shown
    arrange: Callable[[DeviceArrays, jax.Array], tuple[Any, ...]] = segmented
    views: int = 1
    outcomes: Shown | None = None
    logits: Callable[..., Any] | None = None

    def init(self, key: jax.Array) -> Params:
        """Return new parameters."""
        tokens = jnp.zeros((self.views, 1), jnp.int32)
        return self.model.init(key, tokens, tokens == 0)["params"]

    def arguments(self, batch: DeviceArrays) -> tuple[Any, ...]:
        """Return the arguments of the model."""
        return self.arrange(batch, valid(batch))

    def output(
        self,
        params: Params,
        batch: DeviceArrays,
        key: jax.Array | None = None,
        method: Callable[..., Any] | None = None,
    ) -> Any:
        """Return what the model returns, or `method` of it, with dropout if there is a
        key.
        """
        rngs = None if key is None else {"dropout": key}
        arguments = self.arguments(batch)
        return self.model.apply(
            {"params": params}, *arguments, rngs=rngs, method=method
        )

    def attention(self, params: Params, batch: DeviceArrays) -> Attention:
        """Return what `Task.attention` returns."""
        model: Any = self.model.clone(config=with_weights(self.model.config))
        _, sown = model.apply(
            {"params": params}, *self.arguments(batch), mutable="intermediates"
        )
        maps = model.attention_maps(sown.get("intermediates", {}))
        axis = Axis(batch["text"], batch["text_length"], self.shown)
        return maps, {"text": axis}

    def forward(self, params: Params, batch: DeviceArrays) -> Forward:
        """Return what `Inspected.forward` returns.

        The two views of a pair are not told apart, so they are no inputs.
        """
        logits = self.output(params, batch, method=self.logits)
        lengths = batch["text_length"]
        axis = Axis(batch["text"], lengths, self.shown)
        chosen = logits.argmax(axis=-1)
        if logits.ndim == 2:
            chosen = chosen[:, None]
            lengths = jnp.ones_like(lengths)
        outcomes = Axis(chosen, lengths, self.outcomes or numbered)
        return Forward(logits, outcomes, {"embedding": axis} if self.views == 1 else {})


# What people see of a batch.


def numbered(numbers: np.ndarray) -> tuple[list[str], str]:
    """Return the numbers of outcomes as their names, and no text."""
    return [str(number) for number in numbers], ""


def named(names: Sequence[str]) -> Shown:
    """Return the function from numbers of outcomes to their names, and no text."""

    def shown(numbers: np.ndarray) -> tuple[list[str], str]:
        return [names[number] for number in numbers], ""

    return shown


def shown_by(corpus: Corpus, stream: str = "text") -> Shown:
    """Return the function from ids of a stream to their readable tokens and their
    text.
    """

    def shown(ids: np.ndarray) -> tuple[list[str], str]:
        tokenizer = corpus.tokenizers[stream]
        return tokenizer.shown(ids), tokenizer.decode(ids)

    return shown


def first_tokens(arrays: Arrays, shown: Shown) -> list[str]:
    """Return the readable tokens of the first text of a batch.

    Raises:
        ValueError: a row of the batch is empty.
    """
    check_rows(arrays)
    tokens, _ = shown(arrays["text"][0, : arrays["text_length"][0]])
    return tokens


def preview(
    arrays: Arrays, shown: Shown, what: str = "text", label: str = ""
) -> list[str]:
    """Return lines that show the first text of a batch, after its label if it has one.

    Raises:
        ValueError: a row of the batch is empty.
    """
    tokens = " ".join(first_tokens(arrays, shown))
    line = f"  {label}: {tokens}" if label else f"  {tokens}"
    return [f"the first {what} of the first batch:", line]


def with_weights(config: Any) -> Any:
    """Return the config of a model with the one implementation of attention that
    returns weights, if it has several.
    """
    names = {field.name for field in dataclasses.fields(config)}
    if "attention_implementation" not in names:
        return config
    return dataclasses.replace(config, attention_implementation="einsum")


# Synthetic batches.


class Dummies:
    """Random arrays of a synthetic batch.

    Attributes:
        random: the generator.
        lengths: an array of `shape` with the number of tokens of each text: `length`,
            or random numbers up to it with a `seed`.
    """

    def __init__(self, shape: tuple[int, ...], length: int, seed: int | None):
        self.random = np.random.default_rng(seed or 0)
        self._full = (*shape, length)
        self.lengths = np.full(shape, length)
        if seed is not None:
            self.lengths = self.random.integers(1, length + 1, shape)

    def text(self, vocab_size: int) -> Arrays:
        """Return "text", "text_length", and "index" (rows,)."""
        return {
            "text": self.random.integers(0, vocab_size, self._full, np.int32),
            "text_length": self.lengths.astype(np.int32),
            "index": np.arange(len(self.lengths), dtype=np.int32),
        }

    def positions(self) -> np.ndarray:
        """Return a position in each text, or its length."""
        return self.random.integers(0, self.lengths + 1).astype(np.int32)


# Checks.


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
        logits = whole(read)[..., :vocab_size]
        half = read.shape[1] // 2
        past = cache
        columns = []
        for t in range(read.shape[1]):
            column, past = extend(past, read[:, t : t + 1], t)
            columns.append(column)
        apart = logits - jnp.concatenate(columns, axis=1)[..., :vocab_size]
        leak = logits - whole(read.at[:, half:].set(0))[..., :vocab_size]
        largest = jnp.abs(logits).max()
        return jnp.abs(apart).max() / largest, jnp.abs(leak[:, :half]).max() / largest

    apart, leak = differences()
    return {
        "cached = uncached decoding": float(apart),
        "no token is seen before its place": float(leak),
    }
