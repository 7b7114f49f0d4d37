"""Small corpora of images and sounds, for the recipes that read them."""

import wave
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from helpers.runs import get_config, shrink

SPLITS = {"train": 30, "val": 11, "test": 7}
WORDS = ("zero", "one", "two")


def write_images(directory: Path, shape: tuple[int, ...] = (16, 24)) -> None:
    """Write `{split}.image.npy` and `{split}.digits`: the digit n is a shade."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for split, count in SPLITS.items():
        digits = draw.integers(1, 4, (count, 3))
        images = np.repeat(digits, 8, axis=1)[:, None] * np.full(shape, 60, np.uint8)
        np.save(directory / f"{split}.image.npy", images.astype(np.uint8))
        lines = [" ".join(map(str, row)) for row in digits]
        (directory / f"{split}.digits").write_text("\n".join(lines) + "\n")


def write_sounds(directory: Path, rate: int = 8000) -> None:
    """Write WAV files and `{split}.tsv`: every word is a tone with noise."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for split, count in SPLITS.items():
        table = ["file\ttext"]
        for number in range(count):
            word = number % len(WORDS)
            time = np.arange(rate * (0.1 + 0.05 * (number % 4))) / rate
            tone = np.sin(2 * np.pi * 500 * (1 + word) * time)
            samples = 3000 * (tone + 0.1 * draw.normal(size=len(time)))
            name = f"{split}{number}.wav"
            with wave.open(str(directory / name), "wb") as file:
                file.setparams((1, 2, rate, 0, "NONE", ""))
                file.writeframes(samples.astype("<i2").tobytes())
            table.append(f"{name}\t{WORDS[word]}")
        (directory / f"{split}.tsv").write_text("\n".join(table) + "\n")


def write(modality: str, directory: Path) -> None:
    """Write the corpus of a modality that is not text."""
    (write_images if modality == "grid" else write_sounds)(directory)


def entries(modality: str, directory: Path) -> list[str]:
    """Return two records: names of files."""
    if modality == "frames":
        return [str(directory / f"test{i}.wav") for i in range(2)]
    for i, image in enumerate(np.load(directory / "test.image.npy")[:2]):
        np.save(directory / f"image{i}.npy", image)
    return [str(directory / f"image{i}.npy") for i in range(2)]


def small_recipe(name: str, arg: str, directory: Path) -> ConfigDict:
    """Return a recipe, shrunk, with a corpus of its modality in `directory`."""
    config = get_config(name, arg)
    write(config.input.modality, directory)
    return shrink(config, directory)
