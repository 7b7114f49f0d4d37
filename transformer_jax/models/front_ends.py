"""Front ends: what a model reads becomes vectors.

A front end is a module that maps inputs and their validity (B, S) to vectors (B, S', D)
and their validity (B, S'). The validity is None if there is no padding. A front end
owns the limit on S. It faces a stream of the data, which turns what files contain into
the inputs.

S' may differ from S: a convolution may skip frames, and an image that is one position
may become a grid of vectors. Such a front end is a `FrontEnd`, whose `layout` says what
its vectors stand for. Models read only the vectors, so they need no change.

Shapes: B batch · S source positions · T target positions · C features of a frame or a
cell · D width of the vectors.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.errors import UserError
from transformer_jax.models.attention import Valid
from transformer_jax.models.checks import check_ids, check_valid, exceeds
from transformer_jax.models.convolutions import ResidualNetwork, flipped, shifted
from transformer_jax.models.layers import (
    Dropout,
    Embedding,
    Linear,
    make_initializer,
    parameter,
)
from transformer_jax.models.positions import Positions, check_length, grid_positions

Array = jax.Array

GRID_POSITIONS = ("learned", "sinusoidal", "none")


class Layout(NamedTuple):
    """The meaning of the vectors of one example, which come in reading order.

    rows: of a grid of vectors; 1 for a sequence.
    columns: vectors in a row.
    stride: in a sequence, vector i stands for the `stride` positions from i · stride
        on. There may be fewer of them at the end.
    is_grid: False for a sequence, which has one row.
    """

    rows: int
    columns: int
    stride: int = 1
    is_grid: bool = False


class FrontEnd(nn.Module):
    """Base class of front ends, and the layout of most of them."""

    @nn.nowrap
    def layout(
        self,
        length: int,
    ) -> Layout:
        """Return the layout of the vectors of an example of `length` positions.

        The default is a vector for each position.
        """
        return Layout(1, length)


class Tokens(FrontEnd):
    """Token embeddings plus positions (Vaswani et al. 2017, Sections 3.4 and 3.5).

    The model creates the parts, because it may share them: source and target can have
    the same embedding. A recurrent model has neither positions nor dropout here.
    `norm` acts on the sums of embeddings and positions (Devlin et al. 2019, in the
    authors' code).
    """

    embedding: Embedding
    positions: Positions | None = None
    dropout: Dropout | None = None
    norm: nn.Module | None = None

    def __call__(
        self,
        ids: Array,
        valid: Valid = None,
    ) -> tuple[Array, Valid]:
        """Map ids (B, S) to vectors (B, S, D), with dropout, and return `valid` too.

        `valid` (B, S) is True at tokens and False at padding. None: there is no
        padding.
        """
        x = self.embed(ids)
        if valid is not None:
            check_valid(f"{self.name}_valid", valid, ids.shape)
        if self.dropout is not None:
            x = self.dropout(x)
        return x, valid

    def embed(
        self,
        ids: Array,
        position: Array | int = 0,
    ) -> Array:
        """Map ids (B, T) from `position` on to vectors (B, T, D), without dropout."""
        check_ids(str(self.name), ids, self.embedding.vocab_size)
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(ids.shape[1], position)
        return x if self.norm is None else self.norm(x)

    def check_room(self, room: Any) -> None:
        """Raise ValueError if there are fewer than `room` positions."""
        if self.positions is not None:
            check_length(self.positions.kind, room, self.positions.max_length)


class Frames(FrontEnd):
    """A linear map of each frame, plus positions (Dong et al. 2018).

    Differs: There are no convolutions before the linear map.
    """

    features: int
    width: int
    positions: Positions | None = None
    dropout_rate: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        frames: Array,
        valid: Valid = None,
    ) -> tuple[Array, Valid]:
        """Map frames (B, S, C) to vectors (B, S, D), and return `valid` (B, S) too."""
        x = _projected(self, frames, valid)
        if self.positions is not None:
            x = x + self.positions(frames.shape[1])
        return Dropout(self.dropout_rate)(x), valid


class Grid(FrontEnd):
    """A linear map of each cell of an image (Dosovitskiy et al. 2021, eq. 1), plus its
    position.

    Differs: The paper has one learned vector for each cell.

    columns: the number of cells in a row. Cells come in reading order.
    positions: one of GRID_POSITIONS. "learned": a vector for the row of a cell and one
        for its column; "sinusoidal": see `grid_positions`.
    """

    features: int
    width: int
    rows: int
    columns: int
    dropout_rate: float = 0.0
    dtype: str = "float32"
    positions: str = "learned"

    @nn.compact
    def __call__(
        self,
        cells: Array,
        valid: Valid = None,
    ) -> tuple[Array, Valid]:
        """Map cells (B, S, C) to vectors (B, S, D), and return `valid` (B, S) too."""
        length = cells.shape[1]
        if exceeds(length, self.rows * self.columns):
            raise UserError(
                f"{length} cells are more than {self.rows} rows of {self.columns}: "
                "cut the grid or raise input.grid_shape"
            )
        x = _projected(self, cells, valid)
        x = _placed(self, x, self.rows, self.columns)
        return Dropout(self.dropout_rate)(x), valid

    @nn.nowrap
    def layout(
        self,
        length: int,
    ) -> Layout:
        rows = -(-length // self.columns)
        return Layout(rows, self.columns, is_grid=True)


class Image(FrontEnd):
    """The grid of vectors of a `ResidualNetwork`, mapped to width D, plus positions.

    In training, i.e. with a "dropout" key, an image is moved by up to `shift` rows and
    columns, and with `flip` half of the images are mirrored.

    size: (rows, columns) of an image.
    channels: of the first convolution and of each stage. Each halves the image.
    blocks: residual blocks of a stage.
    positions: see `Grid`.
    """

    size: tuple[int, int]
    width: int
    channels: tuple[int, ...]
    blocks: int = 1
    shift: int = 0
    flip: bool = False
    positions: str = "learned"
    dropout_rate: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        images: Array,
        valid: Valid = None,
    ) -> tuple[Array, Valid]:
        """Map images (B, 1, rows, columns, 3) to vectors (B, S', D).

        The images are bytes. `valid` (B, 1) is False where there is no image; that of
        the vectors is (B, S').
        """
        x = images[:, 0] / jnp.float32(255)
        if self.has_rng("dropout"):
            x = self._varied(x)
        x = 2 * x - 1
        network = ResidualNetwork(
            self.channels,
            self.blocks,
            self.dtype,
            name="network",
        )
        x = network(x)
        _, rows, columns, channels = x.shape
        x = x.reshape(-1, rows * columns, channels)
        linear = Linear(
            "BSC,CD->BSD",
            shape=(channels, self.width),
            axes=("features", "embed"),
            dtype=self.dtype,
            name="map",
        )
        x = linear(x)
        x = _placed(self, x, rows, columns)
        if valid is not None:
            valid = jnp.repeat(valid, rows * columns, axis=1)
        return Dropout(self.dropout_rate)(x), valid

    @nn.nowrap
    def layout(
        self,
        length: int,
    ) -> Layout:
        rows, columns = ResidualNetwork(self.channels).size(self.size)
        return Layout(rows, columns, is_grid=True)

    def _varied(
        self,
        x: Array,
    ) -> Array:
        if self.shift:
            x = shifted(x, self.make_rng("dropout"), self.shift)
        if self.flip:
            x = flipped(x, self.make_rng("dropout"))
        return x


def _placed(
    module: Grid | Image,
    x: Array,
    rows: int,
    columns: int,
) -> Array:
    """Add positions to the cells x (B, S, D) of a grid, with tables of the module."""
    length = x.shape[1]
    if module.positions == "sinusoidal":
        waves = grid_positions(rows, columns, module.width)
        return x + jnp.asarray(waves[:length])[None]
    if module.positions == "none":
        return x

    def table(
        name: str,
        size: int,
    ) -> Array:
        axes = ("position", "embed")
        shape = (size, module.width)
        init = make_initializer("normal")
        return parameter(module, name, init, shape, axes)

    row, column = jnp.divmod(jnp.arange(length), columns)
    of_rows = table("rows", rows)
    of_columns = table("columns", columns)
    x = x + of_rows[row][None]
    return x + of_columns[column][None]


def _projected(module: Frames | Grid, inputs: Array, valid: Valid) -> Array:
    """Map inputs (B, S, C) to (B, S, D) by a linear map of the module."""
    if valid is not None:
        check_valid(f"{module.name}_valid", valid, inputs.shape[:2])
    shape = (module.features, module.width)
    axes = ("features", "embed")
    linear = Linear("BSC,CD->BSD", shape, axes, dtype=module.dtype, name="map")
    return linear(inputs)
