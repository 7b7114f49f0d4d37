"""Describe a training step on a mesh before it runs: parameters, FLOPs, bytes per device, communication.

The bytes of parameters and optimizer state are exact. The rest is estimated from the step as XLA compiles it for
simulated CPU devices; a compiler for accelerators fuses and schedules differently.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from transformer_jax.data.batching import Arrays
from transformer_jax.training.engine import Engine
from transformer_jax.training.initialization import bytes_per_device
from transformer_jax.training.sharding import abstract_batch

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind and group size in one step.

    bytes: total size of the full arrays over all `count` collectives.
    sent: total bytes that one device sends, assuming ring algorithms.
    """

    kind: str
    group: int  # number of devices in each communicating group
    count: int
    bytes: int
    sent: int


@dataclasses.dataclass(frozen=True)
class Description:
    """Size and cost of one training step. Bytes are per device, for the device that holds the most."""

    mesh: dict[str, int]
    parameters: int
    batch: dict[str, tuple[int, ...]]
    tokens: int  # in the whole batch, without padding
    flops: float  # for the whole batch, over all devices
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int  # estimate: the size of the parameters
    temporary_bytes: int  # estimate: peak of gradients, activations and other temporary buffers
    sharded: dict[str, int]  # total parameter bytes by the mesh axes that shard them, e.g. {"fsdp, tensor": 4096}
    collectives: list[Collective]  # estimates
    guessed_loops: int  # loops that contain collectives and have an unknown trip count; counted `turns` times

    def times(self, link: float, peak: float) -> tuple[float, float]:
        """Return the seconds per step for (matrix products, communication).

        `peak` is in FLOP/s and `link` in bytes/s, both per device.
        """
        devices = math.prod(self.mesh.values())
        return self.flops / devices / peak, sum(c.sent for c in self.collectives) / link


def describe(engine: Engine, batch: Arrays, turns: int = 1) -> Description:
    """Describe the step on a batch without padding. Loops with a data-dependent length count as `turns` iterations."""
    state, work = engine.abstract_state, engine.task.work(batch)
    compiled = engine.step.lower(state, abstract_batch(batch, engine.mesh)).compile()
    collectives, guessed = read_collectives(compiled.as_text(), turns)
    parameter_bytes = bytes_per_device(state.params)
    return Description(
        mesh=dict(engine.mesh.shape),
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        batch={name: array.shape for name, array in batch.items()},
        tokens=work.tokens,
        flops=work.flops,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=bytes_per_device((state.opt_state, state.ema)),
        gradient_bytes=parameter_bytes,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        sharded=_by_sharding(state.params),
        collectives=collectives,
        guessed_loops=guessed,
    )


def _by_sharding(params: Any) -> dict[str, int]:
    """Return the total parameter bytes by the mesh axes that shard them, e.g. {"fsdp, tensor": 4096}, largest first."""
    totals: collections.Counter[str] = collections.Counter()
    for x in jax.tree.leaves(params):
        named = {axis for axes in x.sharding.spec if axes for axis in ([axes] if isinstance(axes, str) else axes)}
        along = sorted(axis for axis in named if x.sharding.mesh.shape[axis] > 1)
        totals[", ".join(along) or "none: whole on every device"] += math.prod(x.shape) * x.dtype.itemsize
    return dict(totals.most_common())


