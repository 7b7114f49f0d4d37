"""Export what a run predicts as a program that needs only JAX to run: see `exported`.

The program is `Task.evaluate` without references, or that of a scorer. The number of
rows and the length are free. Parameters are its arguments, by their paths.
"""

import importlib.util
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import traverse_util
from jax import export
from ml_collections import ConfigDict

from transformer_jax import files
from transformer_jax.data.tokenizers import NAMES, Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.predictor import Predictor, embedder_of
from transformer_jax.training.task import (
    Arrays,
    DeviceArrays,
    Growing,
    Outputs,
    Params,
    Piece,
    Predicting,
    Scoring,
    Task,
)

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
ALL_STEPS = 2**30  # more than any prediction grows by
# Sizes of two batches that differ wherever a size is free. No length is shorter in the
# second one.
ROWS = (5, 3)

Function = Callable[[DeviceArrays, DeviceArrays], Outputs]
Shapes = dict[str, jax.ShapeDtypeStruct]


class Program(NamedTuple):
    """An exported function.

    exported: maps parameters {path: array} and a batch {name: array} to outputs.
    parameters: the arrays that it reads.
    inputs: the shapes of the arrays of a batch.
    limits: the least and the most values of the symbols in these shapes, except "rows".
    """

    exported: export.Exported
    parameters: Arrays
    inputs: Shapes
    limits: dict[str, tuple[int, int]]


def program(
    task: Task,
    params: Params,
    platforms: Sequence[str],
    scored: bool = False,
    pooling: str = "",
) -> Program:
    """Return the program of a task's predictions, with `scored` of the scores of given
    texts, or with a `pooling` of the vectors of texts.

    Raises ValueError if the task has none.
    """
    predicting, longest = _predicting(task, scored, pooling)
    parameters = traverse_util.flatten_dict(jax.device_get(nn.unbox(params)), sep="/")
    shapes, limits = _free_shapes(predicting, longest)
    function = _function(predicting, parameters, shapes)
    # A program for fixed sizes has only the arguments that are read.
    fixed = predicting.dummy_batch(ROWS[1], longest, references=False)
    kept = export.export(jax.jit(function))(parameters, fixed).module_kept_var_idx
    arguments = [*sorted(parameters), *sorted(shapes)]
    read = [arguments[i] for i in kept if i < len(parameters)]
    given = [arguments[i] for i in kept if i >= len(parameters)]
    parameters = {name: parameters[name] for name in read}
    shapes = {name: shapes[name] for name in given}
    exported = export.export(jax.jit(function), platforms=platforms)(parameters, shapes)
    return Program(exported, parameters, shapes, limits)


def _predicting(task: Task, scored: bool, pooling: str) -> tuple[Predicting, int]:
    """Return what predicts, scores or embeds, and the most positions that it reads."""
    if pooling:
        return embedder_of(task, pooling), task.config.model.max_length
    if not scored:
        return task, task.config.longest_input
    if not isinstance(task, Scoring):
        raise UserError(
            f"a run of the task {task.config.task} does not score given texts: leave "
            "out --score; its predictions may have scores, too"
        )
    return task.scorer(), task.config.model.max_length


def _function(
    predicting: Predicting, parameters: Mapping[str, Any], inputs: Shapes
) -> Function:
    """Return the function to export.

    `parameters` and `inputs` have the shapes of all arguments. Those that the function
    is not given are zeros.
    """

    def filled(shapes: Mapping[str, Any], arrays: DeviceArrays) -> dict[str, jax.Array]:
        return {
            name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()
        } | dict(arrays)

    def predict(parameters_read: DeviceArrays, inputs_read: DeviceArrays) -> Outputs:
        flat = filled(parameters, parameters_read)
        params = traverse_util.unflatten_dict(flat, sep="/")
        batch = filled(inputs, inputs_read)
        _, outputs = predicting.evaluate(params, batch, False)
        if not isinstance(outputs, Piece):
            return outputs
        assert isinstance(predicting, Growing)
        going_on = ~outputs.outputs["finished"]
        whole = predicting.grow(
            params, batch, outputs.state, going_on, ALL_STEPS, False
        )
        return whole.outputs

    return predict


