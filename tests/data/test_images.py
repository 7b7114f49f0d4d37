"""Images that lines of text hold as JSON or name."""

import json

import numpy as np
import pytest

from transformer_jax.data.files import DataError
from transformer_jax.data.images import grid_files, grid_of, grids_of
from transformer_jax.data.sources import Source, held
from transformer_jax.data.streams import Grid

IMAGE = np.arange(24, dtype=np.uint8).reshape(4, 6)


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "a.npy", IMAGE)
    lines = ["a.npy", json.dumps((IMAGE / 2).tolist())]
    (data / "train.image").write_text("".join(f"{line}\n" for line in lines))
    (data / "train.text").write_text("one\ntwo\n")
    return data


def images(folder, split="train"):
    return grid_files(folder, split, ["image", "text"]).column("image")


def test_names_in_a_file_of_data_are_relative_to_its_folder(folder, monkeypatch):
    first, second = images(folder)
    np.testing.assert_array_equal(first, IMAGE)
    np.testing.assert_array_equal(second, IMAGE / 2)
    np.testing.assert_array_equal(images(folder, "train[1:]")[0], IMAGE / 2)
    rows = Grid("image", (4, 6, 1), cell=2).encode(images(folder))
    assert rows.values.max() == 23 / 2
    with pytest.raises(DataError, match="No such file"):
        grid_of("a.npy")
    monkeypatch.chdir(folder)
    np.testing.assert_array_equal(grid_of("a.npy"), IMAGE)


def test_the_content_to_hash_is_that_of_the_files_that_are_named(folder):
    before = b"".join(images(folder).blocks())
    np.save(folder / "a.npy", IMAGE + 1)
    assert b"".join(images(folder).blocks()) != before


def test_what_is_no_array_is_refused(folder):
    (folder / "empty.npy").write_bytes(b"")
    (folder / "text.npy").write_text("no array")
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(folder / "several.npz", IMAGE)
    lines = ["", "empty.npy", "text.npy", "objects.npy", "several.npz", "none.npy"]
    lines += ["[[1, 2], [3]]", "[[1, 2", "[" * 100_000, "a\0b"]
    (folder / "train.image").write_text("".join(f"{line}\n" for line in lines))
    (folder / "train.text").write_text("text\n" * len(lines))
    column = images(folder)
    for i in range(len(lines)):
        with pytest.raises(DataError, match=rf"train\.image .*, example {i + 1}: "):
            column[i]


def of_table(folder, count=2, shape=(4, 6, 1)):
    """Return the grids for a table of `count` images."""
    table = Source({"image": held(["a.npy"] * count)}, "captions.tsv", lines=[2, 7])
    return grids_of(folder, "test", table, "image", shape)


def test_the_grids_of_a_table_are_an_array_or_files_that_it_names(folder):
    np.testing.assert_array_equal(of_table(folder)[1], IMAGE)
    np.save(folder / "test.image.npy", np.stack([IMAGE, IMAGE + 1]))
    grids = of_table(folder)
    assert isinstance(grids.values, np.memmap)
    np.testing.assert_array_equal(grids[1], IMAGE + 1)


@pytest.mark.parametrize(
    ("count", "shape", "message"),
    [
        (
            3,
            (4, 6, 1),
            r"test.image.npy has 2 rows, but captions.tsv has 3 images of the split "
            "test: they must be the same, in the same order",
        ),
        (
            2,
            (4, 3, 2),
            r"test.image.npy has grids of the shape \(4, 6\): must be input.",
        ),
        (2, (4, 6, 2), r"has grids of the shape \(4, 6\): must be input.grid_shape = "),
    ],
)
def test_grids_of_other_images_or_shapes_are_refused(folder, count, shape, message):
    np.save(folder / "test.image.npy", np.stack([IMAGE, IMAGE + 1]))
    with pytest.raises(DataError, match=message):
        of_table(folder, count, shape)
