"""The input of a model of speech."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn

from transformer_jax import fields
from transformer_jax.data.streams import Frames, Stream
from transformer_jax.models.positions import Positions
from transformer_jax.models.spectrograms import Convolutions, SpecAugment
from transformer_jax.tasks.inputs import InputConfig


@dataclasses.dataclass(frozen=True)
class SpeechInput(InputConfig):
    """The keys of every input, and those of spectrograms.

    Widths of masks in time are in positions, i.e. in `stacked_windows`.
    """

    # frames: channels of two convolutions with stride 2 (Dong et al. 2018); 0: a linear
    # map of each position instead
    convolution_channels: int = fields.inputs(0)
    # frames: masks in training (Park et al. 2019), and their largest widths
    frequency_masks: int = fields.random(0, 0)
    frequency_width: int = 8
    time_masks: int = fields.random(0, 0)
    time_width: int = 20
    # largest share of a recording that a mask in time covers
    time_share: float = 0.2

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        for name in ("convolution_channels", "frequency_masks", "time_masks"):
            if getattr(self, name) < 0:
                yield name, "must be at least 0; 0 for none"
        for name in ("frequency_width", "time_width"):
            if getattr(self, name) < 1:
                yield name, "must be at least 1; for no masks, set their number to 0"
        if self.frequency_masks > 0 and self.frequency_width > self.mel_bands:
            yield "frequency_width", f"must not exceed mel_bands = {self.mel_bands}"
        if not 0 < self.time_share <= 1:
            yield "time_share", "must be in (0, 1], e.g. 0.2"
        if self.convolution_channels and self.stacked_windows > 1:
            yield (
                "stacked_windows",
                "must be 1 with convolution_channels, because the convolutions read "
                "adjacent windows",
            )

    def front_end(self, stream: Stream, model: Any) -> nn.Module | None:
        """Return the front end that faces a stream, see `InputConfig.front_end`."""
        front_end: Any = super().front_end(stream, model)
        if not isinstance(stream, Frames):
            return front_end
        if self.convolution_channels:
            width = model.source_width
            most_vectors = -(-stream.limit // 4)
            front_end = Convolutions(
                self.mel_bands,
                self.convolution_channels,
                width,
                Positions(model.source_positions, most_vectors, width),
                model.source_dropout_rate,
                model.dtype,
            )
        return SpecAugment(
            front_end,
            self.mel_bands,
            self.frequency_masks,
            self.frequency_width,
            self.time_masks,
            self.time_width,
            self.time_share,
        )
