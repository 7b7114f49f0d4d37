"""Kernels for accelerators against the reference, which is tested against NumPy:
values, gradients, devices.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernels import (
    MASKS,
    VALID,
    B,
    H,
    N,
    S,
    T,
    W,
    apart,
    normal,
    reference,
    some_inputs,
    with_gradients,
)
from helpers.processes import on_devices
from transformer_jax.models import masks
from transformer_jax.models.kernels import accelerators
from transformer_jax.models.kernels.accelerators import (
    cudnn_attention,
    splash_attention,
)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "width"),
    [*((kind, N, N, H) for kind in MASKS), ("packed", 4, 2, H), ("causal", N, N, 128)],
)
def test_splash_attention_is_the_reference(kind, heads, kv_heads, width):
    """The lengths are no multiples of 128. Heads of 128 features have another
    layout.
    """
    keys, mask = MASKS[kind]
    inputs, cotangent = (
        some_inputs(keys, heads, kv_heads, width),
        normal(B, T, heads, W, seed=2),
    )
    attend = functools.partial(splash_attention, mask=mask, interpret=True)
    found = jax.jit(lambda: with_gradients(attend, inputs, cotangent))()
    expected = jax.jit(
        lambda: with_gradients(
            functools.partial(reference, mask=mask), inputs, cotangent
        )
    )()
    assert apart(expected, found) < 2e-6
    alone = (
        ~np.broadcast_to(mask.part(0, T, 0, keys), (B, 1, T, keys))[:, 0].any(axis=-1)
        if mask
        else np.array(False)
    )
    assert alone.any() == (kind in ("causal padding", "segments", "packed"))
    # queries without keys
    np.testing.assert_array_equal(np.asarray(found[0])[alone], 0)
    np.testing.assert_array_equal(np.asarray(found[1])[alone], 0)


def test_splash_attention_rounds_its_inputs_to_bfloat16():
    inputs = some_inputs(T)
    output = splash_attention(
        *inputs, mask=masks.CAUSAL, dtype="bfloat16", interpret=True
    )
    assert output.dtype == jnp.float32
    expected = reference(*inputs, mask=masks.CAUSAL)
    assert 1e-4 < apart([expected], [output]) < 1e-2


def test_blocks_are_few_equal_and_at_most_512_positions():
    sizes = {
        1: 128,
        128: 128,
        150: 256,
        512: 512,
        513: 384,
        1100: 384,
        1408: 512,
        2048: 512,
    }
    assert {length: accelerators._block(length) for length in sizes} == sizes


@pytest.mark.parametrize(
    ("kernel", "share", "dropping"),
    [
        ("splash", "1x2x128x8", ""),
        pytest.param("short", "1x128x128", "", marks=pytest.mark.slow),
        pytest.param(
            "short",
            "1x128x128",
            ", dropout_rate=0.4, dropout_key=jax.random.key(2)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eight_devices_compute_what_one_does(kernel, share, dropping):
    """Rows are divided over data and fsdp, heads over tensor; what cannot be divided is
    computed on each device.

    On 2 × 2 × 2, the last two cases have key-value heads and rows that cannot be
    divided.
    """
    cases = [(4, 4, 4), (4, 4, 2), (4, 4, 1), (3, 2, 2)]
    programs = f"""
import json
import jax
import jax.numpy as jnp
from transformer_jax.models import masks
from transformer_jax.models.kernels.accelerators import {kernel}_attention
from transformer_jax.training.sharding import MeshConfig, make_mesh, on_mesh, replicated

mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape) + shape[2]), shape)

def program(rows, heads, kv_heads):
    query = normal(rows, 128, heads, 8)
    key = value = normal(rows, 128, kv_heads, 8)
    valid = jnp.arange(128)[None] < jnp.arange(128, 128 - 30 * rows, -30)[:, None]

    def attend(query, key, value):
        mask = masks.CAUSAL & masks.padding(valid)
        attended = {kernel}_attention(
            query, key, value, mask=mask, interpret=True{dropping}
        )
        return jnp.sin(attended).sum()

    inputs = jax.device_put((query, key, value), replicated(mesh))
    return jax.value_and_grad(attend, (0, 1, 2)), inputs

