"""Small corpora of images and sounds, for the recipes that read them."""

import wave
import zipfile
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from helpers.runs import get_config, shrink

SPLITS = {"train": 30, "val": 11, "test": 7}
COLOURS = ("red", "green", "blue")
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


def write_captions(
    directory: Path, shape: tuple[int, ...], references: int = 5
) -> None:
    """Write `{split}.image.npy` and captions.tsv: a colour, in as many words as the
    caption has a number.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    lines = ["image\tsplit\tcaption"]
    for split, count in SPLITS.items():
        colours = draw.integers(0, 3, count)
        features = draw.integers(-9, 9, (count, *shape)) + 20 * colours[:, *[None] * 3]
        np.save(directory / f"{split}.image.npy", features.astype(np.int8))
        for i, colour in enumerate(colours):
            for number in range(references):
                words = " ".join([COLOURS[colour]] * (1 + number))
                lines.append(f'{split}{i}.png\t{split}\tA "{words}" .')
    (directory / "captions.tsv").write_text("\n".join(lines) + "\n")


def write_photographs(directory: Path) -> None:
    """Write what `write_captions` does, `{split}.zip` with PNG files in the colours of
    the captions, and `{split}.tsv` with the first caption of each.
    """
    from PIL import Image

    write_captions(directory, (1, 1, 1))
    lines = (directory / "captions.tsv").read_text().splitlines()[1::5]
    for split in SPLITS:
        table = ["image\tcaption"]
        with zipfile.ZipFile(directory / f"{split}.zip", "w") as archive:
            for line in lines:
                name, of_line, caption = line.split("\t")
                if of_line == split:
                    table.append(f"{name}\t{caption}")
                    colour = caption.split('"')[1]
                    Image.new("RGB", (20, 20), colour).save(directory / name)
                    archive.write(directory / name, name)
        (directory / f"{split}.tsv").write_text("\n".join(table) + "\n")


def write(config: ConfigDict, directory: Path) -> None:
    """Write the corpus of a recipe whose source is not text."""
    if config.input.modality == "image":
        write_photographs(directory)
    elif config.data.table:
        write_captions(directory, config.input.grid_shape)
    elif config.input.modality == "grid":
        write_images(directory)
    else:
        write_sounds(directory)


def entries(modality: str, directory: Path) -> list[str]:
    """Return two records: names of files."""
    if modality in ("frames", "image"):
        ending = "wav" if modality == "frames" else "png"
        return [str(directory / f"test{i}.{ending}") for i in range(2)]
    for i, image in enumerate(np.load(directory / "test.image.npy")[:2]):
        np.save(directory / f"image{i}.npy", image)
    return [str(directory / f"image{i}.npy") for i in range(2)]


def small_recipe(name: str, arg: str, directory: Path) -> ConfigDict:
    """Return a recipe, shrunk, with a corpus of its modality in `directory`."""
    config = get_config(name, arg)
    write(config, directory)
    return shrink(config, directory)
