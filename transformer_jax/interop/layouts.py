"""Tables of parameters: where a file of transformers holds each of ours, in both
directions.

A `Layout` finds our parameter inside their tensor, as a view of it. Reading copies from
the view, writing copies into it, so that neither direction can differ from the other.
"""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.interop.keys import QUANTIZED
from transformer_jax.interop.tensors import InteropError, Tensors

SHOWN = 10  # lines of a list that a message shows

NO_TIES: Mapping[str, str] = types.MappingProxyType({})
# Names of tensors by GPTQ and AWQ, FP8, compressed-tensors and bitsandbytes; and by
# PEFT.
CODES = (
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_format|weight_scale(_inv)?|input_scale"
    r"|weight_packed|weight_shape|weight_zero_point"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))$"
)
ADAPTERS = (
    r"\.(lora_[AB]|lora_embedding_[AB]|base_layer|lora_magnitude_vector"
    r"|modules_to_save)\."
)
VALUES = ("F64", "F32", "F16", "BF16")  # types of tensors that hold values

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrangement of a parameter of ours in a tensor of theirs.

    inputs: the first `inputs` axes of ours are one axis of theirs, and the others
        another: the inputs and the outputs of a linear map. 0: all axes are outputs, as
        in a bias. None: the axes are the same.
    transposed: the outputs come first in theirs.
    part: (i, n): theirs has n parts along its outputs, and ours is part i.
    order: output i of ours is output order[i] of theirs, or -1 if theirs lacks it; ()
        if the order is the same.
    absent: the value of outputs that theirs lacks.
    row: theirs has one more axis, of size 1, before the outputs.
    halves: features 2i and 2i + 1 of our heads, which rotary positions turn together,
        are i and H/2 + i in theirs.
    """

    inputs: int | None = None
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    order: tuple[int, ...] = ()
    row: bool = False
    halves: bool = False
    absent: float = 0.0

    def _stored(self, ours: Shape) -> Shape:
        """Return the shape of the part of our parameter that their tensor has."""
        return (*ours[:-1], sum(i >= 0 for i in self.order)) if self.order else ours

    def shape(self, ours: Shape) -> Shape:
        """Return the shape of their tensor."""
        ours = self._stored(ours)
        if self.inputs is None:
            return ours
        outputs = math.prod(ours[self.inputs :]) * self.part[1]
        axes = (
            (math.prod(ours[: self.inputs]), outputs)
            if self.inputs or self.row
            else (outputs,)
        )
        return axes[::-1] if self.transposed else axes

    def _view(self, tensor: np.ndarray, ours: Shape) -> np.ndarray:
        """Return the view of their tensor that is our parameter of shape `ours`.

        An axis of ours may be several.
        """
        if self.inputs is None:
            return tensor
        i, n = self.part
        outputs = np.split(tensor.T if self.transposed else tensor, n, axis=-1)[i]
        if self.halves:
            return outputs.reshape(*ours[:-1], 2, -1, copy=False).swapaxes(-1, -2)
        return outputs.reshape(ours, copy=False)

    def read(self, tensor: np.ndarray, ours: Shape) -> np.ndarray:
        """Return our parameter, of shape `ours`. Where possible, it is a view."""
        stored = self._stored(ours)
        value = self._view(tensor, stored).reshape(stored)
        if not self.order:
            return value
        return np.where(
            np.array(self.order) >= 0, value[..., list(self.order)], self.absent
        )

    def write(self, tensor: np.ndarray, value: np.ndarray) -> None:
        """Put our parameter into their tensor."""
        stored = self._stored(value.shape)
        view = self._view(tensor, stored)
        if self.order:
            order = np.array(self.order)
            view[..., order[order >= 0]] = value[..., order >= 0].reshape(view.shape)
        else:
            view[...] = value.reshape(view.shape)


SAME = Layout()
ROW = Layout(inputs=0, row=True)
LINEAR = Layout(inputs=1, transposed=True)  # torch's Linear: (out, in)
# a Linear whose inputs are heads: (out, heads · width)
JOINING = Layout(inputs=2, transposed=True)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a table.

    ours: the path of our parameter, e.g. "bert/pooler/kernel".
    theirs: the name of their tensor. With "{}", there is one for each layer, and ours
        holds all of them along axis 0.
    rows: the number of rows of theirs. Ours may have more, which are zeros. None: as
        many as ours.
    skipped: the number of further rows of theirs, before ours. We write zeros there.
    """

    ours: str
    theirs: str
    layout: Layout = SAME
    rows: int | None = None
    skipped: int = 0


