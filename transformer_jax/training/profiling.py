"""Peak FLOP/s and memory of the devices, and profiles of training steps."""

import time

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax.training import processes

# Published peak rates of dense matrix products in TFLOP/s per JAX device, (bfloat16,
# float32), by `device_kind`. NVIDIA's tables list rates with 2:4 sparsity; the values
# here are half of those. The float32 values assume JAX's default precision of float32
# products: one bfloat16 pass on TPUs, TF32 on GPUs. With a higher
# jax_default_matmul_precision, the utilization relative to these peaks is too low.
# Names must match exactly, because a slice of a GPU (MIG) or an NVL card has a
# different peak.
PEAKS = {
    "TPU v4": (275, 275),  # https://docs.cloud.google.com/tpu/docs/v4
    "TPU v5 lite": (197, 197),  # v5e: https://docs.cloud.google.com/tpu/docs/v5e
    "TPU v5e": (197, 197),
    "TPU v5": (459, 459),  # v5p: https://docs.cloud.google.com/tpu/docs/v5p
    "TPU v5p": (459, 459),
    "TPU v6 lite": (918, 918),  # v6e: https://docs.cloud.google.com/tpu/docs/v6e
    "TPU v6e": (918, 918),
    # 2,307 per chip; its two TensorCores are two devices:
    # https://docs.cloud.google.com/tpu/docs/tpu7x
    "TPU7x": (2307 / 2, 2307 / 2),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-40GB": (312, 156),
    "NVIDIA A100-SXM4-80GB": (312, 156),
    "NVIDIA A100-PCIE-40GB": (312, 156),
    "NVIDIA A100 80GB PCIe": (312, 156),
    # With sparsity, 1,979 and 989 for SXM, 1,513 and 756 for PCIe:
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    "NVIDIA H100 80GB HBM3": (989.5, 494.5),
    "NVIDIA H100 PCIe": (756.5, 378),
    # same as H100 SXM: https://www.nvidia.com/en-us/data-center/h200
    "NVIDIA H200": (989.5, 494.5),
    # 4,500 and 2,200 with sparsity (HGX):
    # https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
    "NVIDIA B200": (2250, 1100),
}


def peak_flops(dtype: str) -> tuple[str, float]:
    """Return the name of the utilization metric, and the peak FLOP/s of all devices
    together.

    The name is "mfu" for the published peak (`PEAKS`). On CPUs and other devices, the
    rate of large matrix products is measured instead, and the name is
    "matmul_utilization".
    """
    published = PEAKS.get(jax.devices()[0].device_kind)
    if published is not None and dtype in ("bfloat16", "float32"):
        return "mfu", published[dtype == "float32"] * 1e12 * jax.device_count()
    return "matmul_utilization", _measured_peak(dtype)


def matrix_rate(dtype: str, n: int, chain: int) -> float:
    """Return the FLOP/s of n × n matrix products on one device: the best of five
    calls with `chain` products each.
    """
    x = jnp.ones((n, n), dtype)
    a = jnp.full((n, n), 1 / n, dtype)  # x a = x
    products = jax.jit(lambda x, a: jax.lax.fori_loop(0, chain, lambda _, x: x @ a, x))
    products(x, a).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        products(x, a).block_until_ready()
        return time.perf_counter() - start

    return chain * 2 * n**3 / min(once() for _ in range(5))


def _measured_peak(dtype: str) -> float:
    """Measure one device and scale to all.

    The CPU devices of a host share its cores and count as one.
    """
    if jax.devices()[0].platform == "cpu":
        return matrix_rate(dtype, 2048, 1) * jax.process_count()
    return matrix_rate(dtype, 8192, 20) * jax.device_count()


def device_memory() -> dict[str, float]:
    """Return {"device_memory_gb": peak memory of the first device}, or {} where
    devices do not report it (CPUs).
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    return (
        {"device_memory_gb": stats["peak_bytes_in_use"] / 1e9}
        if "peak_bytes_in_use" in stats
        else {}
    )


class Trace:
    """A profile of the steps in `steps`, written to `directory` by the first process.

    View it with XProf or on ui.perfetto.dev.
    """

    def __init__(self, directory: epath.PathLike, steps: range):
        self._directory = str(directory)
        self._running = False
        self._steps = steps if processes.is_first() else range(0)

    def before(self, step: int, state: object) -> bool:
        """Wait for `state` and start the trace if this is its first step.

        Return True if it was started.
        """
        if step != self._steps.start or not self._steps:
            return False
        jax.block_until_ready(state)
        jax.profiler.start_trace(self._directory)
        self._running = True
        return True

    def after(self, step: int, state: object) -> bool:
        """Wait for `state` and end the trace if this is its last step.

        Return True if it was ended.
        """
        if not self._running or step + 1 < self._steps.stop:
            return False
        jax.block_until_ready(state)
        self.close()
        return True

    def close(self) -> None:
        """Stop the trace, if it runs."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
