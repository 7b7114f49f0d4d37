"""Read and write adapters of Hugging Face's PEFT: adapter_config.json and
adapter_model.safetensors.

Such a folder holds lora_A (r, inputs) and lora_B (outputs, r) of each adapted linear
map, and copies of modules that were trained as they are, e.g. a classifier. The base is
another folder.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax import files
from transformer_jax.interop import layouts, tensors
from transformer_jax.interop.architecture import Architecture
from transformer_jax.interop.huggingface import Pretrained
from transformer_jax.interop.layouts import Layout, Slot, listing
from transformer_jax.interop.tensors import InteropError, Tensors

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
PREFIX = "base_model.model."  # of every name in the file
# Keys that are read, and keys without an effect on what an adapted model computes.
READ = ("r", "lora_alpha", "use_rslora", "peft_type", "init_lora_weights")
HARMLESS = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
)
# Initial values of A and B that leave the base as it is.
STARTS = (True, False, "gaussian")
NEUTRAL: tuple[Any, ...] = (None, False, "none", {}, [])


class Adapter(NamedTuple):
    """An adapter in our parameters.

    rank, alpha: r and α.
    factors: path of each adapted module → its A (…, inputs, r) and B (…, r, outputs).
    whole: path → parameter that was trained as it is.
    """

    rank: int
    alpha: float
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    whole: Mapping[str, np.ndarray]


def read(folder: os.PathLike | str, base: Pretrained) -> Adapter:
    """Read an adapter for a model of transformers.

    Raises InteropError if a file is missing or damaged, the adapter has options that
    are not supported, or it does not fit the model.
    """
    config = files.read_object(Path(folder) / CONFIG, InteropError)
    rank, alpha = _scale(folder, config)
    held = Tensors(folder, FILE)
    modules: dict[str, dict[str, str]] = {}
    others: list[str] = []
    for name in held:
        if match := FACTOR.fullmatch(name):
            modules.setdefault(f"{match[1]}.weight", {})[match[2]] = name
        else:
            others.append(name)
    in_table = base.architecture.names([*modules, *others])
    fits = _Fit(folder, config, base.architecture.name)
    known = {name for slot in base.table for name in slot.names}
    if unknown := sorted(in_table.keys() - known):
        raise fits.error("have no place in it:", unknown)
    pairs = {name: modules[of] for name, of in in_table.items() if of in modules}
    files_of = {name: of for name, of in in_table.items() if of not in modules}
    factors = {}
    whole = {}
    for slot in base.table:
        if not pairs.keys().isdisjoint(slot.names):
            if missing := [name for name in slot.names if len(pairs.get(name, ())) < 2]:
                raise fits.error("are missing, and others of their kind not:", missing)
            factors[slot.path.removesuffix("/kernel")] = _factors(
                slot, pairs, held, rank, fits
            )
        elif not files_of.keys().isdisjoint(slot.names):
            if missing := sorted(set(slot.names) - files_of.keys()):
                raise fits.error("are missing, and others of their kind not:", missing)
            fits.check(held, [files_of[name] for name in slot.names], slot.tensor_shape)
            index = (slice(None),) * len(slot.shape)
            whole[slot.path] = slot.read(index, lambda name: held[files_of[name]])
    return Adapter(rank, alpha, factors, whole)


@dataclasses.dataclass(frozen=True)
class _Fit:
    """The folder of an adapter, its config, and the class of the base, for messages."""

    folder: os.PathLike | str
    config: Mapping[str, Any]
    base: str

    def error(self, rule: str, lines: Sequence[str]) -> InteropError:
        """Return the error that the adapter does not fit the base."""
        trained = self.config.get("base_model_name_or_path")
        title = (
            f"{self.folder} does not fit this {self.base}; it was trained on "
            f"{trained!r}: name that folder as the base. These tensors {rule}"
        )
        return InteropError(listing(title, lines))

    def check(
        self, held: Tensors, names: Sequence[str], expected: tuple[int, ...]
    ) -> None:
        """Raise InteropError if tensors of the adapter have another shape."""
        wrong = [
            f"{name}: {held.shape(name)}, expected {expected}"
            for name in names
            if held.shape(name) != expected
        ]
        if wrong:
            raise self.error("have other shapes:", wrong)


def _scale(folder: os.PathLike | str, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return r, and α for the scale α / r.

    Raises InteropError if the config has options that are not supported.
    """
    remedy = (
        "load the model with peft, write the result of merge_and_unload() with "
        "save_pretrained, and convert that folder"
    )
    wrong = [
        f"{key} = {value!r:.80}"
        for key, value in config.items()
        if key not in READ and key not in HARMLESS and value not in NEUTRAL
    ]
    if (kind := config.get("peft_type")) != "LORA":
        wrong.insert(0, f"peft_type = {kind!r}")
    if (start := config.get("init_lora_weights", True)) not in STARTS:
        wrong.append(f"init_lora_weights = {start!r}, which may change the base")
    if wrong:
        raise InteropError(
            f"{folder}/{CONFIG}: not supported: {'; '.join(wrong)}: {remedy}"
        )
    rank = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise InteropError(
            f"{folder}/{CONFIG}: r = {rank!r} and lora_alpha = {alpha!r}: "
            "must be a positive integer and a number; copy the file again"
        )
    return rank, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def _layouts(slot: Slot) -> tuple[Layout, Layout]:
    """Return the layouts of our A (inputs, r) and B (r, outputs) of one layer."""
    return (
        Layout(inputs=slot.layout.inputs, transposed=True),
        dataclasses.replace(slot.layout, inputs=1, transposed=True),
    )


