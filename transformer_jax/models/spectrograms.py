"""Front ends of spectrograms, which are frames of C bands.

Shapes: B batch · S frames · S' vectors · C bands · D width of the vectors · M masks.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.attention import Valid
from transformer_jax.models.checks import check_valid
from transformer_jax.models.convolutions import Convolution
from transformer_jax.models.front_ends import FrontEnd, Layout
from transformer_jax.models.layers import Dropout, Linear
from transformer_jax.models.positions import Positions

Array = jax.Array


class Convolutions(FrontEnd):
    """Two 3×3 convolutions with a stride of 2 over time and bands, each followed by a
    ReLU, and a linear map, plus positions (Dong et al. 2018, Section 3).

    A vector stands for four frames, so S' = ⌈S / 4⌉. Frames are masked before each
    convolution, so padding changes nothing: it is like the zeros around a spectrogram.

    bands: C.
    channels: of both convolutions.
    """

    bands: int
    channels: int
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
        """Map frames (B, S, C) to vectors (B, S', D), and `valid` (B, S) to (B, S')."""
        if valid is not None:
            check_valid(f"{self.name}_valid", valid, frames.shape[:2])
        x = frames[..., None]
        for number in range(2):
            if valid is not None:
                x = jnp.where(valid[:, :, None, None], x, 0)
                valid = valid[:, ::2]
            x = nn.relu(self._convolution(number)(x))
        rows, length, bands, channels = x.shape
        x = x.reshape(rows, length, bands * channels)
        shape = (bands * channels, self.width)
        axes = ("features", "embed")
        x = Linear("BSC,CD->BSD", shape, axes, dtype=self.dtype, name="map")(x)
        if self.positions is not None:
            x = x + self.positions(length)
        return Dropout(self.dropout_rate)(x), valid

    @nn.nowrap
    def layout(self, length: int) -> Layout:
        return Layout(1, -(-length // 4), stride=4)

    @nn.nowrap
    def _convolution(self, number: int) -> Convolution:
        """Return a convolution whose output i is centred at input 2i, however many
        inputs there are.
        """
        return Convolution(
            self.channels,
            stride=(2, 2),
            use_bias=True,
            dtype=self.dtype,
            padding=((1, 1), (1, 1)),
            name=f"convolution_{number}",
        )


class SpecAugment(FrontEnd):
    """A front end that reads a spectrogram of which random bands and times are masked
    in training (Park et al. 2019, Section 2).

    Active only if `apply` is given a "dropout" key. Masked numbers are 0, the mean of a
    spectrogram. Differs: There is no time warping, and a mask may also cover the last
    band or position.

    front_end: reads the masked spectrogram.
    bands: the bands of a spectrogram, ν. A position may hold several windows of as many
        bands, which are masked alike.
    frequency_masks, time_masks: the number of masks, m_F and m_T.
    frequency_width, time_width: the most bands and positions of a mask, F and T.
    time_share: the largest share of the positions that a mask covers, p.
    """

    front_end: FrontEnd
    bands: int
    frequency_masks: int = 0
    frequency_width: int = 0
    time_masks: int = 0
    time_width: int = 0
    time_share: float = 1.0

    def __call__(
        self,
        frames: Array,
        valid: Valid = None,
    ) -> tuple[Array, Valid]:
        """See the front end."""
        if self.has_rng("dropout") and self.frequency_masks + self.time_masks:
            frames = self._masked(frames, valid)
        return self.front_end(frames, valid)

    @nn.nowrap
    def layout(self, length: int) -> Layout:
        return self.front_end.layout(length)

    def _masked(self, frames: Array, valid: Valid) -> Array:
        rows, length, features = frames.shape
        lengths = jnp.full(rows, length) if valid is None else valid.sum(axis=1)
        most = jnp.floor(self.time_share * lengths)
        keys = jax.random.split(self.make_rng("dropout"))
        in_time = masks(
            keys[0],
            self.time_masks,
            jnp.minimum(self.time_width, most),
            lengths,
            length,
        )
        in_frequency = masks(
            keys[1],
            self.frequency_masks,
            jnp.full(rows, self.frequency_width),
            jnp.full(rows, self.bands),
            self.bands,
        )
        in_frequency = jnp.tile(in_frequency, (1, features // self.bands))
        masked = in_time[:, :, None] | in_frequency[:, None]
        return jnp.where(masked, 0, frames)


def masks(key: Array, count: int, most: Array, sizes: Array, room: int) -> Array:
    """Return where any of `count` random masks of each row is, (B, room) bool.

    A mask covers [a, a + n) of the first `sizes` (B,) places, where n is uniform in 0
    to `most` (B,), and a in 0 to size - n.
    """
    rows = len(sizes)
    draws = jax.random.uniform(key, (2, rows, count))
    widths = jnp.floor(draws[0] * (most[:, None] + 1))
    starts = jnp.floor(draws[1] * (sizes[:, None] - widths + 1))
    places = jnp.arange(room)[None, None]
    after = places >= starts[:, :, None]
    before = places < (starts + widths)[:, :, None]
    return (after & before).any(axis=1)