def read_collectives(hlo: str, turns: int = 1) -> tuple[list[Collective], int]:
    """Return the collectives of a compiled program, and the number of loops with an unknown trip count.

    A collective in a loop counts once per iteration, or `turns` times if the trip count is unknown. Only loops that
    contain collectives are counted.
    """
    computations, entry = _computations(hlo)
    totals: dict[tuple[str, int], list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    guessed = 0

    def walk(name: str, times: int) -> bool:
        """Add the collectives of computation `name`. Return True if there were any."""
        nonlocal guessed
        found = False
        for line in computations[name]:
            if match := _COLLECTIVE.search(line):
                found = True
                kind, group = match["kind"], _group_size(line)
                in_and_out = bool(match["start"]) and kind in ("all-gather", "collective-permute")
                size = _bytes(match["shape"], last=in_and_out)
                if kind == "reduce-scatter":
                    size *= group
                share = {"all-reduce": 2 * (group - 1), "collective-permute": group}.get(kind, group - 1) / group
                for i, value in enumerate((times, times * size, round(times * size * share))):
                    totals[kind, group][i] += value
            known = _TRIPS.search(line)
            is_loop = " while(" in line
            for callee in _callees(line):
                inside = walk(callee, times * (int(known[1]) if known else turns) if is_loop else times)
                guessed += is_loop and inside and not known
                found |= inside
        return found

    walk(entry, 1)
    listed = [Collective(kind, group, *numbers) for (kind, group), numbers in totals.items()]
    return sorted(listed, key=lambda c: -c.sent), guessed


_COLLECTIVE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{'|'.join(COLLECTIVES)})(?P<start>-start)?\(")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"\}')
_CALLS = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def _callees(line: str) -> list[str]:
    """Return the computations that an instruction calls, including all branches of a conditional."""
    branches = _BRANCHES.search(line)
    return _CALLS.findall(line) + ([name.strip(" %") for name in branches[1].split(",")] if branches else [])


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Return the program's computations as {name: lines}, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _group_size(line: str) -> int:
    """Return the size of the replica groups, which XLA writes in several notations."""
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        if axes and all(axis in sizes for axis, _ in axes):
            return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "source_target_pairs=" in line:
        return 1
    raise ValueError(f"unknown notation for replica groups in XLA's output: {line.strip()[:300]}")


def _bytes(shape: str, last: bool = False) -> int:
    """Return the bytes of a shape, e.g. "f32[3,5]{1,0}", or a tuple of shapes; with `last`, only of its last array."""
    arrays = [
        ITEM_BYTES[kind] * math.prod(map(int, filter(None, sizes.split(",")))) for kind, sizes in _ARRAY.findall(shape)
    ]
    return arrays[-1] if last else sum(arrays)


def table_rows(description: Description, link: float, peak: float) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs to display. `link` is in bytes/s and `peak` in FLOP/s, both per device."""
    d, devices = description, math.prod(description.mesh.values())
    yield "mesh", " × ".join(f"{axis} {size}" for axis, size in d.mesh.items()) + f" = {devices} devices"
    yield "parameters", f"{d.parameters:,}"
    yield "batch", ", ".join(f"{name} {shape}" for name, shape in d.batch.items())
    yield "tokens per step", f"{d.tokens:,}"
    yield "FLOPs per step", f"{d.flops:.3g}, {d.flops / devices:.3g} per device"
    yield "bytes per device: parameters", f"{d.parameter_bytes:,}"
    yield "  optimizer state", f"{d.optimizer_bytes:,}"
    yield "  gradients (estimate)", f"{d.gradient_bytes:,}"
    activations = max(d.temporary_bytes - d.gradient_bytes, 0)
    yield "  activations and other (estimate)", f"{activations:,}"
    total = d.parameter_bytes + d.optimizer_bytes + d.temporary_bytes
    yield "  total (estimate)", f"{total:,}"
    for how, size in d.sharded.items():
        yield f"parameters sharded over {how}", f"{size / 4 / d.parameters:.1%}"
    for c in d.collectives:
        yield (
            f"{c.kind} among {c.group} devices (estimate)",
            f"{c.count:,} per step, {c.bytes:,} bytes in total, {c.sent:,} bytes sent per device",
        )
    computing, sending = d.times(link, peak)
    share = sending / (sending + computing)
    yield (
        f"at {link / 1e9:g} GB/s and {peak / 1e12:g} TFLOP/s (estimate)",
        f"{1000 * computing:.3g} ms of matrix products, {1000 * sending:.3g} ms of communication "
        f"({share:.0%} of the step without overlap)",
    )
    if d.guessed_loops:
        yield "loops over chunks of the loss", f"{d.guessed_loops}, each counted with all chunks full"
