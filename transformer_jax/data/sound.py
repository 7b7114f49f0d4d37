"""Sound: files, and their log-mel features.

Shapes: n samples · W windows · C mel bands · F frequencies.
"""

from __future__ import annotations

import functools
import logging
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

log = logging.getLogger(__name__)

WINDOW = 0.025  # seconds
HOP = 0.010  # seconds between the starts of two windows
# files that soundfile reads
OTHER_FORMATS = (".flac", ".ogg", ".opus", ".mp3")
FLOOR = 1e-8  # least energy, as a share of the largest
# WAV formats for which the message of `wave` gives a number alone
FORMATS = {
    "unknown format: 3": "floating-point numbers",
    # Python 3.12 and later read it
    "unknown format: 65534": "the extended format, e.g. for 24 or 32 bits",
}


def read_sound(path: Any, rate: int, longest: int | None = None) -> np.ndarray:
    """Return the samples (n,) int16 of a WAV file with one channel of 16 bits, or of a
    file whose ending is in `OTHER_FORMATS` with one channel.

    The header is read first. Of a longer sound, the first `longest` samples are read,
    and a warning is logged.

    Raises:
        DataError: the file cannot be read, has another format or rate, or ends before
            the last sample.
    """
    if str(path).lower().endswith(OTHER_FORMATS):
        return _read_other(path, rate, longest)
    try:
        with path.open("rb") as file, wave.open(file) as content:
            channels = content.getnchannels()
            width = content.getsampwidth()
            file_rate = content.getframerate()
            count = content.getnframes()
            if channels != 1 or width != 2 or file_rate != rate:
                raise DataError(
                    f"{path} has {channels} channel(s) of {8 * width} bits at "
                    f"{file_rate} Hz: must be one channel of 16 bits at "
                    f"input.sample_rate = {rate} Hz. {_conversion(rate)}"
                )
            wanted = _part(path, count, rate, longest)
            samples = content.readframes(wanted)
    except (OSError, EOFError, wave.Error) as error:
        if isinstance(error, OSError) and not is_for_user(error):
            raise
        if content := FORMATS.get(str(error)):
            raise DataError(
                f"{path} is a WAV file with {content}: must be one channel of 16 bits "
                f"in the plain format, PCM. {_conversion(rate)}"
            ) from error
        reason = str(error) or "it ends within its header"
        raise DataError(
            f"{path} cannot be read as WAV: {reason}. Replace it. {_conversion(rate)}"
        ) from error
    if len(samples) != 2 * wanted:
        raise DataError(
            f"{path} has {len(samples)} bytes of sound, but its header says "
            f"{2 * count}: the file is cut off. Copy it again."
        )
    return np.frombuffer(samples, "<i2")


def _read_other(path: Any, rate: int, longest: int | None) -> np.ndarray:
    """See `read_sound`."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without its C library
        raise DataError(
            f"{path} needs the package soundfile: pip install -c constraints.txt -e "
            f"'.[sound]' in the folder of transformer_jax. {_conversion(rate)}"
        ) from error
    try:
        with path.open("rb") as file, soundfile.SoundFile(file) as content:
            if content.channels != 1 or content.samplerate != rate:
                raise DataError(
                    f"{path} has {content.channels} channel(s) at "
                    f"{content.samplerate} Hz: must be one channel at "
                    f"input.sample_rate = {rate} Hz. {_conversion(rate)}"
                )
            wanted = _part(path, content.frames, rate, longest)
            samples = content.read(wanted, dtype="int16")
    except (OSError, soundfile.LibsndfileError) as error:
        if isinstance(error, OSError) and not is_for_user(error):
            raise
        raise DataError(f"{path} cannot be read: {error}. Replace it.") from error
    if len(samples) != wanted:
        raise DataError(
            f"{path} has {len(samples)} of {wanted} samples: "
            "the file is cut off. Copy it again."
        )
    return samples


def _conversion(rate: int) -> str:
    """Return the remedy for a file in another format."""
    return f"To convert a file: ffmpeg -i IN -ac 1 -ar {rate} -sample_fmt s16 OUT.wav"


def _part(path: Any, count: int, rate: int, longest: int | None) -> int:
    """Return the number of samples to read of `count`."""
    if longest is None or count <= longest:
        return count
    log.warning(
        "%s lasts %.1f s: only the first %.1f s are read, "
        "as many as the model can read (input.max_positions) and one position more",
        path,
        count / rate,
        longest / rate,
    )
    return longest


def samples_beyond(positions: int, stacked: int, rate: int) -> int:
    """Return the fewest samples of which there are more than `positions` positions of
    `stacked` windows.
    """
    return round(WINDOW * rate) + positions * stacked * round(HOP * rate)


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
    """The samples of files, read on access.

    Args:
        names: paths from `directory`.
        directory: folder of the files.
        rate: samples per second that every file must have.
        longest: most samples to read of a file, see `read_sound`.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: epath.PathLike,
        rate: int,
        longest: int | None = None,
    ):
        self._names = names
        self._directory = epath.Path(directory).expanduser()
        self._rate = rate
        self._longest = longest

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, i: Any) -> Any:
        return read_sound(self._directory / self._names[i], self._rate, self._longest)

    def blocks(self) -> Iterator[bytes]:
        for name, samples in zip(self._names, self, strict=True):
            yield f"{name}\0{len(samples)}\0".encode()
            yield samples.tobytes()

    def part(self, start: int, stop: int) -> Self:
        names = self._names[start:stop]
        return type(self)(names, self._directory, self._rate, self._longest)


def sounds_table(
    directory: epath.PathLike,
    split: str,
    columns: Sequence[str],
    rate: int,
    longest: int | None = None,
) -> Source:
    """Read columns of `{split}.tsv`, the first of which names sounds in `directory`.

    For what else a table must be, see `tsv_file`, and for the sounds `Sounds`.
    """
    table = tsv_file(directory, split, columns)
    values = {name: table.column(name) for name in columns}
    sound_column = columns[0]
    values[sound_column] = Sounds(values[sound_column], directory, rate, longest)
    return Source(values, table.where, table.first_line)