worst = []
for case in {cases}:
    attend, inputs = program(*case)
    expected = jax.jit(attend)(*inputs)
    found = on_mesh(attend, mesh)(*inputs)
    apart = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(a).max()), expected, found
    )
    worst.append(max(jax.tree.leaves(apart)))
text = on_mesh(program(4, 4, 4)[0], mesh).lower(*program(4, 4, 4)[1]).as_text()
print(json.dumps([worst, text.count("tensor<{share}xf32>") > 0]))
"""
    worst, divided = json.loads(on_devices(8, programs))
    assert len(worst) == len(cases)
    assert max(worst) < 2e-6
    # each device has one row, and two heads; for the short kernel, both fit one block
    # of 128 columns
    assert divided


@pytest.mark.parametrize("kind", MASKS)
def test_cudnn_attention_is_the_reference_if_cudnn_computes_what_jax_says(
    kind, monkeypatch
):
    """The kernel itself needs a GPU: JAX's own implementation takes its place, with
    what the kernel is given.
    """
    keys, mask = MASKS[kind]
    keys -= 1  # an odd number, as the first of two kinds of lengths
    mask = None if mask is None else cut(mask, T - 1, keys)
    query, key, value = (
        x[:, :length]
        for x, length in zip(some_inputs(S), (T - 1, keys, keys), strict=True)
    )
    value = value[..., :H]
    library, given = jax.nn.dot_product_attention, []

    def attend(*arrays, implementation, **options):
        given.append((implementation, options["is_causal"], options["mask"]))
        assert {x.dtype for x in arrays} == {jnp.dtype("float32")}
        return library(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    cotangent = normal(B, T - 1, N, H, seed=2)
    attend_here = functools.partial(cudnn_attention, mask=mask, dtype="float32")
    found = jax.jit(
        lambda: with_gradients(attend_here, (query, key, value), cotangent)
    )()
    expected = jax.jit(
        lambda: with_gradients(
            functools.partial(reference, mask=mask), (query, key, value), cotangent
        )
    )()
    assert apart(expected, found) < 2e-6
    ((implementation, causal, allowed),) = given
    assert (implementation, causal) == ("cudnn", mask is not None and mask.causal)
    assert (allowed is None) == (kind in ("none", "causal"))
    assert allowed is None or (
        allowed.shape[:2] == (B, 1)
        and not allowed.shape[2] % 2
        and not allowed.shape[3] % 2
    )


def cut(mask, length, key_length):
    """Return the mask of the first `length` queries and `key_length` keys."""
    queries, keys = mask.query_segments, mask.key_segments
    queries, keys = (
        None if queries is None else queries[:, :length],
        None if keys is None else keys[:, :key_length],
    )
    return masks.Mask(keys, queries, mask.causal)


@pytest.mark.parametrize(
    ("mask", "name"),
    [(masks.CAUSAL, ""), (masks.padding(jnp.asarray(VALID)), "ScaleBias")],
)
def test_cudnn_attention_lowers_for_gpus(mask, name, monkeypatch):
    """Nothing is compiled, because that needs a GPU. The version of cuDNN is made
    up.
    """
    cudnn = pytest.importorskip(
        "jax._src.cudnn.fused_attention_stablehlo", reason="this JAX has no such module"
    )
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    heads = [jax.ShapeDtypeStruct((B, S, heads, H), jnp.float32) for heads in (4, 2, 2)]
    gradient = jax.grad(
        lambda *inputs: cudnn_attention(*inputs, mask=mask).sum(), (0, 1, 2)
    )
    text = jax.jit(gradient).trace(*heads).lower(lowering_platforms=("cuda",)).as_text()
    assert (
        text.count(f"__cudnn$fmha{name}Softmax(")
        == text.count(f"__cudnn$fmha{name}SoftmaxBackward(")
        == 1
    )
