"""TPU slices and hosts of GPUs that programs can be compiled for on any machine, by
the compilers of these devices.
"""

import importlib.util
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from transformer_jax.compilation.chips import Chip, chip_of, known_topologies
from transformer_jax.errors import UserError

INSTALL = "pip install -c constraints.txt -e '.[tpu]' in the folder of transformer_jax"
INSTALL_GPU = INSTALL.replace("tpu", "gpu-compiler")

# What libtpu would otherwise look for on a TPU host, with warnings if it is not on one.
# No TPU is opened, so several processes can use libtpu at the same time.
SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def devices_of(name: str) -> Sequence[jax.Device]:
    """Return the devices of a topology, for which programs can be compiled but not run.

    Raises:
        ValueError: The topology is unknown, its compiler is not installed, or another
            process keeps it from loading.
    """
    chip = chip_of(name)
    if chip.specification:
        return _gpus(name, chip)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology={name}: compiling for TPUs needs libtpu: {INSTALL}"
        )
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    single = {"chips_per_host_bounds": (1, 1, 1)} if name.endswith(":1x1") else {}
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=name, **single
        ).devices
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" in str(error):
            raise UserError(
                f"--topology={name}: another process has loaded "
                "libtpu (it holds /tmp/libtpu_lockfile): wait until it ends, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1, with which libtpu does not use the file"
            ) from error
        raise UserError(
            f"--topology={name}: libtpu says {str(error).strip()!r}; "
            f"{known_topologies()}"
        ) from error


def _gpus(name: str, chip: Chip) -> Sequence[jax.Device]:
    if not any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
    ):
        raise UserError(
            f"--topology={name}: compiling for GPUs needs JAX's plugin for them: "
            f"{INSTALL_GPU}"
        )
    kind, _, layout = name.partition(":")
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        topology=layout,
        target_config=chip.specification,
    ).devices


def check_mesh(name: str, mesh: str, sizes: Sequence[int], devices: int) -> None:
    """Raise ValueError if a mesh of these sizes does not have all devices of a
    topology. `mesh` is how it was given.
    """
    if math.prod(sizes) != devices:
        raise UserError(
            f"--mesh={mesh}: its axes multiply to {math.prod(sizes)}, "
            f"but {name} has {devices} devices: "
            f"change the mesh, e.g. to data={devices}, or the topology"
        )
