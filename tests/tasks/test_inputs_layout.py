"""Front ends that return fewer vectors than they read positions, in attention maps."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import modalities
from transformer_jax.config import make_task, parse
from transformer_jax.data.streams import Frames, Grid, Image
from transformer_jax.models import front_ends
from transformer_jax.tasks.inputs import picture_of, shown_vectors
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

SOUND = Frames("file", rate=8000, bands=5, stacked=1, limit=50)


class Fourths(front_ends.Frames):
    """A front end that keeps the first of every four vectors."""

    def __call__(self, frames, valid=None):
        x, valid = super().__call__(frames, valid)
        return x[:, ::4], None if valid is None else valid[:, ::4]

    def layout(self, length):
        return front_ends.Layout(1, -(-length // 4), stride=4)


class Cells(front_ends.FrontEnd):
    """A front end that makes 2×3 vectors of a position."""

    def layout(self, length):
        return front_ends.Layout(2, 3, is_grid=True)


@pytest.mark.parametrize(
    ("length", "labels"),
    [(1, ["0.00 s"]), (8, ["0.00 s", "0.04 s"]), (9, ["0.00 s", "0.04 s", "0.08 s"])],
)
def test_a_vector_has_the_label_of_the_first_position_that_it_stands_for(
    length, labels
):
    shown, text = shown_vectors(SOUND, Fourths(5, 8), np.zeros((length, 5)))
    assert (shown, text) == (labels, "")


@pytest.mark.parametrize("front_end", [None, front_ends.Frames(5, 8)])
def test_without_another_layout_each_position_has_its_label(front_end):
    row = np.zeros((3, 5), np.float32)
    assert shown_vectors(SOUND, front_end, row) == SOUND.shown(row)


def test_the_vectors_of_a_grid_are_named_by_row_and_column():
    expected = ["1,1", "1,2", "1,3", "2,1", "2,2", "2,3"]
    whole = Grid("image", (2, 3, 1), cell=1)
    for front_end in (Cells(), front_ends.Grid(1, 8, rows=2, columns=3)):
        shown, _ = shown_vectors(whole, front_end, np.zeros((6, 1)))
        assert shown == expected


def test_attention_maps_have_a_column_for_each_vector(tmp_path):
    config = modalities.small_recipe("spoken_digits", "", tmp_path / "corpus")
    task = make_task(parse(config), tmp_path / "run")
    task.model = task.model.clone(front_end=Fourths(160, 16))
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    file = str(tmp_path / "corpus" / "test3.wav")
    mesh = make_mesh(parse(config).mesh)
    (maps,) = Evaluator(task, mesh).attention(params, [file])
    across = next(found for found in maps if found.name == "cross-attention")
    length = len(task.streams["source"].vectors(file))
    assert len(across.keys) == -(-length // 4) < length
    assert across.keys[1] == "0.16 s"  # a position is 40 ms
    np.testing.assert_allclose(across.weights.sum(axis=-1), 1, rtol=1e-4)


def test_vectors_lie_on_the_picture_of_their_stream():
    image = np.random.default_rng(0).integers(0, 256, (1, 9, 5, 3), np.uint8)
    read = front_ends.Image((9, 5), 8, (8,))
    rows, columns, pixels = picture_of(Image("image", (9, 5)), read, image)
    assert (rows, columns) == (5, 3)
    np.testing.assert_array_equal(pixels, image[0])
    cells = Grid("image", (2, 3, 1), cell=1)
    of_cells = front_ends.Grid(1, 8, rows=2, columns=3)
    assert picture_of(cells, of_cells, np.zeros((6, 1))) == (2, 3, None)
    assert picture_of(SOUND, None, np.zeros((0, 5))) is None
    # pairs of vectors are no rectangle
    assert picture_of(cells, of_cells, np.zeros((6, 1)), stride=2) is None


def test_vectors_of_a_sound_divide_its_spectrogram():
    """Nine windows, of which a vector stands for four, or of which a pyramid makes one
    vector of eight.
    """
    row = np.zeros((9, 5), np.float32)
    row[2, 0] = 9.0  # the lowest band of the third window
    rows, columns, pixels = picture_of(SOUND, Fourths(5, 8), row)
    assert (rows, columns) == (1, 3)
    assert pixels.shape == (5, 12, 3)
    assert np.argwhere(pixels == 255).tolist() == [[4, 2, i] for i in range(3)]
    assert (pixels[:, 9:] == 0).all()
    assert (pixels[:, :9] >= 128).all()
    _, columns, pixels = picture_of(SOUND, Fourths(5, 8), row, stride=2)
    assert (columns, pixels.shape) == (2, (5, 16, 3))
    stacked = Frames("file", rate=8000, bands=5, stacked=3, limit=50)
    _, columns, pixels = picture_of(stacked, None, row.reshape(3, 15))
    assert (columns, pixels.shape) == (3, (5, 9, 3))
    assert pixels[4, 2, 0] == 255


def test_a_grid_may_have_one_row():
    image = np.zeros((1, 2, 5, 3), np.uint8)
    stream = Image("image", (2, 5))
    read = front_ends.Image((2, 5), 8, (8,))
    shown, _ = shown_vectors(stream, read, image)
    assert shown == ["1,1", "1,2", "1,3"]
    rows, columns, _ = picture_of(stream, read, image)
    assert (rows, columns) == (1, 3)
