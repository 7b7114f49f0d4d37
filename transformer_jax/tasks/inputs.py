"""The input of a model: the config keys, the stream of the data, and the front end."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import flax.linen as nn
import numpy as np
from etils import epath

from transformer_jax import fields
from transformer_jax.data import sources
from transformer_jax.data.columns import Column
from transformer_jax.data.corpus import Reader
from transformer_jax.data.images import grid_files, grids_of
from transformer_jax.data.photographs import photographs_of, photographs_table
from transformer_jax.data.sound import Sounds, samples_beyond, sounds_table
from transformer_jax.data.sources import Source
from transformer_jax.data.streams import Frames, Grid, Image, Stream
from transformer_jax.models import front_ends
from transformer_jax.models.convolutions import GROUPS
from transformer_jax.models.positions import Positions
from transformer_jax.training.task import Picture


def layout_of(front_end: nn.Module | None, length: int) -> front_ends.Layout:
    """Return the layout of the vectors that a front end makes of `length` positions.

    A module that is no `FrontEnd`, or None for tokens, makes a vector for each.
    """
    if isinstance(front_end, front_ends.FrontEnd):
        return front_end.layout(length)
    return front_ends.Layout(1, length)


def shown_vectors(
    stream: Stream, front_end: nn.Module | None, row: np.ndarray, stride: int = 1
) -> tuple[list[str], str]:
    """Return a label for each vector that a front end makes of a row of a stream, and
    the row as text.

    In a sequence, it is the label of the first position that the vector stands for; in
    a grid, it is the row and the column of the vector, from 1. An encoder may make one
    vector of `stride` of them, which has the label of the first.
    """
    labels, text = stream.shown(row)
    layout = layout_of(front_end, len(row))
    if not layout.is_grid:
        return labels[:: layout.stride][::stride], text
    cells = itertools.product(range(layout.rows), range(layout.columns))
    return [f"{y + 1},{x + 1}" for y, x in cells][::stride], text


def picture_of(
    stream: Stream, front_end: nn.Module | None, row: np.ndarray, stride: int = 1
) -> Picture | None:
    """Return the rectangle of the vectors that a front end makes of a row of a stream.

    An encoder may make one vector of `stride` of them. None: they are a sequence
    without a picture, or `stride` cells of a grid, which are no rectangle.
    """
    layout = layout_of(front_end, len(row))
    pixels = stream.picture(row)
    if layout.is_grid:
        whole = Picture(layout.rows, layout.columns, pixels)
        return whole if stride == 1 else None
    if pixels is None:
        return None
    columns = -(-layout.columns // stride)
    # the last vector may stand for fewer positions than the others
    missing = columns * layout.stride * stride - len(row)
    width = pixels.shape[1] // len(row)  # of a position
    pixels = np.pad(pixels, ((0, 0), (0, missing * width), (0, 0)))
    return Picture(1, columns, pixels)


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """The kind of a source, and how it becomes a sequence of vectors.

    For another kind, name it in `modalities` of a subclass and override `stream`,
    `front_end` and, if its files are read in another way, `reader` and `source_column`.

    modality: "tokens" for text, "frames" for sound, "grid" for grids of numbers, e.g.
        features of a network or small images, or "image" for photographs.
    """

    modalities: ClassVar[tuple[str, ...]] = ("tokens", "frames", "grid", "image")
    # columns that are read besides those of source and target
    more_columns: ClassVar[tuple[str, ...]] = ()

    modality: str = fields.inputs("tokens")
    # frames: most positions of a sound
    max_positions: int = fields.size(256, 32)
    sample_rate: int = fields.inputs(8000)  # frames: samples per second
    mel_bands: int = fields.inputs(40)  # frames: features of a window of 25 ms
    # frames: windows, 10 ms apart, that form one position
    stacked_windows: int = fields.inputs(4)
    # grid: (rows, columns, channels) of every image
    grid_shape: tuple[int, ...] = fields.inputs((8, 8, 1))
    cell_size: int = fields.inputs(1)  # grid: height and width of a position
    # grid and image: positions that are added, see `front_ends.Grid`
    grid_positions: str = fields.inputs("learned")
    # image: (rows, columns) that photographs are scaled to
    image_size: tuple[int, ...] = fields.size((96, 96), (16, 16), is_model=True)
    # image: of the first convolution and of each stage of residual blocks, each of
    # which halves the image
    channels: tuple[int, ...] = fields.size((32, 64, 128, 256), (8, 16), is_model=True)
    blocks: int = fields.inputs(1)  # image: residual blocks of a stage
    # image: most rows and columns by which training moves a photograph
    shift: int = fields.random(0, 0)
    flip: bool = fields.random(False, False)  # image: training mirrors half of them
    # grid and image: all are replaced by zeros, to see what the target alone tells
    blind: bool = fields.inputs(False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.modality not in self.modalities:
            yield "modality", f"must be one of {', '.join(self.modalities)}"
        for name in ("max_positions", "mel_bands", "stacked_windows", "cell_size"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1"
        if self.sample_rate < 1000:
            yield "sample_rate", "must be at least 1000, e.g. 16000"
        if len(self.grid_shape) != 3 or min(self.grid_shape) < 1:
            yield "grid_shape", "must be (rows, columns, channels), each at least 1"
        elif self.cell_size >= 1 and any(
            size % self.cell_size for size in self.grid_shape[:2]
        ):
            yield "cell_size", f"must divide the rows and columns of {self.grid_shape}"
        yield from self._problems_of_images()

    def _problems_of_images(self) -> Iterator[tuple[str, str]]:
        if self.grid_positions not in front_ends.GRID_POSITIONS:
            choices = ", ".join(front_ends.GRID_POSITIONS)
            yield "grid_positions", f"must be one of {choices}"
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            yield "image_size", "must be (rows, columns), each at least 1"
        if not self.channels or any(i < 1 or i % GROUPS for i in self.channels):
            yield "channels", f"must be one or more multiples of {GROUPS}"
        if self.blocks < 1:
            yield "blocks", "must be at least 1"
        if self.blind and self.modality not in ("grid", "image"):
            yield "blind", "needs modality = 'grid' or 'image': set this to False"
        if self.shift < 0:
            yield "shift", "must be at least 0"

    def conflicts(self, model: Any, data: Any) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for what only a source of text has."""
        if self.modality == "tokens":
            return
        needs = f"with input.modality = {self.modality!r}"
        if data.joint_tokenizer:
            yield "data.joint_tokenizer", f"must be False {needs}"
        if data.max_ratio:
            yield "data.max_ratio", f"must be 0 {needs}"
        if data.source != "files":
            yield "data.source", f"must be 'files' {needs}"
        if data.references > 1 and not data.table:
            yield "data.table", f"must name a table {needs} and several references"
        for name in ("directions", "mixture", "prefixes"):
            if getattr(data, name):
                yield f"data.{name}", f"must be () {needs}"
        if model.shares_tables:
            yield "model.tie_embeddings", f"must be 'decoder' or 'none' {needs}"

    def stream(self, column: str) -> Stream | None:
        """Return the stream of a column. None: it is text."""
        if self.modality == "frames":
            return Frames(
                column,
                self.sample_rate,
                self.mel_bands,
                self.stacked_windows,
                self.max_positions,
            )
        if self.modality == "grid":
            return Grid(column, self.grid_shape, self.cell_size, self.blind)
        if self.modality == "image":
            return Image(column, self.image_size, self.blind)
        return None

    @property
    def _longest_sound(self) -> int:
        """The most samples to read of a recording: for one position too many."""
        return samples_beyond(
            self.max_positions, self.stacked_windows, self.sample_rate
        )

    def reader(self) -> Reader:
        """Return the function that reads the files of a split."""
        if self.modality == "frames":
            return functools.partial(
                sounds_table, rate=self.sample_rate, longest=self._longest_sound
            )
        if self.modality == "grid":
            return grid_files
        if self.modality == "image":
            return functools.partial(photographs_table, size=self.image_size)
        return sources.parallel_files

    def source_column(
        self, directory: epath.PathLike, split: str, table: Source, column: str
    ) -> Column:
        """Return the column of sources that a table of references has or names."""
        if self.modality == "frames":
            return Sounds(
                table.column(column), directory, self.sample_rate, self._longest_sound
            )
        if self.modality == "grid":
            return grids_of(directory, split, table, column, self.grid_shape)
        if self.modality == "image":
            return photographs_of(directory, split, table, column, self.image_size)
        return table.column(column)

    def front_end(self, stream: Stream, model: Any) -> nn.Module | None:
        """Return the front end that faces a stream, given the config of the model.

        None: the model embeds ids.
        """
        width = model.source_width
        rate = model.source_dropout_rate
        if isinstance(stream, Frames):
            positions = Positions(model.source_positions, stream.limit, width)
            return front_ends.Frames(
                stream.features, width, positions, rate, model.dtype
            )
        if isinstance(stream, Grid):
            rows = stream.limit // stream.columns
            return front_ends.Grid(
                stream.features,
                width,
                rows,
                stream.columns,
                rate,
                model.dtype,
                self.grid_positions,
            )
        if isinstance(stream, Image):
            return front_ends.Image(
                stream.size,
                width,
                self.channels,
                self.blocks,
                self.shift,
                self.flip,
                self.grid_positions,
                rate,
                model.dtype,
            )
        return None
