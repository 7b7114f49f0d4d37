"""Streams: what a column holds becomes rows of numbers.

A column is a sequence of e.g. lines or images, one for each example. A stream turns it
into a `Ragged`: for each example, a row of ids or of vectors. It faces a front end of
the models, which maps such rows to vectors of the model's width.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data import sound
from transformer_jax.data.files import DataError
from transformer_jax.data.images import grid_of
from transformer_jax.data.languages import encode_marked, groups_of
from transformer_jax.data.mixture import check_prefixes
from transformer_jax.data.photographs import read_photograph
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.errors import UserError


class SpecialIds(NamedTuple):
    """Ids that begin, end and pad a sequence.

    If a vocabulary has no begin id, its end id takes that role (GPT-2).
    """

    begin: int
    end: int
    pad: int | None


TRAINED_HERE = SpecialIds(begin=1, end=2, pad=0)  # positions in `tokenizers.SPECIALS`


class Stream(ABC):
    """A column, and its encoding as rows of numbers.

    Attributes:
        column: name of the column.
        limit: most positions of a row that the model can read. None: `max_length` of
            the config.
        limit_words: the limit in words, for messages, e.g. "model.max_length = 256".
        trailing: shape of a position: () for a number, (C,) for a vector.
        dtype: type of a padded batch of rows.
        entry: what an entry of the column is called in messages.
        unit: what its positions are called.
    """

    column: str
    limit: int | None
    limit_words: str
    trailing: tuple[int, ...] = ()
    dtype: type = np.float32
    entry = "example"
    unit = "positions"

    @abstractmethod
    def encode(
        self, column: Sequence[Any], begin: bool = False, end: bool = True
    ) -> Ragged:
        """Return a row for each entry of a column.

        `begin` and `end` ask for special ids around a text. Only texts have them.

        Raises:
            DataError: an entry cannot be encoded.
        """

    @abstractmethod
    def shown(self, row: np.ndarray) -> tuple[list[str], str]:
        """Return a readable label for each position of a row, and the row as text, or
        "" if it is no text.
        """

    def picture(self, row: np.ndarray) -> np.ndarray | None:
        """Return RGB bytes (height, width, 3) that show a row, or None.

        Its positions, or the vectors that a front end makes of them, divide the picture
        into equal parts.
        """
        return None

    @abstractmethod
    def dummy(
        self, draw: np.random.Generator, lengths: np.ndarray, width: int
    ) -> np.ndarray:
        """Return random rows of `lengths` (B,), padded to `width` positions."""

    def added(self, begin: bool, end: bool) -> int:
        """Return the number of positions that `encode` adds to a row."""
        return 0

    @property
    def closing(self) -> int:
        """The number of positions that `encode` adds at the end of a row."""
        return 0

    def groups(self, column: Sequence[Any]) -> np.ndarray | None:
        """Return the group of each entry (n,), from 0, if entries of different groups
        must not be in one batch, or None.
        """
        return None

    def faults(self, rows: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        """Return {what may be wrong with a padded row: (B,), True where it is}."""
        return {}

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of what the encoding depends on, besides the config."""
        return {}


