"""Files of sound and log-mel features."""

import struct
import sys
import tracemalloc
import wave

import numpy as np
import pytest

from transformer_jax.data.files import DataError
from transformer_jax.data.sound import (
    Sounds,
    log_mel,
    mel_filters,
    read_sound,
    samples_beyond,
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


# From librosa 0.11, of `chirp()`: feature.melspectrogram(y, sr=8000, n_fft=200,
# hop_length=80, window="hann", center=False, power=2.0, n_mels=7, htk=True, norm=None).
# Of that the logarithm, minus its mean, over its standard deviation.
LIBROSA = """
 0.239605  0.951555  0.836417 -0.517477 -1.966393 0.544009 0.445536
-0.893788  0.686975  0.988403  0.494188 -1.599444 0.544009 0.445536
-1.670457 -0.136413  0.934110  0.870033 -0.707436 0.544009 0.445536
-2.031612 -1.227029  0.704750  0.990213  0.356239 0.544009 0.445536
-2.095650 -1.878681 -0.046356  0.968197  0.802325 0.544010 0.445536
"""


def chirp(count=520):
    time = np.arange(count) / RATE
    rising = np.sin(2 * np.pi * (300 * time + 9000 * time**2))
    return rising + 0.3 * np.sin(2 * np.pi * 2500 * time)


def test_features_are_those_of_librosa_stored():
    expected = np.array(LIBROSA.split(), float).reshape(5, 7)
    np.testing.assert_allclose(log_mel(chirp(), RATE, 7), expected, atol=1e-5)


@pytest.mark.parametrize(("rate", "bands"), [(8000, 40), (16_000, 80)])
def test_features_are_those_of_librosa(rate, bands):
    librosa = pytest.importorskip("librosa", reason="librosa is not installed")
    energy = librosa.feature.melspectrogram(
        y=chirp(5000),
        sr=rate,
        n_fft=rate // 40,
        hop_length=rate // 100,
        window="hann",
        center=False,
        power=2.0,
        n_mels=bands,
        htk=True,
        norm=None,
    )
    expected = np.log(np.maximum(energy, 1e-8 * energy.max())).T
    expected = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(log_mel(chirp(5000), rate, bands), expected, atol=1e-4)


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
    samples = read_sound(tmp_path / "a.wav", RATE)
    np.testing.assert_array_equal(samples, np.round(30_000 * tone(500)))


def test_other_wav_files_are_refused(tmp_path):
    write_wave(tmp_path / "fast.wav", tone(500), rate=16_000)
    write_wave(tmp_path / "stereo.wav", tone(500), channels=2)
    write_wave(tmp_path / "bytes.wav", tone(500), width=1)
    write_wave(tmp_path / "wide.wav", tone(500), width=4)
    write_wave(tmp_path / "studio.wav", tone(500)[:2399], width=3)
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "folder.wav").mkdir()
    for name, message in {
        "fast": r"has .* 16 bits at 16000 Hz: must be one channel .* at .* = 8000 Hz. "
        r"To convert a file: ffmpeg .* -ar 8000",
        "studio": r"has 1 channel\(s\) of 24 bits",
        "stereo": r"has 2 channel\(s\) of 16 bits",
        "bytes": r"has 1 channel\(s\) of 8 bits",
        "wide": r"has 1 channel\(s\) of 32 bits",
        "text": "cannot be read as WAV",
        "empty": "cannot be read as WAV: it ends within its header",
        "folder": "cannot be read as WAV",
        "none": "cannot be read as WAV",
    }.items():
        with pytest.raises(DataError, match=rf"{name}\.wav {message}"):
            read_sound(tmp_path / f"{name}.wav", RATE)


def header(code, width, more=b""):
    """Return the start of a WAV file of one channel with a format of this number."""
    size = width * RATE
    form = struct.pack("<HHIIHH", code, 1, RATE, size, width, 8 * width) + more
    sound = bytes(width * 100)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(sound)) + sound
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def test_wav_files_of_other_formats_are_refused(tmp_path):
    """As written by e.g. `ffmpeg -c:a pcm_f32le` and `-c:a pcm_s24le`."""
    pcm = bytes.fromhex("0100000000001000800000aa00389b71")
    extension = struct.pack("<HHI", 22, 24, 4) + pcm
    (tmp_path / "float.wav").write_bytes(header(3, 4))
    (tmp_path / "wide.wav").write_bytes(header(65534, 3, extension))
    (tmp_path / "law.wav").write_bytes(header(6, 1))
    for name, message in {
        "float": "is a WAV file with floating-point numbers: must be one channel of 16 "
        "bits in the plain format, PCM. To convert a file: ffmpeg",
        # Python 3.12 and later read this header
        "wide": r"(is .* with the extended format|has 1 channel\(s\) of 24 bits)",
        "law": "cannot be read as WAV: unknown format: 6",
    }.items():
        with pytest.raises(DataError, match=rf"{name}\.wav {message}"):
            read_sound(tmp_path / f"{name}.wav", RATE)


