"""The corpus of spoken strings of digits, and the splits by speaker."""

import wave

import numpy as np
import pytest

from helpers.corpus import real_data
from transformer_jax.data.corpora import spoken_digits
from transformer_jax.data.corpora.spoken_digits import RATE, Recording, write_wave

SPEAKERS = ("ann", "bob", "eve")
WORDS = ("one", "two")
COUNTS = {"train": 5, "val": 3, "test": 3}  # of each speaker and word


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A folder with recordings, each of a constant of its own, so none is silent."""
    folder = tmp_path_factory.mktemp("recordings")
    number = 0
    for split, count in COUNTS.items():
        table = ["file\ttext\tspeaker"]
        for speaker in SPEAKERS:
            for word in WORDS * count:
                number += 1
                name = f"{number}.wav"
                write_wave(folder / name, np.full(10, number, np.int16))
                table.append(f"{name}\t{word}\t{speaker}")
        (folder / f"{split}.tsv").write_text("\n".join(table) + "\n")
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(spoken_digits, "STRINGS", {"train": 12, "val": 5, "test": 7})


def samples(path):
    with wave.open(str(path)) as content:
        assert content.getframerate() == RATE
        return np.frombuffer(content.readframes(content.getnframes()), "<i2")


def joined(folder, split):
    """Return (text, speaker, the numbers of the recordings in it) of each sound."""
    rows = []
    for row in spoken_digits.read(folder, split):
        sound = samples(folder / row.file)
        numbers = list(dict.fromkeys(sound[sound > 0].tolist()))
        for number in numbers:
            assert (sound == number).sum() == 10  # each is whole, and once
        rows.append((row.text, row.speaker, numbers))
    return rows


def split_of(recordings):
    """Return the split, the speaker and the word of each number."""
    return {
        int(row.file.removesuffix(".wav")): (split, row.speaker, row.text)
        for split in COUNTS
        for row in spoken_digits.read(recordings, split)
    }


def test_a_string_joins_recordings_of_one_speaker_and_split(recordings, tmp_path):
    spoken_digits.write(recordings, tmp_path, "strings")
    known = split_of(recordings)
    for split, count in (("train", 12), ("val", 5), ("test", 7)):
        rows = joined(tmp_path, split)
        assert len(rows) == count
        for text, speaker, numbers in rows:
            assert 3 <= len(numbers) <= 6
            assert text.split() == [known[number][2] for number in numbers]
            assert {known[number][:2] for number in numbers} == {(split, speaker)}
    assert len({speaker for _, speaker, _ in joined(tmp_path, "train")}) > 1


def test_gaps_are_silent_and_of_different_lengths(recordings, tmp_path):
    spoken_digits.write(recordings, tmp_path, "strings")
    gaps = []
    for row in spoken_digits.read(tmp_path, "train"):
        sound = samples(tmp_path / row.file)
        places = np.flatnonzero(sound)
        gaps += (np.diff(places)[9::10] - 1).tolist()
        assert len(sound) <= (LONGEST + 1) * spoken_digits.GAP * RATE + 10 * LONGEST
    assert 0 <= min(gaps) < max(gaps) <= spoken_digits.GAP * RATE
    assert len({*gaps}) > 20


LONGEST = spoken_digits.LONGEST


def test_the_files_are_the_same_every_time(recordings, tmp_path):
    for name in ("a", "b"):
        spoken_digits.write(recordings, tmp_path / name, "strings")
    files = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 12 + 5 + 7 + 3
    for path in files:
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", spoken_digits.KINDS)
def test_a_speaker_who_is_held_out_is_in_test_alone(recordings, tmp_path, kind):
    spoken_digits.write(recordings, tmp_path, kind, "bob")
    known = split_of(recordings)
    for split in COUNTS:
        rows = joined(tmp_path, split)
        speakers = {speaker for _, speaker, _ in rows}
        assert speakers == ({"bob"} if split == "test" else {"ann", "eve"})
        used = {number for _, _, numbers in rows for number in numbers}
        if split != "test":
            assert {known[number][0] for number in used} == {split}
        if kind == "words":
            assert len(rows) == len(used) == (22 if split == "test" else len(rows))
            assert all(len(numbers) == 1 for _, _, numbers in rows)


@pytest.mark.parametrize("kind", spoken_digits.KINDS)
def test_all_speakers_are_held_out_each_in_a_folder(recordings, tmp_path, kind):
    spoken_digits.write(recordings, tmp_path / "all", kind, "all")
    folders = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert folders == [*SPEAKERS]
    spoken_digits.write(recordings, tmp_path / "bob", kind, "bob")
    files = sorted(path for path in (tmp_path / "bob").rglob("*") if path.is_file())
    for path in files:
        same = tmp_path / "all" / path.relative_to(tmp_path)
        assert same.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("held_out", ["", "bob"])
def test_the_folder_of_the_recordings_is_not_overwritten(recordings, held_out):
    tables = {path: path.read_bytes() for path in recordings.glob("*.tsv")}
    same = recordings / ".." / recordings.name
    with pytest.raises(ValueError, match="is the folder of the recordings"):
        spoken_digits.write(recordings, same, "words", held_out)
    assert {path: path.read_bytes() for path in recordings.glob("*.tsv")} == tables
    assert not (recordings / "train").exists()


def test_a_speaker_folder_that_is_that_of_the_recordings_is_refused(tmp_path):
    folder = tmp_path / "ann"
    folder.mkdir()
    write_wave(folder / "1.wav", np.ones(10, np.int16))
    for split in COUNTS:
        (folder / f"{split}.tsv").write_text("file\ttext\tspeaker\n1.wav\tone\tann\n")
    with pytest.raises(ValueError, match="is the folder of the recordings"):
        spoken_digits.write(folder, tmp_path, "words", "all")


def test_an_unknown_speaker_is_refused(recordings, tmp_path):
    with pytest.raises(ValueError, match="zoe: must be one of ann, bob, eve, or all"):
        spoken_digits.write(recordings, tmp_path, "words", "zoe")


def test_the_real_recordings_are_read():
    folder = real_data("fsdd")
    rows = spoken_digits.read(folder, "val")
    assert len(rows) == 180
    assert rows[0] == Recording("val/0_george_5.wav", "zero", "george")
    assert len(spoken_digits.read_sound(folder / rows[0].file, RATE)) > 1000
