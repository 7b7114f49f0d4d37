r"""Describe a recipe's training step on any mesh, without data or accelerators.

    python scripts/describe.py --config=configs/wmt14.py:big --mesh=data=64,fsdp=8
    python scripts/describe.py --config=configs/wmt14.py:big --topology=v5e:16x16 \
        --mesh=data=32,fsdp=8

The output on stdout is a table, or JSON with --json. It lists parameters, FLOPs, bytes
per device, which parameters are sharded along which axes, and what the devices send to
each other. Estimates are marked as such.

With --topology, the step is compiled by the compiler of these TPUs or GPUs, and the
output says whether it fits and how long it would take.
"""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any


def mesh_of(text: str) -> dict[str, int]:
    """Parse --mesh: "data=4,tensor=2" → {"data": 4, "fsdp": 1, "tensor": 2}. Exits
    with code 2 if it is invalid.
    """
    sizes = {"data": 1, "fsdp": 1, "tensor": 1}
    left = list(sizes)
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if (
            axis not in left
            or not (size.isascii() and size.isdecimal())
            or not 1 <= int(size) < 2**31
        ):
            print(
                f"error: --mesh={text}: "
                "write it as data=64,fsdp=8,tensor=1, each axis at most once",
                file=sys.stderr,
            )
            sys.exit(2)
        left.remove(axis)
        sizes[axis] = int(size)
    return sizes


# The number of simulated devices must be set before jax is imported.
MESH_SIZES = mesh_of(
    next((a.partition("=")[2] for a in sys.argv if a.startswith("--mesh=")), "")
)
COMPILED_FOR_TOPOLOGY = any(argument.startswith("--topology") for argument in sys.argv)
SIMULATED = 1 if COMPILED_FOR_TOPOLOGY else math.prod(MESH_SIZES.values())
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} "
    f"--xla_force_host_platform_device_count={SIMULATED}"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
from absl import flags  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from transformer_jax import command_line, files  # noqa: E402
from transformer_jax.compilation import chips, description, target, topologies  # noqa: E402
from transformer_jax.config import make_task, parse  # noqa: E402
from transformer_jax.data.batching import Arrays  # noqa: E402
from transformer_jax.models.kernels.chunks import chunk_size  # noqa: E402
from transformer_jax.training.engine import Engine  # noqa: E402
from transformer_jax.training.sharding import row_shards  # noqa: E402
from transformer_jax.training.task import Config, Task  # noqa: E402

CONFIG = command_line.define_recipe()
MESH = flags.DEFINE_string(
    "mesh", "", "devices along each axis (1 if not named), e.g. data=64,fsdp=8"
)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    "",
    "devices to compile for, e.g. v5e:16x16; without --mesh, all along data",
)
STEP = flags.DEFINE_enum(
    "step", "train", target.STEPS, "the step to compile with --topology"
)
SAVE = flags.DEFINE_string(
    "save", "", "file for the text of the program compiled with --topology"
)
LENGTH = flags.DEFINE_integer(
    "length",
    None,
    "positions per example of the described batch "
    "(default: 64, or as many as the recipe allows if they are fewer)",
    lower_bound=2,
)
LINK = flags.DEFINE_float(
    "link_gb_s", 100.0, "send bandwidth of a device, in GB/s", lower_bound=1e-3
)
PEAK = flags.DEFINE_float(
    "peak_tflop_s",
    400.0,
    "matrix-product rate of a device, in TFLOP/s",
    lower_bound=1e-3,
)
JSON = flags.DEFINE_bool("json", False, "print one JSON object instead of the table")


def main() -> None:
    command_line.check_output("-")
    if mesh_of(MESH.value) != MESH_SIZES:
        raise flags.Error(
            f"--mesh={MESH.value}: "
            "write it with =, and only once, e.g. --mesh=data=64,fsdp=8"
        )
    if any(argument.startswith("--config.mesh.") for argument in sys.argv):
        raise flags.Error(
            "--config.mesh.… cannot be used here: "
            "set --mesh instead, e.g. --mesh=data=64,fsdp=8"
        )
    for flag in (LINK, PEAK):
        if not math.isfinite(flag.value):
            raise flags.Error(
                f"--{flag.name}={flag.value}: must be finite, e.g. {flag.default}"
            )
    if SAVE.value:
        command_line.check_output(SAVE.value)
    if PEAK.present and TOPOLOGY.value:
        raise flags.Error(
            "--peak_tflop_s cannot be used with --topology, "
            "which says what the devices are"
        )
    for flag in (STEP, SAVE):
        if flag.present and not TOPOLOGY.value:
            raise flags.Error(
                f"--{flag.name} needs --topology, e.g. --topology=v5e:16x16"
            )
    raw = CONFIG.value
    raw.data.directory = raw.data.directory or "(none)"
    if TOPOLOGY.value:
        describe_target(raw)
    else:
        describe_simulated(raw)