def test_a_part_that_is_read_may_be_followed_by_a_missing_one(tmp_path):
    write_wave(tmp_path / "a.wav", tone(500))
    content = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(content[:-1000])
    assert len(read_sound(tmp_path / "a.wav", RATE, 1900)) == 1900
    with pytest.raises(DataError, match="the file is cut off"):
        read_sound(tmp_path / "a.wav", RATE, 1901)


@pytest.mark.parametrize("missing", [1, 2, 101, 4000])
def test_a_wav_file_that_is_cut_off_is_refused(tmp_path, missing):
    write_wave(tmp_path / "a.wav", tone(500))
    content = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(content[:-missing])
    message = rf"a\.wav has {4800 - missing} bytes of sound, but its header says 4800"
    with pytest.raises(DataError, match=message):
        read_sound(tmp_path / "a.wav", RATE)


def test_of_a_long_sound_only_what_the_model_can_read_is_read(tmp_path, caplog):
    """The header says how long it is, so an hour needs no memory."""
    hour = 3600 * RATE
    with (tmp_path / "hour.wav").open("wb") as file:
        with wave.open(file, "wb") as content:
            content.setparams((1, 2, RATE, hour, "NONE", ""))
            content.writeframes(bytes(2))
        file.truncate(44 + 2 * hour)  # no disk space
    with (tmp_path / "hour.wav").open("r+b") as file:  # sizes in its header
        for offset, size in ((4, 36 + 2 * hour), (40, 2 * hour)):
            file.seek(offset)
            file.write(size.to_bytes(4, "little"))
    longest = samples_beyond(positions=4, stacked=3, rate=RATE)
    tracemalloc.start()
    samples = read_sound(tmp_path / "hour.wav", RATE, longest)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == longest
    assert most < 1e6
    assert "hour.wav lasts 3600.0 s: only the first 0.1 s are read" in caplog.text


@pytest.mark.parametrize("positions", [1, 4, 7])
def test_a_sound_of_a_sample_less_has_no_position_too_many(positions):
    longest = samples_beyond(positions, stacked=3, rate=RATE)
    for count, expected in ((longest, positions + 1), (longest - 1, positions)):
        windows = len(log_mel(np.ones(count), RATE, 4))
        assert -(-windows // 3) == expected


def test_other_formats_are_read_by_soundfile(tmp_path, caplog):
    soundfile = pytest.importorskip("soundfile", reason="soundfile: pip install it")
    for name, rate, channels in (
        ("a", RATE, 1),
        ("fast", 2 * RATE, 1),
        ("both", RATE, 2),
    ):
        samples = np.stack([tone(500)] * channels, axis=1)
        soundfile.write(tmp_path / f"{name}.flac", samples / 2, rate, "PCM_16")
    found = read_sound(tmp_path / "a.flac", RATE)
    np.testing.assert_allclose(found, tone(500) * 2**14, atol=1)
    assert len(read_sound(tmp_path / "a.flac", RATE, 100)) == 100
    assert "lasts 0.3 s" in caplog.text
    (tmp_path / "text.ogg").write_text("no sound")
    for name, message in {
        "fast.flac": r"has 1 channel\(s\) at 16000 Hz: must be .* 8000 Hz",
        "both.flac": r"has 2 channel\(s\)",
        "text.ogg": "cannot be read",
        "none.ogg": "cannot be read",
    }.items():
        with pytest.raises(DataError, match=rf"{name} {message}"):
            read_sound(tmp_path / name, RATE)


def test_without_soundfile_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"a\.FLAC needs .* '\.\[sound\]' .* ffmpeg"):
        read_sound(tmp_path / "a.FLAC", RATE)


def test_a_table_names_sounds(tmp_path):
    for name, frequency in (("a", 500), ("b", 600)):
        write_wave(tmp_path / f"{name}.wav", tone(frequency))
    (tmp_path / "train.tsv").write_text("file\ttext\na.wav\tone\nb.wav\ttwo\n")
    source = sounds_table(tmp_path, "train", ["file", "text"], RATE)
    assert source.column("text") == ["one", "two"]
    expected = read_sound(tmp_path / "b.wav", RATE)
    np.testing.assert_array_equal(source.column("file")[1], expected)


def test_the_content_to_hash_is_that_of_the_files(tmp_path):
    def content():
        return b"".join(Sounds(["a.wav"], tmp_path, RATE).blocks())

    write_wave(tmp_path / "a.wav", tone(500))
    before = content()
    write_wave(tmp_path / "a.wav", tone(501))
    assert content() != before
