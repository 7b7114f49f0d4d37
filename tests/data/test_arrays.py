"""Columns of arrays: .npy files, with and without offsets, beside lines of text."""

import numpy as np
import pytest

from transformer_jax.data.files import DataError
from transformer_jax.data.sources import parallel_files

IMAGES = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "train.image.npy", IMAGES)
    (tmp_path / "train.text").write_text("a\nb\nc\nd\ne\n")
    return tmp_path


def test_arrays_are_parallel_to_lines_and_are_not_copied(folder):
    source = parallel_files(folder, "train[1:4]", ["image", "text"])
    images = source.column("image")
    assert source.column("text") == ["b", "c", "d"]
    np.testing.assert_array_equal(list(images), IMAGES[1:4])
    assert isinstance(images.values, np.memmap)
    np.testing.assert_array_equal(source[-1]["image"], IMAGES[3])


def test_offsets_divide_the_first_axis(folder):
    np.save(folder / "train.image.offsets.npy", [0, 2, 2, 3, 4, 5])
    images = parallel_files(folder, "train[:3]", ["image", "text"]).column("image")
    assert [len(image) for image in images] == [2, 0, 1]
    np.testing.assert_array_equal(images[0], IMAGES[:2])
    np.testing.assert_array_equal(images[-1], IMAGES[2:3])
    assert len(images[:2]) == 2
    with pytest.raises(IndexError, match="no entry 3 in 3 entries"):
        images[3]


def content(folder, split="train"):
    return b"".join(parallel_files(folder, split, ["image"]).column("image").blocks())


def test_the_content_to_hash_differs_by_value_type_shape_and_offsets(folder):
    seen = {content(folder), content(folder, "train[1:]")}
    for other in (IMAGES + 1, IMAGES.astype(np.int8), IMAGES.reshape(5, 3, 2)):
        np.save(folder / "train.image.npy", other)
        seen.add(content(folder))
    np.save(folder / "train.image.npy", IMAGES)
    for offsets in ([0, 2, 5], [0, 3, 5]):
        np.save(folder / "train.image.offsets.npy", offsets)
        seen.add(content(folder))
    assert len(seen) == 7


@pytest.mark.parametrize("offsets", [[0, 2], [1, 5], [0, 3, 2, 5], [0.0, 5.0], []])
def test_offsets_that_do_not_fit_are_refused(folder, offsets):
    np.save(folder / "train.image.offsets.npy", offsets)
    with pytest.raises(DataError, match=r"must be whole numbers that ascend from 0 to"):
        content(folder)


def test_files_of_another_kind_or_length_are_refused(folder):
    (folder / "train.text").write_text("a\n")
    with pytest.raises(DataError, match=r"image\.npy has 5, .*text has 1"):
        parallel_files(folder, "train", ["image", "text"])
    np.save(folder / "train.image.npy", 7)
    with pytest.raises(DataError, match="has no axes"):
        content(folder)
    (folder / "train.image.npy").write_text("no array")
    with pytest.raises(DataError, match=r"image\.npy cannot be read as \.npy"):
        content(folder)
