r"""Make spoken strings of digits, or a split of spoken digits by speaker.

    python -m transformer_jax.data.corpora.spoken_digits --recordings=DIR \
        --directory=runs/data/strings

DIR has the recordings of the Free Spoken Digit Dataset, with a table `{split}.tsv` of
the columns file, text and speaker for each of train, val and test. The result has the
same layout.

A string joins 3 to 6 recordings of one speaker, with up to 0.4 s of silence before and
after each. Its text is that of the recordings, e.g. "three one four". Strings of a
split are made from recordings of the same split, so those of val and test never occur
in train. `--kind=words` copies single recordings instead.

With `--held_out=NAME`, this speaker's recordings of all splits are test, and train and
val have the recordings of the others in the same split. The others' recordings of test
are left out. `--held_out=all` makes such files for each speaker, in a folder
`DIRECTORY/NAME`. Each run makes the same files.
"""

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags

from transformer_jax.data.sound import read_sound
from transformer_jax.data.tables import tsv_file
from transformer_jax.errors import UserError

RATE = 8000
COLUMNS = ("file", "text", "speaker")
KINDS = ("strings", "words")
STRINGS = {"train": 3000, "val": 200, "test": 400}
SHORTEST = 3  # recordings of a string
LONGEST = 6
GAP = 0.4  # seconds, at most
ALL = "all"


class Recording(NamedTuple):
    """A row of a table. `file` is the path from the folder of the table."""

    file: str
    text: str
    speaker: str


def write(recordings: Path, directory: Path, kind: str, held_out: str = "") -> None:
    """Write all files to a folder, or with `held_out` = "all" to one for each speaker.

    Raises:
        UserError: no recording is of the speaker `held_out`, or the folder is that of
            the recordings.
        DataError: a table or a recording cannot be read.
    """
    splits = {split: read(recordings, split) for split in STRINGS}
    if held_out == ALL:
        for speaker in speakers_of(splits):
            _write(recordings, directory / speaker, kind, without(splits, speaker))
    elif held_out:
        _write(recordings, directory, kind, without(splits, held_out))
    else:
        _write(recordings, directory, kind, splits)


def _write(
    recordings: Path, directory: Path, kind: str, splits: dict[str, list[Recording]]
) -> None:
    """Write the files of splits to one folder."""
    if directory.resolve() == recordings.resolve():
        raise UserError(
            f"--directory={directory} is the folder of the recordings, whose tables "
            "would be overwritten: choose another folder, e.g. runs/data/strings"
        )
    for number, (split, rows) in enumerate(splits.items()):
        (directory / split).mkdir(parents=True, exist_ok=True)
        if kind == "strings":
            draw = np.random.default_rng(number)
            chosen = [strung(rows, draw) for _ in range(STRINGS[split])]
        else:
            draw = None
            chosen = [[row] for row in rows]
        table = ["\t".join(COLUMNS)]
        for i, parts in enumerate(chosen):
            name = f"{split}/{i:04}.wav"
            sounds = [read_sound(recordings / part.file, RATE) for part in parts]
            write_wave(directory / name, joined(sounds, draw))
            text = " ".join(part.text for part in parts)
            table.append(f"{name}\t{text}\t{parts[0].speaker}")
        content = "\n".join(table) + "\n"
        (directory / f"{split}.tsv").write_text(content, encoding="utf-8")


def read(directory: Path, split: str) -> list[Recording]:
    """Return the recordings of a split."""
    table = tsv_file(directory, split, COLUMNS)
    columns = [table.column(name) for name in COLUMNS]
    return [Recording(*row) for row in zip(*columns, strict=True)]


def speakers_of(splits: dict[str, list[Recording]]) -> list[str]:
    """Return the speakers in alphabetical order."""
    return sorted({row.speaker for rows in splits.values() for row in rows})


def without(
    splits: dict[str, list[Recording]], held_out: str
) -> dict[str, list[Recording]]:
    """Return splits in which test has all recordings of one speaker, and train and val
    have none. The others' recordings of test are left out.
    """
    everything = [row for rows in splits.values() for row in rows]
    speakers = speakers_of(splits)
    if held_out not in speakers:
        raise UserError(
            f"--held_out={held_out}: must be one of {', '.join(speakers)}, "
            f"or {ALL}, or empty"
        )
    others = {
        split: [row for row in splits[split] if row.speaker != held_out]
        for split in ("train", "val")
    }
    return others | {"test": [row for row in everything if row.speaker == held_out]}


def strung(rows: Sequence[Recording], draw: np.random.Generator) -> list[Recording]:
    """Return random recordings of one speaker, each at most once."""
    speakers = sorted({row.speaker for row in rows})
    speaker = speakers[draw.integers(len(speakers))]
    of_speaker = [row for row in rows if row.speaker == speaker]
    count = draw.integers(SHORTEST, LONGEST + 1)
    chosen = draw.choice(len(of_speaker), count, replace=False)
    return [of_speaker[i] for i in chosen]


def joined(
    sounds: Sequence[np.ndarray], draw: np.random.Generator | None
) -> np.ndarray:
    """Return the samples of sounds one after another, with random gaps of silence
    before and after each. Without `draw`, there are no gaps.
    """
    parts = []
    for i in range(len(sounds) + 1):
        gap = 0 if draw is None else draw.integers(round(GAP * RATE) + 1)
        parts.append(np.zeros(gap, np.int16))
        parts += sounds[i : i + 1]
    return np.concatenate(parts)


def write_wave(path: Path, samples: np.ndarray) -> None:
    """Write samples (n,) int16 as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())


if __name__ == "__main__":
    RECORDINGS = flags.DEFINE_string(
        "recordings", None, "folder of the recordings and their tables", required=True
    )
    DIRECTORY = flags.DEFINE_string(
        "directory",
        None,
        "folder for the files: data.directory in training",
        required=True,
    )
    KIND = flags.DEFINE_enum("kind", KINDS[0], KINDS, "what a sound holds")
    HELD_OUT = flags.DEFINE_string(
        "held_out",
        "",
        "speaker of all recordings of test; all: a folder for each speaker; "
        "empty: the splits of the tables",
    )
    app.run(
        lambda _: write(
            Path(RECORDINGS.value).expanduser(),
            Path(DIRECTORY.value).expanduser(),
            KIND.value,
            HELD_OUT.value,
        )
    )
