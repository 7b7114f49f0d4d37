"""Files of tensors: what is read and written, and what a damaged or incomplete
folder is told.
"""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from helpers.parity import write_file
from transformer_jax.interop import tensors
from transformer_jax.interop.tensors import InteropError, Tensors

DRAWN = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64]
)
def test_types(tmp_path, dtype):
    first, second = (10 * DRAWN).astype(dtype), DRAWN[0].astype(dtype)
    write_file(
        tmp_path / "model.safetensors",
        {"b": first, "a": second, "none": np.zeros((0, 3), dtype)},
    )
    found = Tensors(tmp_path)
    assert list(found) == ["b", "a", "none"]
    for name, expected in {"a": second, "b": first}.items():
        assert found[name].dtype == dtype
        assert found.shape(name) == expected.shape
        np.testing.assert_array_equal(found[name], expected)
    assert found["none"].shape == (0, 3)
    assert isinstance(found["b"], np.memmap)


def test_what_is_written_can_be_read(tmp_path):
    values = {"a": DRAWN, "odd": DRAWN[:, 0], "number": np.float32(3)}
    tensors.write(
        tmp_path / "model.safetensors",
        [(name, np.shape(x), lambda x=x: np.asarray(x)) for name, x in values.items()],
    )
    found = Tensors(tmp_path)
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)
    (length,) = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])
    assert length % 8 == 0  # so that the data are aligned
    assert (tmp_path / "model.safetensors").stat().st_size == 8 + length + 4 * (
        35 + 5 + 1
    )


def sharded(folder):
    write_file(folder / "one.safetensors", {"a": DRAWN})
    write_file(folder / "two.safetensors", {"b": 2 * DRAWN})
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards})
    )


def test_shards(tmp_path):
    sharded(tmp_path)
    found = Tensors(tmp_path)
    np.testing.assert_array_equal(found["b"], 2 * found["a"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "two.safetensors").unlink(),
            (
                "has no two.safetensors, "
                "although model.safetensors.index.json names it: copy the missing files"
            ),
        ),
        (
            lambda folder: write_file(folder / "two.safetensors", {"c": DRAWN}),
            (
                "two.safetensors has no tensor 'b', "
                "although model.safetensors.index.json says so: copy the whole folder"
            ),
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
            "index.json has no weight_map of names and files; copy it again",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": 7}}'
            ),
            "index.json has no weight_map of names and files; copy it again",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            r"index.json is not a JSON object \(Expecting property name",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").unlink(),
            (
                "has neither model.safetensors nor model.safetensors.index.json; "
                "copy the whole folder"
            ),
        ),
    ],
)
def test_incomplete_shards(tmp_path, spoil, message):
    sharded(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InteropError, match=message):
        Tensors(tmp_path)


def test_another_format(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        InteropError,
        match=r"; convert pytorch_model\.bin with transformers' save_pretrained",
    ):
        Tensors(tmp_path)


def test_a_pointer_to_a_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\n"
    )
    with pytest.raises(
        InteropError,
        match=(
            "is a pointer of Git LFS, without the data: "
            "run `git lfs pull` in its folder"
        ),
    ):
        Tensors(tmp_path)


def header(text, data=b""):
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes):
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return header(json.dumps({"a": whole}).encode(), bytes(8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (b"\xff" * 8 + entry(), "header too large"),
        (entry()[:40], "invalid header length"),
        (entry()[:-1], "file not fully covered"),
        (entry() + b"\0", "file not fully covered"),
        (header(b"{nonsense"), "invalid JSON in header"),
        (header(b"[1, 2]"), "invalid JSON in header"),
        (header(b'{"a": 3}'), "invalid JSON in header"),
        (entry(shape="ab"), "invalid JSON in header"),
        (entry(shape=[-1, -2]), "invalid JSON in header"),
        (entry(data_offsets=[0, "8"]), "invalid JSON in header"),
        (entry(data_offsets=[0]), "invalid JSON in header"),
        (entry(dtype="NO"), "invalid JSON in header"),
        (entry(shape=[3]), "invalid shape, data type, or offset for tensor"),
        (entry(data_offsets=[8, 0]), "invalid offset for tensor `a`"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        InteropError, match=f"model.safetensors is damaged or incomplete: .*{message}"
    ) as error:
        Tensors(tmp_path)
    assert str(error.value).endswith("; copy it again")


def test_an_unknown_type_is_an_error_when_it_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(entry(dtype="F8_E4M3", shape=[8]))
    found = Tensors(tmp_path)
    with pytest.raises(
        InteropError,
        match=(
            r"model.safetensors: a is of type F8_E4M3: supported are F64, F32, F16,"
            r" BF16"
        ),
    ):
        found["a"]
