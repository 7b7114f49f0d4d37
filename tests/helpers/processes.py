"""Python programs in processes of their own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import ROOT
from helpers.forked import script

# For processes that are killed, or that cannot write: a torn program would keep JAX
# 0.10 from storing any other one.
STORES_NO_PROGRAMS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
ON_CPUS = """import warnings
warnings.simplefilter("error")
import jax
jax.config.update("jax_platforms", "cpu")
"""


def on_devices(count: int, program: str) -> str:
    """Return the output of a Python program that runs on `count` simulated devices.

    The program runs in a process forked from one that has not used JAX yet, because
    the number of devices is fixed when JAX computes first.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.with_suffix(".py").write_text(ON_CPUS + program)
        done = script(str(path), environment={"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def in_a_new_process(program: str) -> str:
    """Return the output of a Python program that runs on CPUs in a new process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
