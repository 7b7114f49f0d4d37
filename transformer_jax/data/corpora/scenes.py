r"""Make images of scattered handwritten digits, and sentences that say where they are.

    python -m transformer_jax.data.corpora.scenes --directory=runs/data/scenes

A scene has 3 rows of 3 places of 24×24 pixels. Two to five places have a digit of
16×16 pixels somewhere in it. Its caption names the digits in reading order, and says
where each lies from the next one, e.g. "a three above a seven, left of a nine": the
seven is in the column of the three, and the nine in the row of the seven. In another
row and another column, a digit is "above and left of" the next one, or "above and right
of" it. So a scene has one right caption.

The digits are those of `corpora.digits`. No digit is in scenes of two splits. Each run
makes the same files: `{split}.zip` with a PNG file for each scene, and `{split}.tsv`
with the columns image, caption and places. The last one has the row and the column of
each digit in the order of the caption, from 0, e.g. "0,1 1,1 1,2". scikit-learn and
Pillow are needed.
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags

from transformer_jax.data.corpora.digits import PIXELS, load
from transformer_jax.errors import UserError

ROWS = 3
COLUMNS = 3
SCALE = 2  # height and width of a pixel of a digit
PLACE = 24  # height and width of a place in pixels
FEWEST = 2  # digits of a scene
MOST = 5
# split → number of scenes, and its digits in a shuffled order
SPLITS = {
    "train": (20_000, slice(0, 1297)),
    "val": (500, slice(1297, 1497)),
    "test": (1000, slice(1497, 1797)),
}
NAMES = (
    "a zero",
    "a one",
    "a two",
    "a three",
    "a four",
    "a five",
    "a six",
    "a seven",
    "an eight",
    "a nine",
)


class Scene(NamedTuple):
    """An image (72, 72) of bytes, and the digits and places (row, column) in it, in
    reading order.
    """

    image: np.ndarray
    digits: Sequence[int]
    places: Sequence[tuple[int, int]]


def write(directory: Path, seed: int = 0) -> None:
    """Write all files to a folder.

    Raises UserError without scikit-learn or Pillow.
    """
    digits, labels = load()
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(digits))
    directory.mkdir(parents=True, exist_ok=True)
    for split, (count, part) in SPLITS.items():
        chosen = order[part]
        table = ["image\tcaption\tplaces"]
        with zipfile.ZipFile(directory / f"{split}.zip", "w") as archive:
            for i in range(count):
                scene = compose(digits[chosen], labels[chosen], draw)
                name = f"{i:05}.png"
                # a date of its own, so that each run writes the same bytes
                archive.writestr(zipfile.ZipInfo(name), png(scene.image))
                places = " ".join(f"{row},{column}" for row, column in scene.places)
                sentence = caption(scene.digits, scene.places)
                table.append(f"{name}\t{sentence}\t{places}")
        (directory / f"{split}.tsv").write_text("\n".join(table) + "\n")


def compose(digits: np.ndarray, labels: np.ndarray, draw: np.random.Generator) -> Scene:
    """Return a scene of random digits (n, 8, 8) with labels (n,)."""
    count = draw.integers(FEWEST, MOST + 1)
    chosen = draw.choice(len(digits), count, replace=False)
    numbers = np.sort(draw.choice(ROWS * COLUMNS, count, replace=False))
    places = [divmod(int(number), COLUMNS) for number in numbers]
    size = SCALE * PIXELS
    offsets = draw.integers(PLACE - size + 1, size=(count, 2))

    image = np.zeros((ROWS * PLACE, COLUMNS * PLACE), np.uint8)
    corners = np.array(places) * PLACE + offsets
    large = digits[chosen].repeat(SCALE, axis=1).repeat(SCALE, axis=2)
    for digit, (top, left) in zip(large, corners, strict=True):
        image[top : top + size, left : left + size] = digit
    return Scene(image, [int(label) for label in labels[chosen]], places)


def caption(digits: Sequence[int], places: Sequence[tuple[int, int]]) -> str:
    """Return the sentence about digits that are at places (row, column), in reading
    order.
    """
    sentence = NAMES[digits[0]]
    for i in range(1, len(digits)):
        comma = "," if i > 1 else ""
        relation = where(places[i - 1], places[i])
        sentence = f"{sentence}{comma} {relation} {NAMES[digits[i]]}"
    return sentence


def where(first: tuple[int, int], second: tuple[int, int]) -> str:
    """Return where a place lies from a later one in reading order."""
    row, column = first
    next_row, next_column = second
    if row == next_row:
        return "left of"
    if column == next_column:
        return "above"
    side = "left" if column < next_column else "right"
    return f"above and {side} of"


def png(image: np.ndarray) -> bytes:
    """Return the content of a PNG file of an image (rows, columns) of bytes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "the scenes are written by Pillow: pip install -c constraints.txt "
            "-e '.[images]' in the folder of transformer_jax"
        ) from error
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


if __name__ == "__main__":
    DIRECTORY = flags.DEFINE_string(
        "directory",
        None,
        "folder for the files: data.directory in training",
        required=True,
    )
    app.run(lambda _: write(Path(DIRECTORY.value).expanduser()))