def linear(ours: str, theirs: str, layout: Layout = LINEAR) -> list[Entry]:
    """Return the entries of a linear map with a bias."""
    bias = dataclasses.replace(layout, inputs=0)
    return [
        Entry(f"{ours}/kernel", f"{theirs}.weight", layout),
        Entry(f"{ours}/bias", f"{theirs}.bias", bias),
    ]


def norm(ours: str, theirs: str) -> list[Entry]:
    """Return the entries of a layer norm."""
    return [
        Entry(f"{ours}/scale", f"{theirs}.weight"),
        Entry(f"{ours}/bias", f"{theirs}.bias"),
    ]


class Slot:
    """An entry of a table and the sizes of one model.

    Attributes:
        path, shape: our parameter.
        names, tensor_shape: their tensors, and the shape of each.
        layout: the arrangement of a part of ours of the shape `held` in one of them.
        stacked: True if ours holds one tensor for each layer, along axis 0.
    """

    def __init__(self, entry: Entry, shape: Shape):
        self.path = entry.ours
        self.shape = shape
        self.layout = entry.layout
        held = shape if entry.rows is None else (entry.rows, *shape[1:])
        self.stacked = "{}" in entry.theirs
        self.names = [
            entry.theirs.format(layer)
            for layer in range(shape[0] if self.stacked else 1)
        ]
        self.held = held[1:] if self.stacked else held
        self._skipped = entry.skipped
        rows, *others = self.layout.shape(self.held)
        self.tensor_shape = (rows + self._skipped, *others)

    def read(
        self, index: Sequence[slice], tensor: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        """Return a block of our parameter as float32.

        `tensor` is called for the names of the layers in it only.
        """
        ranges = [
            range(*part.indices(size))
            for part, size in zip(index, self.shape, strict=True)
        ]
        block = np.zeros([len(r) for r in ranges], np.float32)
        for i, layer in enumerate(ranges[0]) if self.stacked else ((0, 0),):
            inner = tuple(index[1:] if self.stacked else index)
            held = tensor(self.names[layer])[self._skipped :]
            value = self.layout.read(held, self.held)[inner]
            part = block[i] if self.stacked else block
            part[tuple(map(slice, value.shape))] = value
        return block

    def write(self, tensor: np.ndarray, name: str, value: Any) -> None:
        """Put our parameter, or its layer that belongs to the tensor `name`, into
        the tensor.
        """
        held = tensor[self._skipped :]
        if self.stacked:
            self.layout.write(held, np.asarray(value[self.names.index(name)]))
        else:
            self.layout.write(held, np.asarray(value)[tuple(map(slice, self.held))])


class Leaf:
    """A parameter in a file, as float32. It is read when it is needed.

    Attributes:
        shape, size: those of our parameter.
    """

    def __init__(self, slot: Slot, tensor: Callable[[str], np.ndarray]):
        """`tensor` returns a tensor of `slot` by its name."""
        self.shape = slot.shape
        self.size = math.prod(slot.shape)
        self._slot = slot
        self._tensor = tensor

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """Read a block, given by slices for the first axes or for all."""
        given = index if isinstance(index, tuple) else (index,)
        whole_axes = (slice(None),) * (len(self.shape) - len(given))
        return self._slot.read(given + whole_axes, self._tensor)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()].astype(dtype or np.float32, copy=False)

    def place(self, sharding: jax.sharding.Sharding) -> jax.Array:
        """Return the parameter on devices. Each device's part is read on its own."""
        read: Any = self.__getitem__
        return jax.make_array_from_callback(self.shape, sharding, read)


def resolve(entries: Iterable[Entry], shapes: Mapping[str, Shape]) -> list[Slot]:
    """Return a slot for each entry, given the shapes of our parameters by path.

    Raises InteropError if a parameter has no entry.
    """
    slots = [Slot(entry, shapes[entry.ours]) for entry in entries]
    if more := sorted(shapes.keys() - {slot.path for slot in slots}):
        raise InteropError(
            listing("these parameters have no place in a model of transformers:", more)
        )
    return slots


