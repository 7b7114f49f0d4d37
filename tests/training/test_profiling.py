"""Peak rates of devices, and traces of chosen steps."""

import itertools

import jax.numpy as jnp
import pytest

from transformer_jax.training import profiling

PEAK_FLOPS = profiling.peak_flops  # a fixture of conftest.py replaces it in all tests


def test_matrix_rate_is_that_of_products(monkeypatch):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(clock))
    assert profiling.matrix_rate("float32", n=128, chain=3) == 3 * 2 * 128**3 / 0.5


class Device:
    def __init__(self, kind, platform="gpu"):
        self.device_kind, self.platform = kind, platform


@pytest.mark.parametrize(
    ("kind", "dtype", "count", "peak"),
    [
        ("TPU v4", "bfloat16", 1, 275e12),
        ("TPU v5 lite", "float32", 8, 8 * 197e12),
        ("TPU v5", "bfloat16", 2, 918e12),
        ("TPU v6 lite", "bfloat16", 1, 918e12),
        ("TPU7x", "bfloat16", 2, 2307e12),  # the two devices of one chip
        ("NVIDIA A100-SXM4-80GB", "float32", 1, 156e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 8, 8 * 989.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 1, 756.5e12),
        ("NVIDIA H200", "float32", 1, 494.5e12),
        ("NVIDIA B200", "bfloat16", 1, 2250e12),
    ],
)
def test_mfu_is_a_share_of_the_published_peak(kind, dtype, count, peak, monkeypatch):
    monkeypatch.setattr(profiling.jax, "devices", lambda: [Device(kind)] * count)
    monkeypatch.setattr(profiling.jax, "device_count", lambda: count)
    monkeypatch.setattr(profiling, "matrix_rate", None)
    assert PEAK_FLOPS(dtype) == ("mfu", pytest.approx(peak))


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        (Device("cpu", "cpu"), "float32", 2048 + 1),
        (Device("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), "bfloat16", 4 * (8192 + 20)),
        (Device("TPU v9", "tpu"), "bfloat16", 4 * (8192 + 20)),
        (Device("NVIDIA H200"), "float64", 4 * (8192 + 20)),
    ],
)
def test_other_devices_are_measured_and_cpu_devices_share_a_host(
    device, dtype, peak, monkeypatch
):
    monkeypatch.setattr(profiling.jax, "devices", lambda: [device] * 4)
    monkeypatch.setattr(profiling.jax, "device_count", lambda: 4)
    monkeypatch.setattr(profiling, "matrix_rate", lambda dtype, n, chain: n + chain)
    assert PEAK_FLOPS(dtype) == ("matmul_utilization", peak)


def test_a_trace_of_chosen_steps(tmp_path):
    trace = profiling.Trace(tmp_path, range(2, 4))
    for step in range(1, 6):
        assert trace.before(step, jnp.ones(3)) == (step == 2)
        assert trace._running == (step in (2, 3))
        assert trace.after(step, jnp.ones(3) + step) == (step == 3)
    assert not trace._running
    assert list(tmp_path.rglob("*.xplane.pb"))
