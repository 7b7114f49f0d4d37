"""The check of attention kernels: it holds for right ones, and notices wrong ones.

They run interpreted.
"""

import pytest

from transformer_jax.models.attention import dot_product_attention
from transformer_jax.models.kernels import choose
from transformer_jax.models.kernels.checks import TOLERANCES, compare_kernels


def model(width):
    return {"attention_implementation": "auto", "head_dim": width, "value_dim": width}


def compared(model):
    return list(compare_kernels(model, dot_product_attention))


@pytest.mark.parametrize("right", [True, False])
def test_kernels_of_the_platform_are_compared_with_the_reference(right, monkeypatch):
    """As if this were a TPU. A wrong kernel forgets the mask."""

    def interpreted(kernel):
        return lambda *inputs, mask, **options: kernel(
            *inputs, mask=mask if right else None, interpret=True, **options
        )

    monkeypatch.setitem(choose.KERNELS, "cpu", choose.KERNELS["tpu"])
    for name in ("short", "splash"):
        monkeypatch.setitem(choose.FUNCTIONS, name, interpreted(choose.FUNCTIONS[name]))
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
