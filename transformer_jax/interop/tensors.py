"""Read and write the tensors of a folder in the safetensors format, one tensor at a
time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape, and begin and end in the data), and the data. Source:
https://github.com/huggingface/safetensors, "Format".

The library of this name checks files here. Its `get_tensor` would copy each tensor,
once for every device that needs a part of it; here, a tensor is mapped from its file.
Its `save_file` needs all tensors in memory at once; `write` needs one.

`flax_model.msgpack`, which the Flax models of transformers 4 wrote, is read whole.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from flax import serialization, traverse_util
from safetensors import SafetensorError, safe_open

from transformer_jax import files
from transformer_jax.errors import UserError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
OTHER_FORMATS = ("pytorch_model.bin", "tf_model.h5", "adapter_model.bin")
FLAX = "flax_model.msgpack"
# the last part of a name in Flax → in PyTorch
OF_FLAX = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


class InteropError(UserError):
    """Raised for a folder, a config or a model that cannot be converted."""


class _Region(NamedTuple):
    """The part of a file that holds a tensor.

    `offset` is in bytes from the start of the file. `values` are those of a tensor
    that is in memory already.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    values: np.ndarray | None = None


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a folder, from `file`, from the shards that INDEX names, or else
    from FLAX.

    A tensor is mapped from its file each time it is looked up, in the dtype of the
    file. It leaves memory with the array. Those of FLAX stay in memory.

    Raises:
        InteropError: there is no such file, a shard is missing, or a file is damaged.
            On look-up: the tensor has a dtype that is not in DTYPES.
    """

    def __init__(self, folder: os.PathLike | str, file: str = FILE):
        self.folder = Path(folder)
        self._regions: dict[str, _Region] = {}
        others = (self.folder / FILE, self.folder / INDEX)
        flax = self.folder / FLAX
        if file == FILE and files.exists(flax) and not any(map(files.exists, others)):
            self._regions = _of_flax(flax)
            return
        for path, names in _listed(self.folder, file).items():
            regions = _header(path)
            if missing := sorted(set(names) - regions.keys()):
                raise InteropError(
                    f"{path} has no tensor {missing[0]!r}, although {INDEX} says so: "
                    "copy the whole folder again"
                )
            self._regions |= regions

    def __getitem__(self, name: str) -> np.ndarray:
        region = self._regions[name]
        if region.values is not None:
            return region.values
        if region.dtype not in DTYPES:
            raise InteropError(
                f"{region.path}: {name} is of type {region.dtype}: "
                f"supported are {', '.join(DTYPES)}"
            )
        if 0 in region.shape:
            return np.zeros(region.shape, DTYPES[region.dtype])
        return np.memmap(
            region.path, DTYPES[region.dtype], "r", region.offset, region.shape
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._regions[name].shape

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as the file names it, e.g. "F32"."""
        return self._regions[name].dtype


def _listed(folder: Path, file: str) -> dict[Path, list[str]]:
    """Return the safetensors files of a folder, with the names that an index expects
    in each.
    """
    if files.exists(folder / file):
        return {folder / file: []}
    index = folder / INDEX
    if not files.exists(index):
        remedy = "; copy the whole folder"
        for name in OTHER_FORMATS:
            if (folder / name).exists():
                remedy = f"; convert {name} with transformers' save_pretrained"
                break
        raise InteropError(f"{folder} has neither {file} nor {INDEX}{remedy}")
    weights = files.read_object(index, InteropError).get("weight_map")
    if not isinstance(weights, dict) or not all(
        isinstance(file, str) for file in weights.values()
    ):
        raise InteropError(
            f"{index} has no weight_map of names and files; copy it again"
        )
    shards: dict[Path, list[str]] = {}
    for name, file in weights.items():
        if not files.is_inside(file):
            raise InteropError(
                f"{index} names {file}, which is not in this folder: "
                "download the model anew"
            )
        shards.setdefault(folder / file, []).append(name)
    if missing := [path.name for path in shards if not path.is_file()]:
        raise InteropError(
            f"{folder} has no {', '.join(missing)}, although {INDEX} names it: "
            "copy the missing files"
        )
    return shards


def _of_flax(path: Path) -> dict[str, _Region]:
    """Return the parameters of a Flax model of transformers under the names and in the
    layouts of PyTorch.

    The names are the same up to their last part. Of a linear map, Flax has the
    transpose.
    """
    try:
        tree = serialization.msgpack_restore(path.read_bytes())
        flat = traverse_util.flatten_dict(tree, sep=".")
        arrays = {name: np.asarray(value) for name, value in flat.items()}
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise InteropError(
            f"{path} is damaged, or not a file of Flax: {error}; copy it again"
        ) from error
    regions = {}
    for name, values in arrays.items():
        module, dot, last = name.rpartition(".")
        values = values.T if last == "kernel" else values
        dtype = NAMES.get(values.dtype, str(values.dtype))
        theirs = module + dot + OF_FLAX.get(last, last)
        regions[theirs] = _Region(path, dtype, values.shape, 0, values)
    return regions


def _header(path: Path) -> dict[str, _Region]:
    """Return the part of a file that holds each of its tensors."""
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise InteropError(
                f"{path} is a pointer of Git LFS, without the data: "
                "run `git lfs pull` in its folder"
            )
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise InteropError(
                f"{path} is damaged or incomplete: {error}; copy it again"
            ) from error
        length = int.from_bytes(start, "little")
        content = json.loads(file.read(length))
    content.pop("__metadata__", None)
    regions = {}
    for name, entry in content.items():
        begin, _ = entry["data_offsets"]
        shape = tuple(entry["shape"])
        regions[name] = _Region(path, entry["dtype"], shape, 8 + length + begin)
    return regions


def write(
    path: os.PathLike | str,
    tensors: Iterable[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]],
) -> None:
    """Write float32 tensors, given as (name, shape, function that makes the array),
    with one in memory at a time.

    Raises OutputError if the file cannot be written.
    """
    tensors = list(tensors)
    header = dict[str, Any]()
    end = 0
    for name, shape, _ in tensors:
        begin = end
        end = end + 4 * math.prod(shape)
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    # transformers requires the format
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with files.replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, make in tensors:
            file.write(np.ascontiguousarray(make(), "<f4").data)
