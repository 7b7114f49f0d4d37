"""The input of a model of speech: which front end a config selects."""

import dataclasses
import re

import pytest

from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.front_ends import Frames, Grid
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.spectrograms import Convolutions, SpecAugment
from transformer_jax.models.transformer import TransformerConfig
from transformer_jax.tasks.speech import SpeechInput

SOUND = SpeechInput(modality="frames", stacked_windows=1, mel_bands=20)


def front_end(config, model):
    return config.front_end(config.stream("file"), model)


@pytest.mark.parametrize(
    "model", [TransformerConfig(), RecurrentConfig(), ConvS2SConfig()]
)
def test_a_sound_is_masked_and_then_mapped_or_convolved(model):
    stacked = dataclasses.replace(SOUND, stacked_windows=3, time_masks=2, time_width=7)
    masked = front_end(stacked, model)
    assert isinstance(masked, SpecAugment)
    assert (masked.bands, masked.time_masks, masked.time_width) == (20, 2, 7)
    assert isinstance(masked.front_end, Frames)
    assert masked.front_end.features == 60
    convolutions = dataclasses.replace(SOUND, convolution_channels=5)
    inner = front_end(convolutions, model).front_end
    assert isinstance(inner, Convolutions)
    assert (inner.bands, inner.channels, inner.width) == (20, 5, model.source_width)
    assert inner.positions.kind == model.source_positions
    limit = convolutions.max_positions
    assert inner.positions.max_length == inner.layout(limit).columns == -(-limit // 4)


def test_other_sources_have_the_front_ends_of_every_input():
    grid = SpeechInput(modality="grid", convolution_channels=5, stacked_windows=1)
    assert isinstance(front_end(grid, TransformerConfig()), Grid)
    text = SpeechInput()
    assert text.stream("text") is None
    assert text.front_end(None, TransformerConfig()) is None


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("convolution_channels", -1, "at least 0"),
        ("frequency_masks", -1, "at least 0"),
        ("time_masks", -1, "at least 0"),
        ("frequency_width", 0, "at least 1"),
        ("frequency_width", 21, "must not exceed mel_bands = 20"),
        ("time_width", 0, "at least 1"),
        ("time_share", 0.0, r"in \(0, 1\]"),
        ("time_share", 1.1, r"in \(0, 1\]"),
        ("mel_bands", 0, "at least 1"),  # a rule of every input
    ],
)
def test_impossible_values_are_refused(field, value, rule):
    assert not list(SOUND.problems())
    changed = dataclasses.replace(SOUND, **{"frequency_masks": 1, field: value})
    assert re.search(rule, dict(changed.problems())[field])


def test_the_width_of_masks_does_not_matter_without_masks():
    assert not list(dataclasses.replace(SOUND, frequency_width=21).problems())


def test_convolutions_read_adjacent_windows():
    changed = dataclasses.replace(SOUND, convolution_channels=5, stacked_windows=4)
    assert "must be 1 with" in dict(changed.problems())["stacked_windows"]
