"""The platform for which a computation is traced."""

import os

import jax

GPUS = ("gpu", "cuda")  # the names that `current` may return for a GPU


def current() -> str:
    """Return the platform of this trace, e.g. "tpu".

    It is that of the mesh in scope, or else JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def is_cpu() -> bool:
    """Return True if this trace is for CPUs."""
    return current() == "cpu"


def is_gpu() -> bool:
    """Return True if this trace is for GPUs."""
    return current() in GPUS


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
