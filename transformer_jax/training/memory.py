"""Memory: what a run needs at least, and what its devices and this machine have."""

import math
from pathlib import Path

import jax

from transformer_jax.errors import UserError
from transformer_jax.training import processes
from transformer_jax.training.initialization import TrainState, bytes_per_device
from transformer_jax.training.task import Config

GIB = 2**30
REMEDY = (
    "Use a smaller model (config.model.d_model, "
    "the number of layers), fewer positions per batch (config.data.batch_tokens), "
    "or divide the model among more devices (config.mesh.fsdp)"
)


def check_fits(config: Config, state: TrainState) -> None:
    """Raise UserError in all processes if `state` and a gradient are larger than the
    memory of a process's devices.

    Activations come on top, so a run that passes may still be too large. `state` is
    abstract.
    """
    needed = bytes_per_device(state) + bytes_per_device(state.params)
    device = jax.local_devices()[0]
    if device.platform == "cpu":  # all devices share the memory of the machine
        needed = needed * jax.local_device_count()
        limit = _free_memory()
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    model = state.params if state.base is None else state.base
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(model))
    message = ""
    if needed > limit:
        message = (
            f"config.model.d_model = {config.model.d_model}: "
            f"the model has {count:,} parameters. Training needs at least "
            f"{needed / GIB:.1f} GiB for parameters, gradients and optimizer state, "
            f"but only {limit / GIB:.1f} GiB are free ({device.device_kind}). {REMEDY}"
        )
    if message := processes.any_says(message):
        raise UserError(message)


def exhausted(error: Exception) -> str:
    """Return the message for an error of a library that could not allocate memory.

    Its first line has the size.
    """
    size = str(error).partition("\n")[0] or "no size is known"
    return f"out of memory ({size}). {REMEDY}"


def _free_memory() -> float:
    """Return the bytes that this process can still allocate: those of the machine,
    or of its control group.
    """
    groups = Path("/sys/fs/cgroup")
    return min(
        _free_on_machine(Path("/proc/meminfo")),
        _free_in_group(
            groups / "memory.max", groups / "memory.current", groups / "memory.stat"
        ),
        _free_in_group(
            *(
                groups / "memory" / f"memory.{x}"
                for x in ("limit_in_bytes", "usage_in_bytes", "stat")
            )
        ),
    )


def _free_on_machine(meminfo: Path) -> float:
    """Return the free bytes of a machine that runs Linux, including its swap space,
    or infinity on another one.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return math.inf
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return 1024 * (kilobytes["MemAvailable:"] + kilobytes["SwapFree:"])


def _free_in_group(limit: Path, used: Path, details: Path) -> float:
    """Return the free bytes of a control group of Linux, or infinity without one.

    Its file cache counts as free.
    """
    try:
        free = int(limit.read_text()) - int(used.read_text())
        stat = dict(line.split() for line in details.read_text().splitlines())
        return free + int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        return math.inf
