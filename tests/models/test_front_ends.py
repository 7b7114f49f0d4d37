"""Front ends: tokens, and one of a user's own in the models that take front ends."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.small_models import MODELS
from transformer_jax.models.convolutions import ResidualNetwork
from transformer_jax.models.front_ends import Frames, Grid, Image, Layout, Tokens
from transformer_jax.models.layers import Dropout, Embedding, Linear
from transformer_jax.models.positions import Positions, grid_positions

B, S, T, D, V = 2, 5, 4, 3, 11
SOURCE = np.random.default_rng(0).integers(0, V, (B, S)).astype(np.int32)
VALID = np.arange(S)[None] < np.array([[5], [3]])


def initial(model, *inputs):
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs))
    return {"params": oracle.randomized(variables["params"])}


def test_tokens_are_embeddings_and_positions():
    front_end = Tokens(Embedding(V, D), Positions("learned", 7, D), Dropout(0.5))
    variables = initial(front_end, SOURCE)
    table = variables["params"]["embedding"]["table"][SOURCE] * np.sqrt(D)
    positions = variables["params"]["positions"]["table"]
    x, valid = front_end.apply(variables, SOURCE, VALID)
    np.testing.assert_allclose(x, table + positions[:S], rtol=1e-6)
    assert valid is VALID
    later = front_end.apply(variables, SOURCE, 2, method=Tokens.embed)
    np.testing.assert_allclose(later, table + positions[2 : 2 + S], rtol=1e-6)


def test_dropout_acts_on_tokens_of_a_whole_sequence_only():
    front_end = Tokens(Embedding(V, D), dropout=Dropout(0.5))
    variables = initial(front_end, SOURCE)
    rngs = {"dropout": jax.random.key(0)}
    whole, _ = front_end.apply(variables, SOURCE, rngs=rngs)
    step = front_end.apply(variables, SOURCE, rngs=rngs, method=Tokens.embed)
    assert (np.asarray(whole) == 0).any()
    assert (np.asarray(step) != 0).all()


def test_tokens_without_positions_are_their_embeddings():
    front_end = Tokens(Embedding(V, D))
    variables = initial(front_end, SOURCE)
    x, valid = front_end.apply(variables, SOURCE)
    assert valid is None
    table = variables["params"]["embedding"]["table"]
    np.testing.assert_allclose(x, table[SOURCE] * np.sqrt(D), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "refused"), [("learned", True), ("sinusoidal", True), ("rotary", False)]
)
def test_tokens_know_for_how_many_there_are_positions(kind, refused):
    front_end = Tokens(Embedding(V, D), Positions(kind, 7, D))
    front_end.check_room(7)
    if refused:
        with pytest.raises(ValueError, match="length=8: must be at most max_length"):
            front_end.check_room(8)
    else:
        front_end.check_room(8)


def test_a_source_and_a_target_can_have_one_table():
    target = SOURCE[:, :T]
    params = initial(MODELS["Transformer"], SOURCE, target)["params"]
    assert [name for name in params if "embedding" in name] == ["target_embedding"]


FRAMES = np.random.default_rng(2).normal(size=(B, S, 7)).astype(np.float32)


def mapped(variables, inputs):
    """Return the linear map of each position, in float64."""
    parameters = variables["params"]["map"]
    return inputs.astype(float) @ parameters["kernel"] + parameters["bias"]


def test_frames_are_a_linear_map_and_positions():
    front_end = Frames(7, D, Positions("learned", 11, D))
    variables = initial(front_end, FRAMES)
    table = variables["params"]["positions"]["table"]
    x, valid = front_end.apply(variables, FRAMES, VALID)
    expected = mapped(variables, FRAMES) + table[:S]
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
    assert valid is VALID
    plain, _ = Frames(7, D).apply(
        {"params": {"map": variables["params"]["map"]}}, FRAMES
    )
    np.testing.assert_allclose(plain, mapped(variables, FRAMES), rtol=1e-5, atol=1e-6)


def test_cells_are_a_linear_map_a_row_and_a_column():
    """The grid has two rows of three cells, and the last cell is left out."""
    front_end = Grid(7, D, rows=2, columns=3)
    variables = initial(front_end, FRAMES)
    rows, columns = variables["params"]["rows"], variables["params"]["columns"]
    assert (rows.shape, columns.shape) == ((2, D), (3, D))
    x, _ = front_end.apply(variables, FRAMES)
    expected = mapped(variables, FRAMES)
    for s, (row, column) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        expected[:, s] += rows[row] + columns[column]
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="5 cells are more than 2 rows of 2"):
        Grid(7, D, rows=2, columns=2).apply(variables, FRAMES)


@pytest.mark.parametrize("kind", ["sinusoidal", "none"])
def test_cells_may_have_other_positions(kind):
    front_end = Grid(7, D, rows=2, columns=3, positions=kind)
    variables = initial(front_end, FRAMES)
    assert set(variables["params"]) == {"map"}
    x, _ = front_end.apply(variables, FRAMES)
    expected = mapped(variables, FRAMES)
    if kind == "sinusoidal":
        expected += grid_positions(2, 3, D)[:S]
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


PICTURES = np.random.default_rng(4).integers(0, 256, (B, 1, 9, 5, 3), np.uint8)


def test_an_image_becomes_a_grid_of_vectors():
    front_end = Image((9, 5), D, (8,), positions="sinusoidal")
    variables = initial(front_end, PICTURES)
    network = {"params": variables["params"]["network"]}
    cells = ResidualNetwork((8,)).apply(network, PICTURES[:, 0] / np.float32(127.5) - 1)
    assert cells.shape == (B, 5, 3, 8)
    expected = mapped(variables, np.asarray(cells).reshape(B, 15, 8))
    expected += grid_positions(5, 3, D)
    x, valid = front_end.apply(variables, PICTURES, np.array([[True], [False]]))
    np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(valid, [[True] * 15, [False] * 15])
    assert front_end.layout(1) == Layout(5, 3, is_grid=True)
    assert front_end.apply(variables, PICTURES)[1] is None


@pytest.mark.parametrize(("shift", "flip"), [(2, False), (0, True)])
def test_images_vary_in_training_alone_and_as_the_key_says(shift, flip):
    front_end = Image((9, 5), D, (8,), shift=shift, flip=flip)
    variables = initial(front_end, PICTURES)

    def vectors(seed=None):
        rngs = None if seed is None else {"dropout": jax.random.key(seed)}
        return np.asarray(front_end.apply(variables, PICTURES, rngs=rngs)[0])

    plain = vectors()
    np.testing.assert_array_equal(plain, vectors())
    np.testing.assert_array_equal(vectors(1), vectors(1))
    of_seeds = [vectors(seed) for seed in range(1, 6)]
    assert max(np.abs(found - plain).max() for found in of_seeds) > 1e-3
    assert max(np.abs(found - of_seeds[0]).max() for found in of_seeds) > 1e-3


def test_what_a_shift_uncovers_is_black():
    """So the vectors of a black image do not vary."""
    front_end = Image((9, 5), D, (8,), shift=2)
    variables = initial(front_end, PICTURES)
    black = np.zeros_like(PICTURES)
    moved, _ = front_end.apply(variables, black, rngs={"dropout": jax.random.key(0)})
    plain, _ = front_end.apply(variables, black)
    np.testing.assert_allclose(moved, plain, rtol=1e-6)


class Halves(nn.Module):
    """A front end that reads pairs of adjacent frames (B, S, 3)."""

    width: int

    @nn.compact
    def __call__(self, frames, valid=None):
        pairs = frames.reshape(frames.shape[0], -1, 6)
        shape = (6, self.width)
        x = Linear("BSC,CD->BSD", shape, ("frame", "embed"), name="map")(pairs)
        return x, None if valid is None else valid[:, ::2]


@pytest.mark.parametrize(
    ("name", "width"), [("Transformer", 8), ("RecurrentSeq2Seq", 3), ("ConvS2S", 3)]
)
def test_a_front_end_replaces_tokens(name, width):
    """Padding of the frames changes nothing."""
    model = type(MODELS[name])(MODELS[name].config, Halves(width))
    frames = np.random.default_rng(1).normal(size=(B, 6, 3)).astype(np.float32)
    valid = np.arange(6)[None] < np.array([[6], [2]])
    target = SOURCE[:, :T]
    params = initial(model, frames, target)["params"]
    assert params["front_end"]["map"]["kernel"].shape == (6, width)
    assert "source_embedding" not in params

    @jax.jit
    def logits(frames):
        return model.apply({"params": params}, frames, target, valid)

    other = np.where(valid[:, :, None], frames, 7)
    found = logits(frames)
    assert found.shape == (B, T, V)
    np.testing.assert_array_equal(found, logits(other))
    assert not np.array_equal(found, logits(frames + 1))
