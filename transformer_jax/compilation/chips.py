"""Kinds of TPUs and GPUs: their memory and speed, and how they are connected."""

import dataclasses
import re
from collections.abc import Mapping
from string import Template
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.training.profiling import PEAKS


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU or GPU. All numbers are per JAX device, of which v4 and tpu7x have
    two per chip.

    memory: bytes that a program can use, as the compiler of TPUs reports them when a
        program needs more. Of GPUs, all.
    peak: FLOP/s of bfloat16 products.
    bandwidth: bytes/s of the device's memory.
    clock: cycles/s, the peak divided by the FLOPs per cycle of the device's matrix
        units. None for GPUs, whose compiler estimates no cycles.
    kernel_slowness: cycles of the kernels of `kernels.short`, relative to those on a
        v5e, by libtpu's static profile. 1 where there is no profile.
    specification: what the compiler of GPUs needs to know about the device, "" for
        TPUs.
    options: of the compiler.
    """

    memory: float
    peak: float
    bandwidth: float
    clock: float | None
    topologies: tuple[str, ...]
    kernel_slowness: float = 1.0
    specification: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _chip(
    kind: str,
    memory_gib: float,
    bandwidth: float,
    units: int,
    width: int,
    names: str,
    *,
    parts: int = 1,
    kernel_slowness: float = 1.0,
) -> Chip:
    """Return a chip with `units` matrix units of width × width per device, and
    `parts` devices.
    """
    peak = PEAKS[kind][0] * 1e12
    if kind == "TPU v4":  # listed per chip
        peak /= parts
    clock = peak / (2 * units * width**2)
    return Chip(
        memory_gib * 2**30,
        peak,
        bandwidth / parts,
        clock,
        tuple(names.split()),
        kernel_slowness,
    )


# A GpuTargetConfigProto of XLA, with places for what differs between GPUs. Limits of
# compute capability 9.0:
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
_HOPPER = Template("""
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: $memory
  memory_bandwidth: $bandwidth
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "$kind"
""")


def _hopper(kind: str, memory: int, bandwidth: float) -> Chip:
    """Return a GPU with compute capability 9.0. Layouts are hosts × 1 × GPUs per
    host.
    """
    return Chip(
        memory=memory,
        peak=PEAKS[kind][0] * 1e12,
        bandwidth=bandwidth,
        clock=None,
        topologies=("1x1x1", "1x1x2", "1x1x4", "1x1x8", "2x1x8", "64x1x8"),
        specification=_HOPPER.substitute(
            memory=memory, bandwidth=int(bandwidth), kind=kind
        ),
        # without a GPU, the compiler cannot time variants of a kernel
        options={"xla_gpu_autotune_level": 0},
    )


_SQUARES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4"
# Bandwidths: https://docs.cloud.google.com/tpu/docs/v4 and the corresponding pages of
#     the other kinds.
CHIPS = {
    "v4": _chip("TPU v4", 15.25, 1228e9, 4, 128, _CUBES, parts=2),
    "v5e": _chip("TPU v5e", 15.75, 819e9, 4, 128, _SQUARES),
    "v5p": _chip(
        "TPU v5p",
        95.74,
        2765e9,
        8,
        128,
        _CUBES + " 4x4x8 4x8x8 8x8x8",
        kernel_slowness=0.5,
    ),
    "v6e": _chip("TPU v6e", 31.25, 1640e9, 4, 256, _SQUARES, kernel_slowness=0.8),
    "tpu7x": _chip("TPU7x", 94.75, 7380e9, 4, 256, _CUBES, parts=2),
    # SXM: https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306,
    #     https://www.nvidia.com/en-us/data-center/h200
    "h100": _hopper("NVIDIA H100 80GB HBM3", 84942979072, 3350e9),
    "h200": _hopper("NVIDIA H200", 150754820096, 4800e9),
}


def chip_of(name: str) -> Chip:
    """Return the kind of chip of a topology, e.g. "v5e:16x16".

    Raises ValueError if the topology is unknown.
    """
    kind, _, layout = name.partition(":")
    chip = CHIPS.get(kind)
    if (
        not chip
        or not layout
        or (
            chip.specification
            and not re.fullmatch(r"[1-9]\d{0,2}x1x[1-8]", layout, re.ASCII)
        )
    ):
        raise UserError(
            f"--topology={name}: there is no such topology; {known_topologies()}"
        )
    return chip


def known_topologies() -> str:
    """Return how a topology is written, and the kinds and layouts there are."""
    listed = "; ".join(
        f"{kind}: {', '.join(chip.topologies)}" for kind, chip in CHIPS.items()
    )
    return (
        "write it as CHIP:LAYOUT, e.g. v5e:16x16. "
        f"The chips and some of their layouts are {listed}"
    )
