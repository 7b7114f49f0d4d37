"""The corpus of images of several digits."""

import numpy as np
import pytest

from transformer_jax.data.corpora import digits
from transformer_jax.data.sources import parallel_files

pytest.importorskip("sklearn", reason="scikit-learn: pip install -e '.[digits]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    digits.write(folder)
    return folder


def places(image):
    """Return the six places (6, 8, 8) of an image in reading order."""
    return image.reshape(2, 8, 3, 8).swapaxes(1, 2).reshape(6, 8, 8)


def test_an_image_shows_its_digits_in_reading_order(folder):
    images, labels = digits.load()
    known = {
        image.tobytes(): str(label) for image, label in zip(images, labels, strict=True)
    }
    for split, count in (("val", 500), ("test", 1000)):
        source = parallel_files(folder, split, ["image", "digits"])
        assert len(source) == count
        for row in source:
            seen = [place for place in places(row["image"]) if place.any()]
            text = row["digits"]
            assert " ".join(known[place.tobytes()] for place in seen) == text


def test_no_digit_is_in_two_splits(folder):
    seen = {}
    for split in digits.SPLITS:
        images = parallel_files(folder, split, ["image"]).column("image")
        seen[split] = {
            place.tobytes() for image in images for place in places(image)
        } - {bytes(64)}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]
    assert {name: len(images) for name, images in seen.items()} == {
        "train": 1297,
        "val": 200,
        "test": 300,
    }


def test_the_files_are_the_same_every_time(folder, tmp_path):
    digits.write(tmp_path)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert np.load(folder / "train.image.npy").shape == (20_000, 16, 24)