def _free_shapes(
    predicting: Predicting, longest: int
) -> tuple[Shapes, dict[str, tuple[int, int]]]:
    """Return the shapes of a batch, with symbols for the number of rows and for
    lengths, and the limits of lengths.

    Two batches of other sizes show which sizes are free, and which of them are equal.
    """
    half = max(longest // 2, 1)
    small = predicting.dummy_batch(ROWS[0], half, references=False)
    large = predicting.dummy_batch(ROWS[1], longest, references=False)
    pairs = {
        name: list(zip(small[name].shape, large[name].shape, strict=True))
        for name in small
    }
    names = {ROWS: "rows"}
    limits: dict[str, tuple[int, int]] = {}
    for pair in (pair for sizes in pairs.values() for pair in sizes):
        if pair[0] < pair[1] and pair not in names:
            names[pair] = f"length_{len(limits)}" if limits else "length"
            # a prompt is read up to its last token
            limits[names[pair]] = (1 if limits else 2, pair[1])
    scope = export.SymbolicScope(
        [
            rule
            for name, (least, most) in limits.items()
            for rule in (
                f"{name} >= {least}",
                f"{name} <= {most}",
                f"rows*{name} >= rows",  # JAX does not conclude it by itself
            )
        ]
    )
    shapes = {}
    for name, sizes in pairs.items():
        symbols = "".join(f"{names.get(pair, pair[0])}," for pair in sizes)
        shape = export.symbolic_shape(symbols, scope=scope)
        shapes[name] = jax.ShapeDtypeStruct(shape, small[name].dtype)
    return shapes, limits


def check(platforms: Sequence[str]) -> None:
    """Raise ValueError if there is no or an unknown platform, or no flatbuffers."""
    unknown = [name for name in platforms if name not in PLATFORMS]
    if unknown or not platforms:
        raise UserError(
            f"--platforms={','.join(platforms)}: must name one or several of "
            f"{', '.join(PLATFORMS)}, separated by commas"
        )
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError(
            "JAX needs flatbuffers to write programs, and it is not installed: "
            "run pip install flatbuffers"
        )


def to_file(
    workdir: epath.PathLike,
    config: ConfigDict,
    path: epath.PathLike,
    platforms: Sequence[str],
    scored: bool = False,
    pooling: str = "",
) -> None:
    """Write the program of a run's predictions, scores or vectors (see `program`) for
    `exported.load`.

    `config` is the run's config, possibly with changed values, e.g. in `decoding`.
    Raises the errors of `check`, `Predictor` and `program`, and UserError if weights
    have 8 bits.
    """
    check(platforms)
    predictor = Predictor(workdir, config)
    if predictor.config.evaluation.weights != "float32":
        raise UserError(
            f"evaluation.weights = {predictor.config.evaluation.weights!r}: exported "
            "programs have weights in float32; leave this key out"
        )
    task = predictor.task
    exported, parameters, inputs, limits = program(
        task, predictor.params, platforms, scored, pooling
    )
    about = {
        "task": config.task,
        "step": predictor.step,
        "platforms": list(platforms),
        "inputs": {
            name: {
                "dtype": str(array.dtype),
                "shape": [
                    size if isinstance(size, int) else str(size) for size in array.shape
                ],
            }
            for name, array in inputs.items()
        },
        "limits": limits,
        "outputs": dict(task.config.inherited.outputs),
        "tokenizers": _tokenizers(epath.Path(workdir)),
    }
    arrays: dict[str, Any] = {
        **parameters,
        "about": np.array(json.dumps(about)),
        "program": np.frombuffer(exported.serialize(), np.uint8),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    files.write(path, buffer.getvalue())


def _tokenizers(workdir: epath.Path) -> dict[str, Any]:
    """Return of each tokenizer the JSON that the library `tokenizers` reads, and its
    special ids.

    The JSON is None if that library alone does not encode texts as here.
    """
    described = {}
    for file in workdir.glob("tokenizer*.json"):
        tokenizer = Tokenizer.load(file)
        content = json.loads(tokenizer.to_json())
        content.pop("special_ids", None)
        described[file.name] = {
            "json": None if "sentencepiece" in content else json.dumps(content),
            "special_ids": {name: getattr(tokenizer, name) for name in NAMES},
        }
    return described


def difference(
    task: Task, params: Params, scored: bool = False, pooling: str = ""
) -> float:
    """Return the largest relative difference between the outputs of the exported
    program, written and read again, and those of the task.

    Two batches of other sizes are compared. It is infinite if integers differ.
    """
    platforms = (jax.default_backend().replace("gpu", "cuda"),)
    predicting, longest = _predicting(task, scored, pooling)
    exported, parameters, inputs, _ = program(task, params, platforms, scored, pooling)
    read = export.deserialize(exported.serialize())
    whole = traverse_util.flatten_dict(nn.unbox(params), sep="/")
    largest = 0.0
    for seed, (rows, length) in enumerate([(3, longest), (2, longest // 2 + 1)]):
        batch = predicting.dummy_batch(rows, length, seed, references=False)
        live = jax.jit(_function(predicting, {}, {}))(whole, batch)
        found = read.call(parameters, {name: batch[name] for name in inputs})
        for name, expected in live.items():
            apart = _apart(np.asarray(found[name]), np.asarray(expected))
            largest = max(largest, apart)
    return largest


def _apart(actual: np.ndarray, expected: np.ndarray) -> float:
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(actual, expected) else np.inf
    # the score of an output that does not exist is minus infinity
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite]) or not finite.any():
        return np.inf if finite.any() else 0.0
    apart = np.abs(actual[finite] - expected[finite]).max()
    return float(apart / max(np.abs(expected[finite]).max(), 1e-30))
