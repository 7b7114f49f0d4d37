"""Convolutions, group normalization and residual blocks against NumPy."""

import itertools

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models.convolutions import (
    Convolution,
    GroupNorm,
    ResidualBlock,
    ResidualNetwork,
    flipped,
    shifted,
)

B, H, W, C = 2, 5, 7, 8
IMAGES = np.random.default_rng(0).normal(size=(B, H, W, C)).astype(np.float32)


def parameters(module, x=IMAGES):
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    return oracle.randomized(shapes["params"])


def convolution(kernel, x, stride=1, bias=0.0):
    """Return the sums of products around every stride-th cell; zeros lie outside.

    The window of a result starts so that the padding is even, or has one more cell at
    the end.
    """
    rows, columns, _, outputs = kernel.shape
    size = [-(-n // stride) for n in x.shape[1:3]]
    before = [
        max((count - 1) * stride + reach - n, 0) // 2
        for count, reach, n in zip(size, (rows, columns), x.shape[1:3], strict=True)
    ]
    result = np.zeros((len(x), *size, outputs))
    for i, j in np.ndindex(*size):
        for a, b in np.ndindex(rows, columns):
            y, z = i * stride + a - before[0], j * stride + b - before[1]
            if 0 <= y < x.shape[1] and 0 <= z < x.shape[2]:
                result[:, i, j] += x[:, y, z].astype(float) @ kernel[a, b]
    return result + bias


def group_norm(p, x, groups=8, epsilon=1e-5):
    """Wu and He 2018, Section 3.1."""
    result = np.zeros(x.shape)
    size = x.shape[3] // groups
    for example, group in np.ndindex(len(x), groups):
        part = x[example, ..., group * size : (group + 1) * size]
        normal = (part - part.mean()) / np.sqrt(part.var() + epsilon)
        result[example, ..., group * size : (group + 1) * size] = normal
    return result * p["scale"] + p["bias"]


def block(p, x, stride):
    """He et al. 2016, eqs. 1 and 2."""
    y = convolution(p["first"]["kernel"], x, stride)
    y = np.maximum(group_norm(p["first_norm"], y), 0)
    y = group_norm(p["second_norm"], convolution(p["second"]["kernel"], y))
    if "shortcut" in p:
        x = convolution(p["shortcut"]["kernel"], x, stride)
        x = group_norm(p["shortcut_norm"], x)
    return np.maximum(y + x, 0)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(3, 3), (1, 1), (2, 5)])
def test_a_convolution_is_its_sum(size, stride):
    module = Convolution(3, size, (stride, stride), use_bias=True)
    params = parameters(module)
    expected = convolution(params["kernel"], IMAGES, stride, params["bias"])
    found = module.apply({"params": params}, IMAGES)
    assert found.shape == (B, -(-H // stride), -(-W // stride), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_group_normalization_is_its_equation(groups):
    module = GroupNorm(groups)
    params = parameters(module)
    found = module.apply({"params": params}, 3 * IMAGES + 1)
    expected = group_norm(params, 3 * IMAGES.astype(float) + 1, groups)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "stride"), [(8, 1), (16, 1), (8, 2)])
def test_a_residual_block_is_its_equation(channels, stride):
    module = ResidualBlock(channels, stride)
    params = parameters(module)
    assert ("shortcut" in params) == ((channels, stride) != (8, 1))
    found = module.apply({"params": params}, IMAGES)
    expected = block(params, IMAGES.astype(float), stride)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_network_halves_the_image_at_every_entry():
    module = ResidualNetwork((8, 16), blocks=2)
    params = parameters(module)
    assert module.size((H, W)) == (2, 2)
    x = convolution(params["first"]["kernel"], IMAGES, 2)
    x = np.maximum(group_norm(params["first_norm"], x), 0)
    x = block(params["block_0_0"], x, 2)
    x = block(params["block_0_1"], x, 1)
    found = module.apply({"params": params}, IMAGES)
    assert found.shape == (B, 2, 2, 16)
    np.testing.assert_allclose(found, x, rtol=1e-3, atol=1e-3)


def test_an_image_does_not_depend_on_the_others():
    module = ResidualNetwork((8,))
    params = parameters(module)
    both = module.apply({"params": params}, IMAGES)
    alone = module.apply({"params": params}, IMAGES[:1])
    np.testing.assert_allclose(both[:1], alone, rtol=1e-5, atol=1e-6)


def test_images_move_by_whole_pixels_and_zeros_come_in():
    moves = set()
    for seed in range(8):
        found = np.asarray(shifted(IMAGES, jax.random.key(seed), 1))
        for image, moved in zip(IMAGES, found, strict=True):
            padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
            matches = [
                (y, x)
                for y, x in np.ndindex(3, 3)
                if (padded[y : y + H, x : x + W] == moved).all()
            ]
            assert len(matches) == 1
            moves.add(matches[0])
    assert len(moves) > 4


def test_half_of_the_images_are_mirrored():
    images = np.repeat(IMAGES, 32, axis=0)
    found = np.asarray(flipped(images, jax.random.key(0)))
    is_same = (found == images).all(axis=(1, 2, 3))
    is_mirrored = (found == images[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (is_same ^ is_mirrored).all()
    assert 16 < is_same.sum() < 48


def test_parameters_of_a_network_are_counted():
    channels = (32, 64, 128, 256)
    module = ResidualNetwork(channels)
    image = np.zeros((1, 96, 96, 3), np.float32)
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), image))
    # a convolution has no bias, a norm has two numbers for each channel
    expected = 9 * 3 * 32 + 2 * 32
    for before, after in itertools.pairwise(channels):
        expected += 9 * before * after + 9 * after * after + before * after
        expected += 3 * 2 * after
    found = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert found == expected == 1_207_840