def read(
    slots: Sequence[Slot],
    tensors: Tensors,
    names: Mapping[str, str],
    lacks: Collection[str] = (),
    unused: str = "(?!)",
    ties: Mapping[str, str] = NO_TIES,
    copies: Mapping[str, str] = NO_TIES,
) -> dict[str, Leaf]:
    """Return our parameters by path.

    Args:
        slots: the table.
        tensors: the tensors of a folder.
        names: the name of each tensor in the table → its name in the folder.
        lacks: our modules or parameters that the folder may lack, e.g. "bert/pooler".
            The result then lacks them too.
        unused: regular expression of the names that need no place.
        ties: other name → name of a tensor that the folder may hold under either.
        copies: name of a tensor that the folder may lack → the tensor whose values it
            then has.

    Raises:
        InteropError: a tensor or a parameter has no counterpart, or one of another
            shape, or a tensor holds integers.
    """
    expected = {name: slot.tensor_shape for slot in slots for name in slot.names}
    names = dict(names)
    for other, name in ties.items():
        is_tied = name in expected and other not in expected
        if is_tied and name not in names and other in names:
            names[name] = names.pop(other)
    for name, original in copies.items():
        if name in expected and original in names:
            names.setdefault(name, names[original])
    _refuse_codes(tensors, names, expected)
    optional = tuple(f"{module}/" for module in lacks)
    may_lack: set[str] = set()
    for slot in slots:
        if f"{slot.path}/".startswith(optional) and names.keys().isdisjoint(slot.names):
            may_lack.update(slot.names)
    where = (
        f"{tensors.folder}: config.json is of another model; "
        "copy all files of one. These tensors"
    )
    if missing := sorted(expected.keys() - names.keys() - may_lack):
        raise InteropError(listing(f"{where} are missing:", missing))
    unknown = [
        names[name]
        for name in sorted(names.keys() - expected.keys())
        if not re.fullmatch(unused, name)
    ]
    if unknown:
        raise InteropError(listing(f"{where} have no place in config.json:", unknown))
    wrong = []
    for name in sorted(expected.keys() & names.keys()):
        shape = tensors.shape(names[name])
        if shape != expected[name]:
            wrong.append(
                f"{names[name]}: {shape} in the file, {expected[name]} by config.json"
            )
    if wrong:
        raise InteropError(listing(f"{where} have other shapes:", wrong))
    return {
        slot.path: Leaf(slot, lambda n: tensors[names[n]])
        for slot in slots
        if may_lack.isdisjoint(slot.names)
    }


def _refuse_codes(
    tensors: Tensors, names: Mapping[str, str], expected: Collection[str]
) -> None:
    """Raise InteropError if the tensors are those of a quantized model, or of
    adapters that are not merged.
    """
    codes = {name for name in names if re.search(CODES, name)}
    integers = {
        name
        for name in names.keys() & expected
        if tensors.dtype(names[name]) not in VALUES
    }
    if codes or integers:
        example = names[min(codes | integers)]
        raise InteropError(
            f"{tensors.folder} has {example} of type {tensors.dtype(example)}: "
            f"{QUANTIZED}"
        )
    if adapters := sorted(name for name in names if re.search(ADAPTERS, name)):
        raise InteropError(
            f"{tensors.folder} has {names[adapters[0]]}: "
            "the weights of an adapter are not merged. Load the model with peft, "
            "and write the result of merge_and_unload() with save_pretrained"
        )


def check(slots: Sequence[Slot], shapes: Mapping[str, Shape]) -> None:
    """Raise InteropError if parameters of ours, given by the shapes of their paths,
    do not fit into `slots`.
    """
    expected = {slot.path: slot.shape for slot in slots}
    wrong = [
        f"{path}: {shape}"
        for path, shape in sorted(shapes.items())
        if expected.get(path) != shape
    ]
    if wrong:
        raise InteropError(
            listing(
                "these parameters have no place in a model of transformers, "
                "or another shape there:",
                wrong,
            )
        )


def tensors_of(
    slots: Sequence[Slot], params: Mapping[str, Any]
) -> Iterator[tuple[str, Shape, Callable[[], np.ndarray]]]:
    """Yield the name and the shape of each of their tensors, and a function that makes
    it from ours.

    `params` has arrays by path. Slots without one are left out.
    """
    holders: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot.path in params:
            for name in slot.names:
                holders.setdefault(name, []).append(slot)

    def make(name: str) -> np.ndarray:
        tensor = np.zeros(holders[name][0].tensor_shape, np.float32)
        for slot in holders[name]:
            slot.write(tensor, name, params[slot.path])
        return tensor

    for name, (slot, *_) in holders.items():
        yield name, slot.tensor_shape, functools.partial(make, name)


def listing(title: str, lines: Sequence[str]) -> str:
    """Return a message of a title and at most SHOWN lines."""
    shown = [title, *lines[:SHOWN]]
    if len(lines) > SHOWN:
        shown.append(f"and {len(lines) - SHOWN} more")
    return "\n  ".join(shown)
