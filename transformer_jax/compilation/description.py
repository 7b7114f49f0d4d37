"""Describe a training step on a mesh before it runs: parameters, FLOPs, bytes per
device, communication.

The bytes of parameters and optimizer state are exact. The rest is estimated from the
step as XLA compiles it for simulated CPU devices; a compiler for accelerators fuses and
schedules differently.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from transformer_jax.compilation.collectives import Collective, read_collectives
from transformer_jax.data.batching import Arrays
from transformer_jax.training.engine import Engine
from transformer_jax.training.freezing import size, trained_size
from transformer_jax.training.initialization import bytes_per_device
from transformer_jax.training.sharding import abstract_batch, shown

WHOLE = "none: whole on every device"  # the key in `sharded` of parameters without axes


@dataclasses.dataclass(frozen=True)
class Description:
    """Size and cost of one training step.

    Bytes are per device, for the device that holds the most.
    """

    mesh: dict[str, int]
    parameters: int  # of the model
    trained: int  # as many as the optimizer changes
    batch: dict[str, tuple[int, ...]]
    tokens: int  # in the whole batch, without padding
    flops: float  # for the whole batch, over all devices
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int  # estimate: the size of the parameters that have one
    # estimate: peak of gradients, activations and other temporary buffers
    temporary_bytes: int
    # total parameter bytes by the mesh axes that shard them, e.g. {"fsdp, tensor":
    # 4096}
    sharded: dict[str, int]
    collectives: list[Collective]  # estimates
    # loops that contain collectives and have an unknown trip count; counted `turns`
    # times
    guessed_loops: int

    def times(self, link: float, peak: float) -> tuple[float, float]:
        """Return the seconds per step for (matrix products, communication).

        `peak` is in FLOP/s and `link` in bytes/s, both per device.
        """
        devices = math.prod(self.mesh.values())
        return self.flops / devices / peak, sum(c.sent for c in self.collectives) / link


def describe(engine: Engine, batch: Arrays, turns: int = 1) -> Description:
    """Describe the step on a batch without padding.

    Loops with a data-dependent length count as `turns` iterations.
    """
    state = engine.abstract_state
    work = engine.task.work(batch)
    compiled = engine.step.lower(state, abstract_batch(batch, engine.mesh)).compile()
    collectives, guessed = read_collectives(compiled.as_text(), turns)
    gradient_bytes = bytes_per_device(state.params)
    return Description(
        mesh=dict(engine.mesh.shape),
        parameters=size(engine.abstract_parameters),
        trained=trained_size(state.params, engine.config.frozen),
        batch={name: array.shape for name, array in batch.items()},
        tokens=work.tokens,
        flops=work.flops,
        parameter_bytes=bytes_per_device((state.params, state.base)),
        optimizer_bytes=bytes_per_device((state.opt_state, state.ema)),
        gradient_bytes=gradient_bytes,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        sharded=_by_sharding((state.params, state.base)),
        collectives=collectives,
        guessed_loops=guessed,
    )


def _by_sharding(params: Any) -> dict[str, int]:
    """Return the total parameter bytes by the mesh axes that shard them, e.g.
    {"fsdp, tensor": 4096}, largest first.
    """
    totals: collections.Counter[str] = collections.Counter()
    for x in jax.tree.leaves(params):
        named: set[str] = set()
        for axes in x.sharding.spec:
            if isinstance(axes, str):
                named.add(axes)
            elif axes:
                named.update(axes)
        along = sorted(axis for axis in named if x.sharding.mesh.shape[axis] > 1)
        totals[", ".join(along) or WHOLE] += math.prod(x.shape) * x.dtype.itemsize
    return dict(totals.most_common())


def table_rows(
    description: Description, link: float, peak: float | None
) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs to display.

    `link` is in bytes/s and `peak` in FLOP/s, both per device. Without a peak, there
    are no times.
    """
    d = description
    devices = math.prod(description.mesh.values())
    yield "mesh", shown(d.mesh)
    yield "parameters", f"{d.parameters:,}"
    if d.trained != d.parameters:
        yield "  trained", f"{d.trained:,} ({d.trained / d.parameters:.2%})"
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
    for axes, held in d.sharded.items() if devices > 1 else ():
        how = "whole on every device" if axes == WHOLE else f"sharded over {axes}"
        share = held / sum(d.sharded.values())
        yield f"parameters {how}", f"{share:.1%}"
    for c in d.collectives:
        yield (
            f"{c.kind} among {c.group} devices (estimate)",
            (
                f"{c.count:,} per step, {c.bytes:,} bytes in total, "
                f"{c.sent:,} bytes sent per device"
            ),
        )
    if peak is not None:
        yield _times(d, link, peak)
    if d.guessed_loops:
        yield (
            "loops over chunks of the loss",
            f"{d.guessed_loops}, each counted with all chunks full",
        )


def _times(description: Description, link: float, peak: float) -> tuple[str, str]:
    """Return the row with the estimated times of a step."""
    computing, sending = description.times(link, peak)
    products = f"{1000 * computing:.3g} ms of matrix products"
    if not sending:
        return f"at {peak / 1e12:g} TFLOP/s (estimate)", products
    share = sending / (sending + computing)
    return (
        f"at {link / 1e9:g} GB/s and {peak / 1e12:g} TFLOP/s (estimate)",
        (
            f"{products}, {1000 * sending:.3g} "
            f"ms of communication ({share:.0%} of the step without overlap)"
        ),
    )
