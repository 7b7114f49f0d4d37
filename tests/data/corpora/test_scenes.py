"""The corpus of scenes of digits and of sentences about them."""

import io
import zipfile

import numpy as np
import pytest

from transformer_jax.data.corpora import digits, scenes
from transformer_jax.data.tables import tsv_file

pytest.importorskip("sklearn", reason="scikit-learn: pip install -e '.[digits]'")
pytest.importorskip("PIL", reason="Pillow: pip install -e '.[images]'")

COUNTS = {"train": 300, "val": 30, "test": 40}


@pytest.fixture(scope="module")
def small():
    """A corpus of a few scenes."""
    with pytest.MonkeyPatch.context() as patch:
        splits = {
            split: (COUNTS[split], part) for split, (_, part) in scenes.SPLITS.items()
        }
        patch.setattr(scenes, "SPLITS", splits)
        yield


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    scenes.write(folder)
    return folder


def read(folder, split):
    """Yield (image, caption, places) of a split."""
    from PIL import Image

    table = tsv_file(folder, split, ("image", "caption", "places"))
    rows = zip(*map(table.column, ("image", "caption", "places")), strict=True)
    with zipfile.ZipFile(folder / f"{split}.zip") as archive:
        for name, caption, places in rows:
            image = np.asarray(Image.open(io.BytesIO(archive.read(name))))
            pairs = [tuple(map(int, place.split(","))) for place in places.split()]
            yield image, caption, pairs


def digit_at(image, place):
    """Return the digit at a place, without the empty rows and columns around it, as
    bytes; b"" if there is none.
    """
    row, column = place
    part = image[row * 24 : row * 24 + 24, column * 24 : column * 24 + 24]
    ys, xs = part.nonzero()
    if not len(ys):
        return b""
    return part[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1].tobytes()


def test_a_caption_names_the_digits_at_its_places(folder):
    images, labels = digits.load()
    known = {
        digit_at(np.kron(image, np.ones((2, 2), np.uint8)), (0, 0)): scenes.NAMES[label]
        for image, label in zip(images, labels, strict=True)
    }
    for split, count in COUNTS.items():
        rows = list(read(folder, split))
        assert len(rows) == count
        for image, caption, places in rows:
            assert image.shape == (72, 72)
            everywhere = [(row, column) for row in range(3) for column in range(3)]
            filled = [place for place in everywhere if digit_at(image, place)]
            assert filled == places
            assert 2 <= len(places) <= 5
            named = [known[digit_at(image, place)] for place in places]
            assert caption == scenes.caption(
                [scenes.NAMES.index(name) for name in named], places
            )
            for name in named:
                assert name in caption


def test_the_sentence():
    places = [(0, 1), (1, 1), (1, 2), (2, 0), (2, 2)]
    assert scenes.caption([3, 7, 9, 8, 0], places) == (
        "a three above a seven, left of a nine, above and right of an eight, "
        "left of a zero"
    )
    assert scenes.caption([1, 1], [(0, 0), (2, 1)]) == ("a one above and left of a one")


def test_no_digit_is_in_two_splits(folder):
    seen = {
        split: {digit_at(image, place) for image, _, places in rows for place in places}
        for split in COUNTS
        for rows in [list(read(folder, split))]
    }
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]


def test_the_files_are_the_same_every_time(small, folder, tmp_path):
    scenes.write(tmp_path)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
