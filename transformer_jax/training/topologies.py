"""TPU slices that programs can be compiled for on any machine, by libtpu, the compiler of TPUs."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from transformer_jax.training.profiling import PEAKS

INSTALL = "pip install -c constraints.txt -e '.[tpu]' in the folder of transformer_jax"

# What libtpu would otherwise look for on a TPU host, with warnings if it is not on one. No TPU is opened, so several
# processes can use libtpu at the same time.
SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU. All numbers are per JAX device, of which v4 and tpu7x have two per chip.

    memory: bytes that a program can use, as the compiler reports them when a program needs more.
    peak: FLOP/s of bfloat16 products.
    bandwidth: bytes/s of the device's memory.
    clock: cycles/s, the peak divided by the FLOPs per cycle of the device's matrix units.
    """

    memory: float
    peak: float
    bandwidth: float
    clock: float
    topologies: tuple[str, ...]


def _chip(kind: str, memory_gib: float, bandwidth: float, units: int, width: int, names: str, parts: int = 1) -> Chip:
    """Return a chip with `units` matrix units of width × width per device, and `parts` devices."""
    peak = PEAKS[kind][0] * 1e12
    if kind == "TPU v4":  # listed per chip
        peak /= parts
    return Chip(memory_gib * 2**30, peak, bandwidth / parts, peak / (2 * units * width**2), tuple(names.split()))


_SQUARES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
# Bandwidths: https://docs.cloud.google.com/tpu/docs/v4 and the corresponding pages of the other kinds.
CHIPS = {
    "v4": _chip("TPU v4", 15.25, 1228e9, 4, 128, "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4", parts=2),
    "v5e": _chip("TPU v5e", 15.75, 819e9, 4, 128, _SQUARES),
    "v5p": _chip("TPU v5p", 95.74, 2765e9, 8, 128, "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8"),
    "v6e": _chip("TPU v6e", 31.25, 1640e9, 4, 256, _SQUARES),
    "tpu7x": _chip("TPU7x", 94.75, 7380e9, 4, 256, "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4", parts=2),
}


def chip_of(name: str) -> Chip:
    """Return the kind of chip of a topology, e.g. "v5e:16x16". Raises ValueError if the kind is unknown."""
    kind, _, layout = name.partition(":")
    if kind not in CHIPS or not layout:
        raise ValueError(f"--topology={name}: there is no such topology; {_known()}")
    return CHIPS[kind]


def _known() -> str:
    listed = "; ".join(f"{kind}: {', '.join(chip.topologies)}" for kind, chip in CHIPS.items())
    return f"write it as CHIP:LAYOUT, e.g. v5e:16x16. The chips and some of their layouts are {listed}"


def devices_of(name: str) -> Sequence[jax.Device]:
    """Return the devices of a topology, for which programs can be compiled but not run.

    Raises:
        ValueError: The topology is unknown, libtpu is not installed, or another process keeps it from loading.
    """
    chip_of(name)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"--topology={name}: compiling for TPUs needs libtpu: {INSTALL}")
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    single = {"chips_per_host_bounds": (1, 1, 1)} if name.endswith(":1x1") else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **single).devices
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" in str(error):
            raise ValueError(
                f"--topology={name}: another process has loaded libtpu (it holds /tmp/libtpu_lockfile): wait until it "
                "ends, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1, with which libtpu does not use the file"
            ) from error
        raise ValueError(f"--topology={name}: libtpu says {str(error).strip()!r}; {_known()}") from error


def check_mesh(name: str, mesh: str, sizes: Sequence[int], devices: int) -> None:
    """Raise ValueError if a mesh of these sizes does not have all devices of a topology. `mesh` is how it was given."""
    if math.prod(sizes) != devices:
        raise ValueError(
            f"--mesh={mesh}: its axes multiply to {math.prod(sizes)}, but {name} has {devices} devices: change the "
            f"mesh, e.g. to data={devices}, or the topology"
        )
