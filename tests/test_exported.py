"""The reader of exported files: any size in the limits, and messages for all else."""

import json
import re

import jax
import numpy as np
import pytest
from jax import export

from transformer_jax import exported

pytest.importorskip("flatbuffers", reason="JAX reads programs with flatbuffers")


def double(parameters, batch):
    return {"y": batch["x"] * parameters["w"]}


@pytest.fixture
def path(tmp_path):
    shape = export.symbolic_shape("rows, length", constraints=["length <= 4"])
    inputs = {"x": jax.ShapeDtypeStruct(shape, np.float32)}
    program = export.export(jax.jit(double))({"w": np.float32(2)}, inputs)
    about = {
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", "length"]}},
        "limits": {"length": [1, 4]},
    }
    np.savez(
        tmp_path / "file.npz",
        about=np.array(json.dumps(about)),
        program=np.frombuffer(program.serialize(), np.uint8),
        w=np.float32(2),
    )
    return tmp_path / "file.npz"


def test_any_size_and_type_of_numbers(path):
    function = exported.load(path)
    for rows in ([[1, 2, 3]], [[1.0], [2.5]]):
        np.testing.assert_array_equal(function({"x": rows})["y"], 2 * np.float32(rows))


def test_other_arrays_are_refused(path):
    function = exported.load(path)
    for batch in ({}, {"x": [[1]], "z": [[1]]}):
        with pytest.raises(ValueError, match=r"must have x$"):
            function(batch)


@pytest.mark.parametrize("shape", [(1, 5), (1, 0), (0, 1), (2,), (1, 2, 3)])
def test_other_shapes_are_refused(shape, path):
    with pytest.raises(ValueError, match=r"\(rows, length\), with 1 ≤ length ≤ 4;"):
        exported.load(path)({"x": np.ones(shape)})


@pytest.mark.parametrize("data", [b"", b"text", None])
def test_other_files_are_refused(data, path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if data is None else data)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a whole file of")):
        exported.load(path)
