"""WAV files and log-mel features."""

import wave

import numpy as np
import pytest

from transformer_jax.data.files import DataError
from transformer_jax.data.sound import (
    Sounds,
    log_mel,
    mel_filters,
    read_wave,
    sounds_table,
)

RATE = 8000


def tone(frequency, seconds=0.3):
    return np.sin(2 * np.pi * frequency * np.arange(seconds * RATE) / RATE)


def write_wave(path, samples, rate=RATE, channels=1, width=2):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(np.round(30_000 * samples).astype("<i2").tobytes())


def test_features_are_windows_of_25_ms_10_ms_apart():
    assert log_mel(tone(500), RATE, 20).shape == (1 + (2400 - 200) // 80, 20)
    assert log_mel(tone(500)[:7], RATE, 20).shape == (1, 20)
    assert log_mel(np.zeros(0), RATE, 20).shape == (1, 20)


def test_features_do_not_depend_on_loudness():
    noise = tone(500) + 0.1 * np.random.default_rng(0).normal(size=2400)
    loud = log_mel(noise, RATE, 20)
    np.testing.assert_allclose(log_mel(noise / 1000, RATE, 20), loud, atol=1e-4)
    assert abs(loud.mean()) < 1e-5
    assert loud.std() == pytest.approx(1, rel=1e-5)
    assert abs(log_mel(np.zeros(2400), RATE, 20)).max() < 1e-6  # silence


@pytest.mark.parametrize("frequency", [300, 1000, 2500])
def test_a_tone_is_loudest_in_the_band_whose_peak_is_nearest(frequency):
    """The peaks are equally spaced on the mel scale between 0 and 4 kHz."""
    highest = 2595 * np.log10(1 + 4000 / 700)
    mel = 2595 * np.log10(1 + frequency / 700)
    nearest = round(mel / (highest / 21)) - 1
    assert (log_mel(tone(frequency), RATE, 20).argmax(axis=1) == nearest).all()


def test_neighbouring_filters_add_up_to_one_between_their_peaks():
    filters = mel_filters(RATE, 2000, 20)
    peaks = filters.argmax(axis=0)
    between = filters[peaks[0] : peaks[-1] + 1].sum(axis=1)
    np.testing.assert_allclose(between, 1, rtol=1e-12)


def test_a_wav_file_is_read_exactly(tmp_path):
    write_wave(tmp_path / "a.wav", tone(500))
    samples = read_wave(tmp_path / "a.wav", RATE)
    np.testing.assert_array_equal(samples, np.round(30_000 * tone(500)))


def test_other_wav_files_are_refused(tmp_path):
    write_wave(tmp_path / "fast.wav", tone(500), rate=16_000)
    write_wave(tmp_path / "stereo.wav", tone(500), channels=2)
    write_wave(tmp_path / "bytes.wav", tone(500), width=1)
    write_wave(tmp_path / "wide.wav", tone(500), width=4)
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "folder.wav").mkdir()
    for name, message in {
        "fast": r"has .* 16 bits at 16000 Hz: must be one channel .* at .* = 8000 Hz",
        "stereo": r"has 2 channel\(s\) of 16 bits",
        "bytes": r"has 1 channel\(s\) of 8 bits",
        "wide": r"has 1 channel\(s\) of 32 bits",
        "text": "cannot be read as WAV",
        "empty": "cannot be read as WAV: it ends within its header",
        "folder": "cannot be read as WAV",
        "none": "cannot be read as WAV",
    }.items():
        with pytest.raises(DataError, match=rf"{name}\.wav {message}"):
            read_wave(tmp_path / f"{name}.wav", RATE)


@pytest.mark.parametrize("missing", [1, 2, 101, 4000])
def test_a_wav_file_that_is_cut_off_is_refused(tmp_path, missing):
    write_wave(tmp_path / "a.wav", tone(500))
    content = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(content[:-missing])
    message = rf"a\.wav has {4800 - missing} bytes of sound, but its header says 4800"
    with pytest.raises(DataError, match=message):
        read_wave(tmp_path / "a.wav", RATE)


def test_a_table_names_sounds(tmp_path):
    for name, frequency in (("a", 500), ("b", 600)):
        write_wave(tmp_path / f"{name}.wav", tone(frequency))
    (tmp_path / "train.tsv").write_text("file\ttext\na.wav\tone\nb.wav\ttwo\n")
    source = sounds_table(tmp_path, "train", ["file", "text"], RATE)
    assert source.column("text") == ["one", "two"]
    expected = read_wave(tmp_path / "b.wav", RATE)
    np.testing.assert_array_equal(source.column("file")[1], expected)


def test_the_content_to_hash_is_that_of_the_files(tmp_path):
    def content():
        return b"".join(Sounds(["a.wav"], tmp_path, RATE).blocks())

    write_wave(tmp_path / "a.wav", tone(500))
    before = content()
    write_wave(tmp_path / "a.wav", tone(501))
    assert content() != before
