"""How near a step comes to what the devices can do, and traces of where its time goes."""

import time

import jax
import jax.numpy as jnp
from etils import epath


def matrix_rate(dtype: str, n: int = 2048) -> float:
    """FLOP/s of an n³ product on one device, the best of five."""
    a = jnp.ones((n, n), dtype)
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        product(a, a).block_until_ready()
        return time.perf_counter() - start

    return 2 * n**3 / min(once() for _ in range(5))


def matrix_peak(dtype: str) -> float:
    """FLOP/s of all devices together, measured on one. A host's CPU devices share its cores: they count as one."""
    of_cpus = jax.devices()[0].platform == "cpu"
    return matrix_rate(dtype) * (jax.process_count() if of_cpus else jax.device_count())


def device_memory() -> dict[str, float]:
    """{"device_memory_gb": the most that the first device held so far}; nothing where devices do not tell, as CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"device_memory_gb": stats["peak_bytes_in_use"] / 1e9} if "peak_bytes_in_use" in stats else {}


class Trace:
    """A profile of the steps in `steps`, for TensorBoard's profiler, XProf or ui.perfetto.dev, in `directory`."""

    def __init__(self, directory: epath.PathLike, steps: range):
        self._directory, self._steps, self._running = str(directory), steps, False

    def before(self, step: int) -> None:
        if step == self._steps.start:
            jax.profiler.start_trace(self._directory)
            self._running = True

    def after(self, step: int, result: object) -> None:
        """`result`: what the step computes; its end is waited for."""
        if self._running and step + 1 >= self._steps.stop:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
