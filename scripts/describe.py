"""Describe a recipe's training step on any mesh, without data or devices: a table, or JSON with --json.

    python scripts/describe.py --config=configs/wmt14.py:big --mesh=data=64,fsdp=8

Parameters, FLOPs, bytes on each device, which parameters are sharded along which axes, and what devices send one
another. Estimates are marked as such.
"""

import dataclasses
import json
import math
import os
import sys


def mesh_of(text: str) -> dict[str, int]:
    """ "data=4,tensor=2" → {"data": 4, "fsdp": 1, "tensor": 2}."""
    sizes = {"data": 1, "fsdp": 1, "tensor": 1}
    left = list(sizes)
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in left or not (size.isascii() and size.isdecimal()) or not 1 <= int(size) < 2**31:
            print(f"error: --mesh={text}: write it like data=64,fsdp=8,tensor=1, each once", file=sys.stderr)
            sys.exit(2)
        left.remove(axis)
        sizes[axis] = int(size)
    return sizes


# Fake devices must be there before jax is imported.
MESH_SIZES = mesh_of(next((a.partition("=")[2] for a in sys.argv if a.startswith("--mesh=")), ""))
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={math.prod(MESH_SIZES.values())}"
os.environ["JAX_PLATFORMS"] = "cpu"

from absl import flags  # noqa: E402

from transformer_jax import command_line  # noqa: E402
from transformer_jax.config import make_task, parse  # noqa: E402
from transformer_jax.losses import CHUNK  # noqa: E402
from transformer_jax.training.description import describe, table_rows  # noqa: E402
from transformer_jax.training.engine import Engine  # noqa: E402

CONFIG = command_line.define_recipe()
MESH = flags.DEFINE_string("mesh", "", "devices along each axis, e.g. data=64,fsdp=8,tensor=1")
LENGTH = flags.DEFINE_integer("length", 64, "tokens a sentence of the batch described", lower_bound=2)
LINK = flags.DEFINE_float("link_gb_s", 100.0, "GB/s that a device sends", lower_bound=1e-3)
PEAK = flags.DEFINE_float("peak_tflop_s", 400.0, "TFLOP/s of a device's matrix products", lower_bound=1e-3)
JSON = flags.DEFINE_bool("json", False, "one JSON object in place of the table")


def main() -> None:
    if mesh_of(MESH.value) != MESH_SIZES:
        raise flags.Error(f"--mesh={MESH.value}: write it with the sign =, and once")
    if any(argument.startswith("--config.mesh.") for argument in sys.argv):
        raise flags.Error("the mesh is described by --mesh, e.g. data=64,fsdp=8: leave out --config.mesh.…")
    for flag in (LINK, PEAK):
        if not math.isfinite(flag.value):
            raise flags.Error(f"--{flag.name}={flag.value}: must be finite")
    raw = CONFIG.value
    raw.data.directory = raw.data.directory or "(none)"
    raw.mesh.update(MESH_SIZES)
    config = parse(raw)
    if LENGTH.value > config.data.max_length:
        raise flags.Error(f"--length={LENGTH.value}: must be at most data.max_length = {config.data.max_length}")
    shards = MESH_SIZES["data"] * MESH_SIZES["fsdp"] * config.training.microbatches
    task = make_task(config, None)
    rows = max(config.data.batch_tokens // LENGTH.value // shards, 1) * shards
    if config.data.rows_multiple % shards:
        least = config.data.max_length * shards
        print(
            f"to train on this mesh: --config.data.rows_multiple={shards} and, for that, --config.data.batch_tokens="
            f"{max(config.data.batch_tokens, least)} or a smaller data.max_length",
            file=sys.stderr,
        )
    batch = task.dummy_batch(rows, LENGTH.value)
    turns = -(-max(array.size for array in batch.values()) // (shards * CHUNK))
    described = describe(Engine(task), batch, turns)
    link, peak = LINK.value * 1e9, PEAK.value * 1e12
    if JSON.value:
        times = dict(zip(("computing_s", "sending_s"), described.times(link, peak), strict=True))
        print(json.dumps(dataclasses.asdict(described) | times))
        return
    table = list(table_rows(described, link, peak))
    width = max(len(name) for name, _ in table)
    for name, value in table:
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    command_line.run(main, distributed=False)