def _shapes(slot: Slot, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of our A and B of one layer."""
    inputs = slot.layout.inputs or 0
    return (*slot.held[:inputs], rank), (rank, *slot.held[inputs:])


def _factors(
    slot: Slot,
    pairs: Mapping[str, Mapping[str, str]],
    held: Tensors,
    rank: int,
    fits: _Fit,
) -> tuple[np.ndarray, np.ndarray]:
    """Return our A and B of a weight, those of its layers along axis 0."""
    if not slot.path.endswith("/kernel"):
        raise fits.error("belong to no linear map:", slot.names)
    both: list[np.ndarray] = []
    for letter, layout, shape in zip(
        "AB", _layouts(slot), _shapes(slot, rank), strict=True
    ):
        names = [pairs[name][letter] for name in slot.names]
        expected = layout.shape(shape)
        axis = 0 if letter == "A" else 1
        for name in names:
            found = held.shape(name)
            if len(found) == 2 and found[axis] != rank:
                raise InteropError(
                    f"{fits.folder}: {name} has rank {found[axis]}, but {CONFIG} has "
                    f"r = {rank}: copy both files of one adapter"
                )
        fits.check(held, names, expected)
        parts = [layout.read(held[name], shape).astype(np.float32) for name in names]
        both.append(np.stack(parts) if slot.stacked else parts[0])
    a, b = both
    return a, b


def write(
    folder: os.PathLike | str,
    adapter: Adapter,
    architecture: Architecture,
    table: Sequence[Slot],
    base: str,
) -> None:
    """Write an adapter for a model of transformers to a new folder.

    `table` has the place of each of our parameters in the model, and `base` is the
    name of the folder of the model that was adapted.

    Raises InteropError if the folder holds an adapter, or PEFT has no such adapter.
    """
    folder = Path(folder)
    with files.explained(f"{folder} cannot be used", "name another folder"):
        if files.exists(folder / CONFIG):
            raise InteropError(f"{folder} already has {CONFIG}: name another folder")
    start = architecture.prefix if architecture.bare else ""
    factors = dict(_factor_tensors(adapter, architecture, table, start))
    whole = dict(_whole_tensors(adapter, table, start))
    targets = dict.fromkeys(name.rpartition(".lora_")[0] for name in factors)
    saved = dict.fromkeys(name.rpartition(".")[0] for name in whole)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [*targets],
        "modules_to_save": [*saved] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    files.make_folder(folder)
    tensors.write(
        folder / FILE,
        [
            (f"{PREFIX}{name}", x.shape, functools.partial(np.asarray, x))
            for name, x in {**factors, **whole}.items()
        ],
    )
    text = json.dumps(config, indent=2) + "\n"
    files.write_all(folder, {CONFIG: text.encode()})


def _factor_tensors(
    adapter: Adapter, architecture: Architecture, table: Sequence[Slot], start: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values of each lora_A and lora_B.

    `start` is left out at the beginning of names.
    """
    slots = {slot.path: slot for slot in table}
    for module, factors in adapter.factors.items():
        slot = slots.get(f"{module}/kernel")
        if slot is None or slot.layout.part != (0, 1):
            raise InteropError(
                f"{module} is a part of a larger map in {architecture.name}, which "
                "PEFT adapts as a whole: write the merged model with --to_huggingface"
            )
        for letter, layout, value in zip("AB", _layouts(slot), factors, strict=True):
            for i, name in enumerate(slot.names):
                ours = np.asarray(value[i] if slot.stacked else value)
                tensor = np.zeros(layout.shape(ours.shape), np.float32)
                layout.write(tensor, ours)
                theirs = name.removeprefix(start).removesuffix(".weight")
                yield f"{theirs}.lora_{letter}.weight", tensor


def _whole_tensors(
    adapter: Adapter, table: Sequence[Slot], start: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values of each tensor that was trained as it is."""
    layouts.check(table, {path: value.shape for path, value in adapter.whole.items()})
    for name, _, make in layouts.tensors_of(table, adapter.whole):
        yield name.removeprefix(start), make()
