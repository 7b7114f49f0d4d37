"""Embeddings that start with word vectors: rules for their config, and their rows."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transformer_jax.data import word_vectors
from transformer_jax.data.files import DataError
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.errors import UserError
from transformer_jax.models.layers import TokenVectors
from transformer_jax.training.task import Parts

log = logging.getLogger(__name__)

SHOWN = 8  # tokens without a vector that the log names
BEGINNINGS = {
    "random": "start with random values",
    "zero": "start with zeros",
    "mean": "start with the mean of these vectors",
}


@dataclasses.dataclass(frozen=True)
class WordTable:
    """An embedding that starts with word vectors, see `training.task.GivenTable`.

    The model reads the vectors of the file as they are: where it multiplies the rows of
    its embedding by a factor, they are divided by it before.

    section: name of the config section with the file, e.g. "vectors".
    options: that section.
    vectors: what the model says of its vectors of tokens.
    stream: name of the stream of tokens.
    path: path of the table in the parameters.
    size: the number of rows that stand for tokens of the vocabulary. None: all.
    """

    section: str
    options: VectorsConfig
    vectors: TokenVectors
    stream: str
    path: str
    size: int | None = None

    @property
    def frozen(self) -> Parts:
        """The rows that training leaves as they are."""
        return {self.path: self.size} if self.options.frozen else {}

    def problems(self, config: Any) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy), given the whole config."""
        kind = config.data.tokenizer
        if kind != "words":
            yield (
                f"{self.section}.file",
                (
                    f"needs data.tokenizer = 'words': the tokens of {kind!r} are not "
                    "whole words, so the file has no vectors for them. "
                    "Change the tokenizer, or set this to ''"
                ),
            )
        if config.init_from:
            yield (
                f"{self.section}.file",
                "must be '' with init_from, whose embedding is used: choose one",
            )

    def advice(self) -> Iterator[str]:
        """Yield warnings about values that are valid but probably unintended."""
        if self.options.frozen and self.vectors.is_output:
            yield (
                f"config.{self.section}.frozen = True: this embedding is also the "
                "output layer, whose weights are frozen with it; to train them, give "
                "the output layer its own table, if model.tie_embeddings is a key"
            )

    def check(self) -> None:
        """Raise ValueError if the file cannot be read or has vectors of another width.

        This reads only the first line.
        """
        file = self.options.file
        try:
            width = word_vectors.width_of(file)
        except DataError as error:
            raise DataError(f"config.{self.section}.file: {error}") from error
        if width != self.vectors.width:
            key = f"model.{self.vectors.key}"
            raise UserError(
                f"config.{self.section}.file = {file!r}: its vectors have {width} "
                f"numbers, but config.{key} = {self.vectors.width}: "
                f"set {key} to {width}, or name another file"
            )

    def rows(self, tokens: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first rows of the table (n, D), float32, and (n,), True for those
        that do not start with random values. Logs how many words have vectors.

        `tokens` are the n tokens of the vocabulary, "" for unused ids.

        Raises ValueError if the file is invalid, or has none of the tokens.
        """
        file = self.options.file
        vectors, found = word_vectors.read(file, tokens, self.vectors.width)
        if not found.any():
            raise UserError(
                f"config.{self.section}.file = {file!r} has none of the "
                f"{len(tokens):,} tokens of the vocabulary, e.g. {tokens[-1]!r}: "
                "name a file of their language, and set data.lowercase to True if its "
                "words are in lower case"
            )
        self._report(tokens, found)
        given = found
        if self.options.missing != "random":
            given = np.ones_like(found)
        if self.options.missing == "mean":
            vectors[~found] = vectors[found].mean(axis=0, dtype=np.float64)
        return vectors / np.float32(self.vectors.factor), given

    def _report(self, tokens: Sequence[str], found: np.ndarray) -> None:
        """Log how many tokens have a vector, and the first of those that have none."""
        lacking = [
            token for token, has in zip(tokens, found, strict=True) if token and not has
        ]
        total = int(found.sum()) + len(lacking)
        line = (
            f"{self.section}: {self.options.file} has {found.sum():,} of the "
            f"{total:,} tokens of the vocabulary"
        )
        if lacking:
            names = " ".join(lacking[:SHOWN])
            more = " …" if len(lacking) > SHOWN else ""
            beginning = BEGINNINGS[self.options.missing]
            line += f"; the other {len(lacking):,} {beginning}: {names}{more}"
        log.info("%s", line)
