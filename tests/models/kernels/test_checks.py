"""The check of attention kernels: it holds for right ones, and notices wrong ones.

They run interpreted.
"""

import functools

import jax
import numpy as np
import pytest

from transformer_jax.models.attention import attend, dot_product_attention
from transformer_jax.models.kernels import choose
from transformer_jax.models.kernels.checks import compare_kernels
from transformer_jax.models.kernels.difference import TOLERANCES


def model(width):
    return {"attention_implementation": "auto", "head_dim": width, "value_dim": width}


def compared(model):
    return list(compare_kernels(model, dot_product_attention))


# Right kernels take half a minute. The test of the choice below also has a right one,
# and test_short.py and test_accelerators.py compare the kernels with the reference.
@pytest.mark.parametrize("right", [pytest.param(True, marks=pytest.mark.slow), False])
def test_kernels_of_the_platform_are_compared_with_the_reference(right, monkeypatch):
    """As if this were a TPU. A wrong kernel forgets the mask."""

    def interpreted(kernel):
        return lambda *inputs, mask, **options: kernel(
            *inputs, mask=mask if right else None, interpret=True, **options
        )

    kernels = tuple(
        kernel._replace(function=interpreted(kernel.function))
        for kernel in choose.KERNELS["tpu"]
    )
    monkeypatch.setitem(choose.KERNELS, "cpu", kernels)
    rows = compared(model(64))
    names = [
        f"attention: {name} vs. einsum, {dtype}"
        for name in ("short", "splash")
        for dtype in TOLERANCES
    ]
    assert [name for name, _, _ in rows] == names
    assert [difference <= allowed for _, difference, allowed in rows] == [right] * 4


def test_kernels_that_do_not_run_here_or_not_with_these_heads(monkeypatch):
    """cuDNN supports no float32, and this machine has no GPU. CPUs have no kernels."""
    assert compared(model(64)) == []
    monkeypatch.setitem(choose.KERNELS, "cpu", choose.KERNELS["gpu"])
    assert compared(model(64)) == [
        ("attention: cudnn vs. einsum, bfloat16", None, 0.02)
    ]
    assert compared(model(12)) == []
    assert compared({"d_model": 64}) == []  # a recurrent model


@pytest.mark.parametrize("right", [True, False])
def test_auto_takes_the_short_kernel_only_if_its_check_passes(
    right, monkeypatch, caplog
):
    """As if this were a TPU. The check runs while a program is traced."""
    calls = []

    def kernel(*inputs, mask, dtype, **dropping):
        calls.append(mask)
        output = dot_product_attention(
            *inputs, mask=mask.whole(inputs[0].shape[1], inputs[1].shape[1]), **dropping
        )
        return output if right else output + 0.1

    monkeypatch.setitem(
        choose.KERNELS, "cpu", (choose.SHORT._replace(function=kernel),)
    )
    choose._is_right.cache_clear()
    query = np.random.default_rng(0).normal(size=(1, 17, 2, 64)).astype(np.float32)
    with caplog.at_level("WARNING"):
        output, weights = jax.jit(functools.partial(attend, how="auto"))(
            query, query, query
        )
    choose._log_once.cache_clear()
    choose._is_right.cache_clear()
    assert (weights is None) == right
    assert len(calls) == 1 + right  # the first is the check's
    assert ("short is not used: it differs from the equation" in caplog.text) != right
    expected = dot_product_attention(query, query, query)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