def describe_simulated(raw: ConfigDict) -> None:
    """Print the description of the training step as compiled for simulated CPU
    devices.
    """
    raw.mesh.update(MESH_SIZES)
    config = parse(raw)
    length = length_of(config)
    shards = row_shards(MESH_SIZES) * config.training.microbatches
    task = make_task(config, None)
    batch = task.dummy_batch(training_rows(config, shards, length), length)
    described = description.describe(Engine(task), batch, chunks(task, batch, shards))
    link = LINK.value * 1e9
    peak = PEAK.value * 1e12
    times = dict(
        zip(("computing_s", "sending_s"), described.times(link, peak), strict=True)
    )
    # one device may be a laptop
    assumed = peak if PEAK.present or math.prod(MESH_SIZES.values()) > 1 else None
    show(
        dataclasses.asdict(described) | times,
        description.table_rows(described, link, assumed),
    )


def describe_target(raw: ConfigDict) -> None:
    """Print the description of a step as compiled for the devices of --topology."""
    # JAX cannot read a program for devices that are not here
    jax.config.update("jax_enable_compilation_cache", False)
    chip = chips.chip_of(TOPOLOGY.value)
    devices = topologies.devices_of(TOPOLOGY.value)
    sizes = MESH_SIZES if MESH.value else MESH_SIZES | {"data": len(devices)}
    topologies.check_mesh(
        TOPOLOGY.value, MESH.value, list(sizes.values()), len(devices)
    )
    raw.mesh.update(sizes)
    config = parse(raw)
    length = length_of(config)
    shards = row_shards(sizes)
    if STEP.value == "train":
        parts = shards * config.training.microbatches
        rows = training_rows(config, parts, length)
    else:
        parts = shards
        rows = -(-config.evaluation.batch_size // shards) * shards
    engine = Engine(make_task(config, None), devices)
    batch = engine.task.dummy_batch(rows, length)
    if STEP.value == "predict":
        turns = length
    else:
        turns = chunks(engine.task, batch, parts, devices[0].platform)
    described, text = target.compile_for(
        TOPOLOGY.value, chip, engine, batch, STEP.value, turns
    )
    if SAVE.value:
        files.write(SAVE.value, text.encode())
    times = {
        "estimate_s": described.step_time.estimate,
        "bound_s": described.step_time.bound,
    }
    show(
        dataclasses.asdict(described) | times,
        target.table_rows(described, chip, LINK.value * 1e9),
    )


def length_of(config: Config) -> int:
    """Return the length of the described batch.

    Raises an error if --length is too long for the config.
    """
    words, longest = config.longest
    if LENGTH.value is None:
        return min(64, longest)
    command_line.check_length(LENGTH.value, words, longest)
    return LENGTH.value


def training_rows(config: Config, shards: int, length: int) -> int:
    """Return the rows of a batch of examples of `length`, a multiple of `shards`.

    Name the keys with which training on this mesh would work.
    """
    if config.data.rows_multiple % shards:
        _, longest = config.longest
        least = longest * shards
        print(
            f"to train on this mesh, set --config.data.rows_multiple={shards}; that "
            f"needs --config.data.batch_tokens={max(config.data.batch_tokens, least)}, "
            "or shorter examples",
            file=sys.stderr,
        )
    return max(config.data.batch_tokens // length // shards, 1) * shards


def chunks(task: Task, batch: Arrays, shards: int, platform: str = "cpu") -> int:
    """Return the number of chunks in which the loss of a shard's positions is
    computed on this platform.
    """
    positions = task.work(batch).tokens
    return -(-positions // (shards * chunk_size(platform)))


def show(fields: dict[str, Any], rows: Iterator[tuple[str, str]]) -> None:
    """Print the fields as JSON, or the rows as a table."""
    if JSON.value:
        print(json.dumps(fields))
        return
    table = list(rows)
    width = max(len(name) for name, _ in table)
    for name, value in table:
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    command_line.run(main, distributed=False)