@dataclasses.dataclass(frozen=True)
class Tokens(Stream):
    """Text as ids of a tokenizer.

    Attributes:
        file: name of the tokenizer's file in the workdir. Streams with the same file
            share one tokenizer.
        vocab_size: size of the model's vocabulary.
        key: config key of `vocab_size`, for messages, e.g. "model.source_vocab_size".
        load: function that returns the tokenizer, given by the corpus. None: there is
            no workdir, and special ids are those of tokenizers trained by this package.
        marks: tokens of which each text must begin with one, see `languages`.
        prefixes: words of which each text must begin with one, see `mixture`.
        apart: the token is no part of the row. It says to which group the row belongs.
        frame: tokens before each text, and after its end token; "" for none, (): none.
    """

    column: str
    file: str
    vocab_size: int
    key: str
    load: Callable[[], Tokenizer] | None = None
    limit: int | None = None
    limit_words: str = ""
    dtype: type = np.int32
    marks: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    apart: bool = False
    frame: tuple[str, ...] = ()
    entry = "line"
    unit = "tokens"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: there is no workdir, or see `TokenizerStore.tokenizer`.
        """
        if self.load is None:
            raise UserError("without a workdir there are no tokenizers: pass a workdir")
        return self.load()

    @property
    def size(self) -> int:
        """The number of ids: of the tokenizer, or of the model's embedding if there is
        no tokenizer.
        """
        return self.vocab_size if self.load is None else self.tokenizer.size

    @functools.cached_property
    def frame_ids(self) -> tuple[int | None, int | None]:
        """The ids of `frame`. None: there is none.

        Raises:
            TokenizerError: the tokenizer lacks one of these tokens.
        """
        ids: list[int | None] = []
        for token in self.frame or ("", ""):
            if not token:
                ids.append(None)
                continue
            if self.load is None:
                ids.append(TRAINED_HERE.begin)
                continue
            ids.append(self.tokenizer.id_of(token))
            if ids[-1] is None:
                raise TokenizerError(
                    f"{self.file} has no token {token!r}, which should be before or "
                    f"after each {self.column}: change data.source_frame and "
                    "data.target_frame, e.g. to the language ids of this tokenizer"
                )
        before, after = ids
        return before, after

    def encode(
        self, column: Sequence[Any], begin: bool = False, end: bool = True
    ) -> Ragged:
        """Return the ids of each line, with the tokenizer's begin id before it and its
        end id after it if requested. With the end id comes the frame.

        Raises:
            TokenizerError: the tokenizer has no id for what is requested.
            DataError: a line does not begin with one of `marks` or `prefixes`.
        """
        tokenizer = self.tokenizer
        added: dict[str, int | None] = {}
        if begin:
            added["begin"] = tokenizer.bos_id
        if end:
            added["end"] = tokenizer.eos_id
        for name, special_id in added.items():
            if special_id is None:
                raise TokenizerError(
                    f"{self.file} has no special id for the {name} of a line: "
                    "use a tokenizer that has one"
                )
        if self.prefixes:
            check_prefixes(column, self.prefixes)
        if self.marks:
            kept = () if self.apart else self.marks
            rows = encode_marked(tokenizer, column, self.marks, kept, **added)
        else:
            rows = tokenizer.encode(column, **added)
        return rows.framed(*self.frame_ids) if end else rows

    def groups(self, column: Sequence[Any]) -> np.ndarray | None:
        return groups_of(column, self.marks) if self.apart else None

    def shown(self, row: np.ndarray) -> tuple[list[str], str]:
        return self.tokenizer.shown(row), self.text(row)

    def text(self, ids: np.ndarray) -> str:
        """Return the text of ids up to the first end id, without the frame."""
        framing = self.frame_ids
        return self.tokenizer.decode([i for i in ids if i not in framing])

    def dummy(
        self, draw: np.random.Generator, lengths: np.ndarray, width: int
    ) -> np.ndarray:
        """Return random ids, each row with the end id, and what follows it, as its
        last.
        """
        lowest = min(4, self.vocab_size - 1)  # no special id, if there are others
        ids = draw.integers(lowest, self.vocab_size, (len(lengths), width), np.int32)
        position = np.arange(width)
        last = lengths[:, None] - 1
        _, after = self.frame_ids
        ids = np.where(position <= last, ids, 0)
        if after is not None:
            ids = np.where(position == last, after, ids)
        ids = np.where(position == self._ends(lengths), self.special_ids.end, ids)
        return ids.astype(np.int32)

    def _ends(self, lengths: np.ndarray) -> np.ndarray:
        """Return the positions of the end ids (B, 1) of rows of `lengths` (B,)."""
        return (lengths - self.closing)[:, None]

    def added(self, begin: bool, end: bool) -> int:
        framing = sum(i is not None for i in self.frame_ids) if end else 0
        return int(begin) + int(end) + framing

    @property
    def closing(self) -> int:
        _, after = self.frame_ids
        return 1 if after is None else 2

    def faults(self, rows: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        positions = np.maximum(self._ends(lengths), 0)
        ends = np.take_along_axis(rows, positions, axis=1)[:, 0]
        valid = np.arange(rows.shape[1]) < lengths[:, None]
        beyond = (valid & (rows >= self.vocab_size)).any(axis=1)
        return {
            "does not end in EOS": ends != self.special_ids.end,
            f"has ids beyond the vocabulary of {self.vocab_size}": beyond,
        }

    def fingerprint(self) -> dict[str, str]:
        return {"tokenizer": self.tokenizer.sha256}

    @property
    def optional_ids(self) -> tuple[int | None, int | None, int | None]:
        """The ids of begin, end and padding. None: the tokenizer has no such id.

        A decoder begins with the token that follows the end of its texts, if there is
        one (Liu et al. 2020, Figure 1).
        """
        _, after = self.frame_ids
        if self.load is None:
            return TRAINED_HERE
        begin = self.tokenizer.bos_id if after is None else after
        return begin, self.tokenizer.eos_id, self.tokenizer.pad_id

    @property
    def special_ids(self) -> SpecialIds:
        """The ids that begin, end and pad a sequence.

        Raises:
            TokenizerError: the tokenizer has no end id.
        """
        begin, end, pad = self.optional_ids
        if end is None:
            raise TokenizerError(
                f"{self.file} has no special id for the end of a text: "
                "use a tokenizer that has one"
            )
        return SpecialIds(end if begin is None else begin, end, pad)


class Frames(Stream):
    """Sound as log-mel vectors (S, C), see `sound.log_mel`.

    Args:
        column: name of the column. An entry is an array of samples (n,), or the name of
            a file of sound, relative to the working directory.
        rate: samples per second.
        bands: number of mel bands.
        stacked: number of adjacent windows that form one position (Sak et al. 2015), so
            C = stacked · bands.
        limit: see `Stream`.
    """

    limit: int

    def __init__(self, column: str, rate: int, bands: int, stacked: int, limit: int):
        self.column = column
        self.rate = rate
        self.bands = bands
        self.stacked = stacked
        self.limit = limit
        self.limit_words = f"input.max_positions = {limit}"
        self.features = stacked * bands
        self.trailing = (self.features,)

    def vectors(self, entry: Any) -> np.ndarray:
        """Return the vectors (S, C) of one sound, and none without a sample.

        Of a sound of more positions than the limit, one more is returned.

        Raises:
            ValueError: the file cannot be read or has another rate, or the array has
                several channels.
        """
        longest = sound.samples_beyond(self.limit, self.stacked, self.rate)
        if isinstance(entry, str):
            entry = sound.read_sound(Path(entry), self.rate, longest)
        samples = np.asarray(entry)[:longest]
        if samples.ndim != 1:
            raise UserError(
                f"has the shape {samples.shape}: must be the samples (n,) of one "
                "channel, e.g. the mean of several"
            )
        if not len(samples):
            return np.zeros((0, self.features), np.float32)
        frames = sound.log_mel(samples.astype(np.float64), self.rate, self.bands)
        missing = -len(frames) % self.stacked
        frames = np.pad(frames, ((0, missing), (0, 0)))
        return frames.reshape(-1, self.features)

    def encode(
        self, column: Sequence[Any], begin: bool = False, end: bool = True
    ) -> Ragged:
        return _stacked(self.vectors, column, self.column, self.trailing)

    def shown(self, row: np.ndarray) -> tuple[list[str], str]:
        """Return the time in seconds at which each position starts."""
        seconds = np.arange(len(row)) * self.stacked * sound.HOP
        return [f"{time:.2f} s" for time in seconds], ""

    def picture(self, row: np.ndarray) -> np.ndarray | None:
        """Return the spectrogram: time from left to right, high bands at the top, and
        bright where they are strong.
        """
        if not len(row):
            return None
        windows = np.asarray(row).reshape(-1, self.bands)
        # features have mean 0 and variance 1
        brightness = np.clip((windows + 3) / 6, 0, 1)
        grey = np.round(255 * brightness).astype(np.uint8)
        upright = grey.T[::-1]
        return np.repeat(upright[:, :, None], 3, axis=2)

    def dummy(
        self, draw: np.random.Generator, lengths: np.ndarray, width: int
    ) -> np.ndarray:
        return _dummy_vectors(draw, lengths, width, self.features)


class Grid(Stream):
    """An image, or a grid of features, as its cells (S, C) in reading order.

    Args:
        column: name of the column. An entry is an array (rows, columns) or (rows,
            columns, channels), as such or as JSON, or the name of a .npy file, relative
            to the working directory. Unsigned bytes are divided by 255.
        shape: (rows, columns, channels) of every entry.
        cell: height and width of a cell, so C = cell² · channels.
        blind: replace all grids by zeros.
    """

    limit: int

    def __init__(
        self, column: str, shape: tuple[int, ...], cell: int, blind: bool = False
    ):
        rows, columns, channels = shape
        self.column = column
        self.blind = blind
        self.shape = (rows, columns, channels)
        self.cell = cell
        self.columns = columns // cell
        self.limit = rows // cell * self.columns
        self.limit_words = (
            f"{self.limit} cells, from input.grid_shape = {self.shape} "
            f"and input.cell_size = {cell}"
        )
        self.features = cell * cell * channels
        self.trailing = (self.features,)

    def vectors(self, entry: Any) -> np.ndarray:
        """Return the cells (S, C) of one grid.

        Raises:
            ValueError: it has another shape, or is no array.
        """
        if isinstance(entry, str):
            entry = grid_of(entry)
        grid = np.asarray(entry)
        scale = 255 if grid.dtype == np.uint8 else 1
        rows, columns, channels = self.shape
        if grid.shape not in ((rows, columns), (rows, columns, channels)):
            raise UserError(
                f"has the shape {grid.shape}: must be input.grid_shape = {self.shape}"
            )
        lines = grid.reshape(-1, self.cell, self.columns, self.cell, channels)
        cells = lines.swapaxes(1, 2).reshape(-1, self.features)
        return cells.astype(np.float32) / scale

    def encode(
        self, column: Sequence[Any], begin: bool = False, end: bool = True
    ) -> Ragged:
        return _stacked(
            self.vectors, column, self.column, self.trailing, blind=self.blind
        )

    def shown(self, row: np.ndarray) -> tuple[list[str], str]:
        """Return the row and the column of each cell, from 1."""
        labels = []
        for cell in range(len(row)):
            y, x = divmod(cell, self.columns)
            labels.append(f"{y + 1},{x + 1}")
        return labels, ""

    def dummy(
        self, draw: np.random.Generator, lengths: np.ndarray, width: int
    ) -> np.ndarray:
        return _dummy_vectors(draw, lengths, width, self.features)


class Image(Stream):
    """A photograph as one position, its RGB bytes (rows, columns, 3).

    Args:
        column: name of the column. An entry is an array of such bytes, or the name of a
            file, relative to the working directory, see `photographs`.
        size: (rows, columns) that files are scaled to.
        blind: replace all images by zeros.
    """

    limit = 1
    limit_words = "one image"
    dtype = np.uint8

    def __init__(self, column: str, size: tuple[int, ...], blind: bool = False):
        rows, columns = size
        self.column = column
        self.blind = blind
        self.size = (rows, columns)
        self.trailing = (rows, columns, 3)

    def pixels(self, entry: Any) -> np.ndarray:
        """Return the one position of an entry (1, rows, columns, 3).

        Raises:
            ValueError: the file cannot be read, or the array has another shape or type.
        """
        if isinstance(entry, str):
            entry = read_photograph(entry, self.size)
        image = np.asarray(entry)
        if image.shape != self.trailing or image.dtype != np.uint8:
            raise UserError(
                f"has the shape {image.shape} and the type {image.dtype}: must be "
                f"{self.trailing} and uint8, from input.image_size = {self.size}"
            )
        return image[None]

    def encode(
        self, column: Sequence[Any], begin: bool = False, end: bool = True
    ) -> Ragged:
        trailing = self.trailing
        return _stacked(
            self.pixels, column, self.column, trailing, np.uint8, self.blind
        )

    def shown(self, row: np.ndarray) -> tuple[list[str], str]:
        rows, columns = self.size
        return [f"{rows} × {columns} pixels"] * len(row), ""

    def picture(self, row: np.ndarray) -> np.ndarray | None:
        return row[0] if len(row) else None

    def dummy(
        self, draw: np.random.Generator, lengths: np.ndarray, width: int
    ) -> np.ndarray:
        """Return random pixels."""
        shape = (len(lengths), width, *self.trailing)
        return draw.integers(0, 256, shape, np.uint8)


def _stacked(
    vectors: Callable[[Any], np.ndarray],
    column: Sequence[Any],
    name: str,
    trailing: tuple[int, ...],
    dtype: type = np.float32,
    blind: bool = False,
) -> Ragged:
    """Return the positions of each entry of a column, which have the shape `trailing`.

    With `blind`, they are read, but replaced by zeros.

    They are written to one array, which grows by an eighth when it is full. So memory
    need not hold them twice.

    Raises:
        DataError: an entry cannot be read or encoded. The message gives its number.
    """
    values: np.ndarray = np.empty((0, *trailing), dtype)
    lengths = np.zeros(len(column), np.int32)
    filled = 0
    for i in range(len(column)):
        try:
            rows = vectors(column[i])
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name} {i + 1}: {error}") from error
        end = filled + len(rows)
        if end > len(values):
            values.resize((end + end // 8, *trailing), refcheck=False)
        values[filled:end] = 0 if blind else rows
        lengths[i] = len(rows)
        filled = end
    values.resize((filled, *trailing), refcheck=False)
    return Ragged(values, lengths)


def _dummy_vectors(
    draw: np.random.Generator, lengths: np.ndarray, width: int, features: int
) -> np.ndarray:
    """Return normal numbers (B, width, features), 0 beyond `lengths` (B,)."""
    vectors = draw.normal(size=(len(lengths), width, features))
    valid = np.arange(width) < lengths[:, None]
    return np.where(valid[:, :, None], vectors, 0).astype(np.float32)
