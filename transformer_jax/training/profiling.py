"""How near a step comes to what the devices can do, and traces of where its time goes."""

import time

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax.training import processes


def matrix_rate(dtype: str, n: int, chain: int) -> float:
    """FLOP/s of products of n × n matrices on one device, `chain` of them at a call, the best of five calls."""
    x, a = jnp.ones((n, n), dtype), jnp.full((n, n), 1 / n, dtype)  # x a = x
    products = jax.jit(lambda x, a: jax.lax.fori_loop(0, chain, lambda _, x: x @ a, x))
    products(x, a).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        products(x, a).block_until_ready()
        return time.perf_counter() - start

    return chain * 2 * n**3 / min(once() for _ in range(5))


def matrix_peak(dtype: str) -> float:
    """FLOP/s of all devices together, measured on one. A host's CPU devices share its cores: they count as one."""
    if jax.devices()[0].platform == "cpu":
        return matrix_rate(dtype, 2048, 1) * jax.process_count()
    return matrix_rate(dtype, 8192, 20) * jax.device_count()


def device_memory() -> dict[str, float]:
    """{"device_memory_gb": the most that the first device held so far}; nothing where devices do not tell, as CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"device_memory_gb": stats["peak_bytes_in_use"] / 1e9} if "peak_bytes_in_use" in stats else {}


class Trace:
    """A profile of the steps in `steps`, by the first process, in `directory`: for XProf or ui.perfetto.dev."""

    def __init__(self, directory: epath.PathLike, steps: range):
        self._directory, self._running = str(directory), False
        self._steps = steps if processes.is_first() else range(0)

    def before(self, step: int, state: object) -> bool:
        """Whether it starts with this step; `state`, what the steps before it compute, is waited for."""
        if step != self._steps.start or not self._steps:
            return False
        jax.block_until_ready(state)
        jax.profiler.start_trace(self._directory)
        self._running = True
        return True

    def after(self, step: int, state: object) -> bool:
        """Whether it ends with this step, whose `state` is waited for."""
        if not self._running or step + 1 < self._steps.stop:
            return False
        jax.block_until_ready(state)
        self.close()
        return True

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
