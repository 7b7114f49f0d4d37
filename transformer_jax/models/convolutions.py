"""Convolutions over grids: residual blocks with group normalization.

Nothing depends on other examples of a batch, as batch normalization would. So an
example has the same vectors on any number of devices, in training and afterwards.

Shapes: B batch · H rows · W columns · C channels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.layers import parameter

Array = jax.Array

GROUPS = 8  # of channels, in each `GroupNorm`


class Convolution(nn.Module):
    """A convolution of x (B, H, W, C), padded with zeros to keep its size.

    With a stride (rows, columns), ⌈H / rows⌉ × ⌈W / columns⌉ results are kept. The
    kernel is initialized by He et al. 2015, eq. 10.

    padding: "SAME", or the zeros before and after the rows, and the columns.
    """

    channels: int
    size: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    use_bias: bool = False
    dtype: str = "float32"
    padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (*self.size, x.shape[-1], self.channels)
        axes = ("kernel_rows", "kernel_columns", "features", "channels")
        init = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
        kernel = parameter(self, "kernel", init, shape, axes)
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            self.stride,
            self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = y.astype(jnp.float32)
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = parameter(self, "bias", zeros, (self.channels,), ("channels",))
            y = y + bias[None, None, None]
        return y


class GroupNorm(nn.Module):
    """Group normalization of x (B, H, W, C) (Wu and He 2018, eqs. 1, 2, 6
    and 7).

    Zero mean and unit variance over the grid and the channels of a group, then a gain
    and a bias for each channel.

    Differs: There are 8 groups; the paper has 32, for networks of 64 to 2048 channels.
    """

    groups: int = GROUPS
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels = x.shape[-1]
        ones = nn.initializers.ones
        zeros = nn.initializers.zeros
        gain = parameter(self, "scale", ones, (channels,), ("channels",))
        bias = parameter(self, "bias", zeros, (channels,), ("channels",))
        grouped = x.reshape(*x.shape[:3], self.groups, -1)
        axes = (1, 2, 4)
        mean = grouped.mean(axis=axes, keepdims=True)
        variance = jnp.square(grouped - mean).mean(axis=axes, keepdims=True)
        normal = (grouped - mean) * jax.lax.rsqrt(variance + self.epsilon)
        normal = normal.reshape(x.shape)
        return normal * gain[None, None, None] + bias[None, None, None]


class ResidualBlock(nn.Module):
    """y = relu(F(x) + x), where F is two convolutions (He et al. 2016, Section 3.3).

    If the block changes size or channels, x is mapped by a convolution of 1×1 (their
    option B).

    Differs: Group normalization instead of batch normalization.
    """

    channels: int
    stride: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        stride = (self.stride, self.stride)
        y = self._convolution(stride=stride, name="first")(x)
        y = nn.relu(GroupNorm(name="first_norm")(y))
        y = self._convolution(name="second")(y)
        y = GroupNorm(name="second_norm")(y)
        if self.stride != 1 or x.shape[-1] != self.channels:
            x = self._convolution((1, 1), stride, name="shortcut")(x)
            x = GroupNorm(name="shortcut_norm")(x)
        return nn.relu(y + x)

    @nn.nowrap
    def _convolution(
        self,
        size: tuple[int, int] = (3, 3),
        stride: tuple[int, int] = (1, 1),
        name: str = "",
    ) -> Convolution:
        return Convolution(self.channels, size, stride, dtype=self.dtype, name=name)


class ResidualNetwork(nn.Module):
    """Images (B, H, W, C) → vectors of a coarser grid (B, ⌈H / 2ⁿ⌉, ⌈W / 2ⁿ⌉, C').

    A convolution, then a stage of `blocks` residual blocks for each further entry of
    `channels`. Each of the n entries halves rows and columns.

    Differs: The networks of He et al. 2016 for small images (Section 4.2) do not halve
    at the first convolution and have 3 stages.
    """

    channels: tuple[int, ...]
    blocks: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, images: Array) -> Array:
        first, *stages = self.channels
        x = Convolution(first, stride=(2, 2), dtype=self.dtype, name="first")(images)
        x = nn.relu(GroupNorm(name="first_norm")(x))
        for stage, channels in enumerate(stages):
            for block in range(self.blocks):
                stride = 2 if block == 0 else 1
                name = f"block_{stage}_{block}"
                x = ResidualBlock(channels, stride, self.dtype, name=name)(x)
        return x

    @nn.nowrap
    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of the result for an image of `size`."""
        step = 2 ** len(self.channels)
        rows, columns = size
        return -(-rows // step), -(-columns // step)


def shifted(
    images: Array,
    key: Array,
    most: int,
) -> Array:
    """Move each image (B, H, W, C) by up to `most` rows and columns, at random.

    This is a crop of the image padded with zeros (He et al. 2016, Section 4.2).
    """
    padding = ((0, 0), (most, most), (most, most), (0, 0))
    padded = jnp.pad(images, padding)
    starts = jax.random.randint(key, (images.shape[0], 2), 0, 2 * most + 1)

    def crop(image: Array, start: Array) -> Array:
        row, column = start
        return jax.lax.dynamic_slice(image, (row, column, 0), images.shape[1:])

    return jax.vmap(crop)(padded, starts)


def flipped(
    images: Array,
    key: Array,
) -> Array:
    """Mirror half of the images (B, H, W, C), left to right, at random."""
    is_mirrored = jax.random.bernoulli(key, 0.5, (images.shape[0], 1, 1, 1))
    return jnp.where(is_mirrored, images[:, :, ::-1], images)
