r"""Make images of several handwritten digits, and the digits in reading order.

    python -m transformer_jax.data.corpora.digits --directory=runs/data/digits

An image has 2 rows of 3 places, each of 8×8 pixels. At least one place has a digit, and
any other is empty with a probability of 1/4. The digits are those of scikit-learn (the
test set of the UCI data set "Optical Recognition of Handwritten Digits", 1,797 images).
No digit is in images of two splits. Each run makes the same files: `{split}.image.npy`,
uint8 (N, 16, 24), and `{split}.digits`, e.g. "3 7 1 4". scikit-learn is needed.
"""

from pathlib import Path

import numpy as np
from absl import app, flags

from transformer_jax.errors import UserError

ROWS = 2
COLUMNS = 3
PIXELS = 8
EMPTY = 0.25  # the share of places without a digit
# split → number of images, and its digits in a shuffled order
SPLITS = {
    "train": (20_000, slice(0, 1297)),
    "val": (500, slice(1297, 1497)),
    "test": (1000, slice(1497, 1797)),
}


def write(directory: Path, seed: int = 0) -> None:
    """Write all files to a folder.

    Raises UserError without scikit-learn.
    """
    digits, labels = load()
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(digits))
    directory.mkdir(parents=True, exist_ok=True)
    for split, (count, part) in SPLITS.items():
        chosen = order[part]
        images, texts = compose(digits[chosen], labels[chosen], count, draw)
        np.save(directory / f"{split}.image.npy", images)
        (directory / f"{split}.digits").write_text("\n".join(texts) + "\n")


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits (n, 8, 8), uint8 from 0 to 255, and their labels (n,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "the digits are in scikit-learn: pip install -c constraints.txt "
            "-e '.[digits]' in the folder of transformer_jax"
        ) from error
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, PIXELS, PIXELS)  # from 0 to 16
    return np.round(images * 255 / 16).astype(np.uint8), labels


def compose(
    digits: np.ndarray, labels: np.ndarray, count: int, draw: np.random.Generator
) -> tuple[np.ndarray, list[str]]:
    """Return `count` images (count, 16, 24) of random digits, and their texts."""
    places = ROWS * COLUMNS
    chosen = draw.integers(len(digits), size=(count, places))
    filled = draw.random((count, places)) >= EMPTY
    always_filled = draw.integers(places, size=count)
    filled[np.arange(count), always_filled] = True

    cells = np.where(filled[:, :, None, None], digits[chosen], 0)
    cells = cells.reshape(count, ROWS, COLUMNS, PIXELS, PIXELS)
    lines = cells.swapaxes(2, 3)
    images = lines.reshape(count, ROWS * PIXELS, COLUMNS * PIXELS)

    texts = []
    for image_labels, image_filled in zip(labels[chosen], filled, strict=True):
        texts.append(" ".join(map(str, image_labels[image_filled])))
    return images, texts


if __name__ == "__main__":
    DIRECTORY = flags.DEFINE_string(
        "directory",
        None,
        "folder for the files: data.directory in training",
        required=True,
    )
    app.run(lambda _: write(Path(DIRECTORY.value).expanduser()))
