"""Sound: WAV files, and their log-mel features.

Shapes: n samples · W windows · C mel bands · F frequencies.
"""

from __future__ import annotations

import functools
import wave
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from etils import epath

from transformer_jax.data.columns import Column
from transformer_jax.data.files import DataError
from transformer_jax.data.sources import Source
from transformer_jax.data.tables import tsv_file
from transformer_jax.files import is_for_user

WINDOW = 0.025  # seconds
HOP = 0.010  # seconds between the starts of two windows
FLOOR = 1e-8  # least energy, as a share of the largest


def read_wave(path: Any, rate: int) -> np.ndarray:
    """Return the samples (n,) int16 of a WAV file with one channel of 16 bits.

    Raises:
        DataError: the file cannot be read, has another format or rate, or ends before
            the last sample.
    """
    try:
        with path.open("rb") as file, wave.open(file) as content:
            channels = content.getnchannels()
            width = content.getsampwidth()
            file_rate = content.getframerate()
            count = content.getnframes()
            samples = content.readframes(count)
    except (OSError, EOFError, wave.Error) as error:
        if isinstance(error, OSError) and not is_for_user(error):
            raise
        reason = str(error) or "it ends within its header"
        raise DataError(
            f"{path} cannot be read as WAV: {reason}. Replace it."
        ) from error
    if channels != 1 or width != 2 or file_rate != rate:
        raise DataError(
            f"{path} has {channels} channel(s) of {8 * width} bits at {file_rate} Hz: "
            f"must be one channel of 16 bits at input.sample_rate = {rate} Hz"
        )
    if len(samples) != 2 * count:
        raise DataError(
            f"{path} has {len(samples)} bytes of sound, but its header says "
            f"{2 * count}: the file is cut off. Copy it again."
        )
    return np.frombuffer(samples, "<i2")


def log_mel(samples: np.ndarray, rate: int, bands: int) -> np.ndarray:
    """Return log-mel features (W, bands), float32, of samples (n,).

    Each is the logarithm of the energy of a Hann window in a triangular filter. The
    features of a sound have mean 0 and variance 1, so its loudness does not matter.
    """
    size = round(WINDOW * rate)
    hop = round(HOP * rate)
    missing = max(size - len(samples), 0)
    samples = np.pad(samples, (0, missing))
    windows = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop]
    hann = np.hanning(size + 1)[:-1]
    spectrum = np.fft.rfft(windows * hann, axis=1)
    energy = np.abs(spectrum) ** 2 @ mel_filters(rate, size, bands)
    floor = FLOOR * energy.max() + np.finfo(np.float64).tiny
    features = np.log(np.maximum(energy, floor))
    features -= features.mean()
    scale = max(features.std(), 1e-6)
    return (features / scale).astype(np.float32)


@functools.cache
def mel_filters(rate: int, size: int, bands: int) -> np.ndarray:
    """Return triangular filters (F, bands) for windows of `size` samples.

    Their peaks are equally spaced on the mel scale, m = 2595 log₁₀(1 + f / 700)
    (O'Shaughnessy 1987), from 0 to half the sampling rate. Each is 1 at its peak.
    """
    highest = 2595 * np.log10(1 + rate / 2 / 700)
    mels = np.linspace(0, highest, bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    starts = edges[:-2]
    peaks = edges[1:-1]
    ends = edges[2:]
    frequencies = np.fft.rfftfreq(size, 1 / rate)[:, None]
    rising = (frequencies - starts) / (peaks - starts)
    falling = (ends - frequencies) / (ends - peaks)
    return np.maximum(np.minimum(rising, falling), 0)


class Sounds(Column):
    """The samples of WAV files, read on access.

    Args:
        names: paths from `directory`.
        directory: folder of the files.
        rate: samples per second that every file must have.
    """

    def __init__(self, names: Sequence[str], directory: epath.PathLike, rate: int):
        self._names = names
        self._directory = epath.Path(directory).expanduser()
        self._rate = rate

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, i: Any) -> Any:
        return read_wave(self._directory / self._names[i], self._rate)

    def blocks(self) -> Iterator[bytes]:
        for name, samples in zip(self._names, self, strict=True):
            yield f"{name}\0{len(samples)}\0".encode()
            yield samples.tobytes()

    def part(self, start: int, stop: int) -> Self:
        return type(self)(self._names[start:stop], self._directory, self._rate)


def sounds_table(
    directory: epath.PathLike, split: str, columns: Sequence[str], rate: int
) -> Source:
    """Read columns of `{split}.tsv`, the first of which names WAV files in `directory`.

    For what else a table must be, see `tsv_file`.
    """
    table = tsv_file(directory, split, columns)
    values = {name: table.column(name) for name in columns}
    sound_column = columns[0]
    values[sound_column] = Sounds(values[sound_column], directory, rate)
    return Source(values, table.where, table.first_line)
