"""Use a file that scripts/export.py wrote: `predict = exported.load("sst2.npz")`.

This module needs only JAX, and flatbuffers, with which JAX reads programs. Copy it to
where the rest of the package is not installed.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np
from jax import export


class Exported:
    """The predictions of a run, as a function of arrays.

    Attributes:
        about: what the file says of itself: "task", "step", "platforms"; "inputs", the
            type and shape of each array; "limits" of the lengths in the shapes;
            "outputs", the names of the outputs of each head; "tokenizers", the JSON of
            each for the library `tokenizers`, and its special ids.
    """

    def __init__(self, about: dict[str, Any], parameters: Any, program: Any):
        """Set the attributes. Call `load` instead."""
        self.about = about
        self._parameters = parameters
        self._call = jax.jit(program.call)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the outputs for a batch with the arrays that `about["inputs"]` names.

        There may be any number of rows, and any length within the limits. Each new
        shape is compiled once.

        Raises ValueError for other arrays.
        """
        inputs = self.about["inputs"]
        if set(batch) != set(inputs):
            raise ValueError(
                f"the batch has the arrays {', '.join(sorted(batch)) or '(none)'}: "
                f"must have {', '.join(inputs)}"
            )
        arrays = {
            name: np.asarray(batch[name], inputs[name]["dtype"]) for name in inputs
        }
        self._check(arrays)
        return self._call(self._parameters, arrays)

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise ValueError for a wrong shape."""
        known: dict[str, int] = {}
        for name, array in arrays.items():
            rule = self.about["inputs"][name]["shape"]
            right = len(rule) == array.ndim
            for size, symbol in zip(array.shape, rule, strict=False):
                least, most = self.about["limits"].get(symbol, (1, size))
                expected = known.setdefault(symbol, size)
                if isinstance(symbol, int):
                    expected = symbol
                right &= size == expected and least <= size <= most
            if not right:
                limits = [
                    f"{a} ≤ {n} ≤ {b}" for n, (a, b) in self.about["limits"].items()
                ]
                raise ValueError(
                    f"{name} has shape {array.shape}: must be "
                    f"({', '.join(map(str, rule))}), with {', '.join(limits)}; "
                    "pad or cut it, or make other arrays of the same size"
                )


def load(path: Any) -> Exported:
    """Read a file that scripts/export.py wrote.

    Raises ValueError for any other file, and ImportError without flatbuffers.
    """
    with open(path, "rb") as file:
        try:
            arrays = dict(np.load(file))
            about = json.loads(str(arrays.pop("about")))
            data = arrays.pop("program").tobytes()
        except (ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{path} is not a whole file of scripts/export.py ({error}): "
                "name such a file, or write it again"
            ) from error
    parameters = {name: jax.device_put(array) for name, array in arrays.items()}
    return Exported(about, parameters, export.deserialize(bytearray(data)))
