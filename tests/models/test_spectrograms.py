"""Convolutions and masks of spectrograms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models.front_ends import Frames, Layout
from transformer_jax.models.positions import Positions
from transformer_jax.models.spectrograms import Convolutions, SpecAugment, masks

S, C, CHANNELS, D = 11, 7, 5, 3
LENGTHS = np.array([11, 8, 5, 1])
VALID = np.arange(S) < LENGTHS[:, None]
FRAMES = np.random.default_rng(0).normal(size=(4, S, C)).astype(np.float32)


def convolved(x, kernel, bias):
    """Return ReLU of a 3×3 convolution with stride 2 and zeros around x (S, C, I)."""
    around = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    rows = -(-x.shape[0] // 2)
    columns = -(-x.shape[1] // 2)
    out = np.zeros((rows, columns, kernel.shape[3]))
    for i in range(rows):
        for j in range(columns):
            seen = around[2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            out[i, j] = np.einsum("hwi,hwio->o", seen, kernel) + bias
    return np.maximum(out, 0)


@pytest.fixture(scope="module")
def convolutions():
    """The parameters, and the outputs for four spectrograms in one batch."""
    module = Convolutions(C, CHANNELS, D, Positions("learned", 4, D))
    shapes = jax.eval_shape(module.init, jax.random.key(0), FRAMES)["params"]
    params = oracle.randomized(nn.unbox(shapes))
    return params, jax.jit(module.apply)({"params": params}, FRAMES, VALID)


@pytest.mark.parametrize("row", range(4))
def test_a_spectrogram_in_a_batch_is_that_spectrogram_alone(convolutions, row):
    """It is computed by the equations, without padding."""
    params, (vectors, valid) = convolutions
    x = FRAMES[row, : LENGTHS[row], :, None].astype(np.float64)
    for number in range(2):
        part = params[f"convolution_{number}"]
        x = convolved(x, part["kernel"], part["bias"])
    expected = x.reshape(len(x), -1) @ params["map"]["kernel"] + params["map"]["bias"]
    expected += params["positions"]["table"][: len(x)]
    count = -(-LENGTHS[row] // 4)
    assert valid[row].tolist() == [True] * count + [False] * (3 - count)
    assert oracle.relative(vectors[row, :count], expected) < 1e-5


def test_a_vector_stands_for_four_frames():
    module = Convolutions(C, CHANNELS, D)
    assert [module.layout(length).columns for length in (1, 4, 5, 11)] == [1, 1, 2, 3]
    assert module.layout(11) == Layout(1, 3, 4)
    assert SpecAugment(module, C).layout(11) == Layout(1, 3, 4)


def test_masks_are_intervals_of_at_most_the_largest_width():
    sizes = np.repeat([9, 4], 500)
    most = np.repeat([5, 2], 500)
    found = np.asarray(masks(jax.random.key(0), 1, most, sizes, 11))
    widths = found.sum(axis=1)
    assert set(widths[:500]) == {0, 1, 2, 3, 4, 5}
    assert set(widths[500:]) == {0, 1, 2}
    changes = np.diff(np.pad(found, ((0, 0), (1, 1))).astype(int), axis=1)
    assert ((changes == 1).sum(axis=1) <= 1).all()
    assert not found[:500, 9:].any()
    assert not found[500:, 4:].any()
    assert found[:500, :9].any(axis=0).all()
    # six equally probable widths
    assert abs(widths[:500].mean() - 2.5) < 0.3


MASKED = SpecAugment(
    Frames(2 * C, D),
    bands=C,
    frequency_masks=2,
    frequency_width=3,
    time_masks=2,
    time_width=4,
    time_share=0.5,
)
STACKED = np.ones((4, S, 2 * C), np.float32)


@jax.jit
def masked(key):
    """Return what the front end reads: its linear map is left out."""
    module = MASKED.clone(front_end=Kept())
    return module.apply({}, STACKED, VALID, rngs={"dropout": key})[0]


class Kept(Frames):
    """A front end that returns what it reads."""

    features: int = 0
    width: int = 0

    def __call__(self, frames, valid=None):
        return frames, valid


def test_masks_cover_bands_and_times_of_each_recording():
    """Windows that form one position have the same masked bands."""
    kept = np.stack([masked(jax.random.key(seed)) for seed in range(50)]) != 0
    kept = kept.reshape(50, 4, S, 2, C)
    np.testing.assert_array_equal(kept[:, :, :, 0], kept[:, :, :, 1])
    times = ~kept.any(axis=(3, 4))
    bands = ~kept.any(axis=(2, 3))
    np.testing.assert_array_equal(
        ~kept[:, :, :, 0], times[:, :, :, None] | bands[:, :, None]
    )
    assert bands.sum(axis=2).max() == 6
    longest = np.minimum(4, LENGTHS // 2)
    widest = times.sum(axis=2).max(axis=0)
    assert (widest <= 2 * longest).all()
    assert (widest > longest)[:3].all()
    assert not (times & ~VALID).any()
    assert len({row.tobytes() for row in times[:, 0]}) > 10


def test_masks_need_a_key_and_a_number():
    front_end = Frames(2 * C, D)
    params = nn.unbox(jax.jit(front_end.init)(jax.random.key(0), STACKED))["params"]
    variables = {"params": {"front_end": params}}
    frames = jnp.asarray(STACKED)
    expected, _ = front_end.apply({"params": params}, frames)
    for module, rngs in (
        (MASKED, None),
        (SpecAugment(front_end, C), {"dropout": jax.random.key(1)}),
    ):
        found, _ = module.apply(variables, frames, rngs=rngs)
        np.testing.assert_array_equal(found, expected)
