"""Products and their derivatives in both modes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from transformer_jax.models.kernels import platforms
from transformer_jax.models.kernels.products import plus_bias, product


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


TRANSFORMER = [
    "abi,ij->abj",
    "BTD,VD->BTV",
    "BTNH,BSNH->BNTS",
    "BNTS,BSNH->BTNH",
    "abij,ijk->abk",
    "BTNH,RH->BNTR",
]
# a single row, Z, as in generation
SINGLE = ["Zi,ij->Zj", "BZNH,BSNH->BNZS", "BNZS,BSNH->BZNH"]
RECURRENT = ["BTSA,A->BTS", "BTD,BSD->BTS", "BTC,BSC->BTS", "BTD,DC->BTC", "BTD,D->BT"]
SPECS = TRANSFORMER + SINGLE + RECURRENT


def operands(spec):
    sizes = dict(
        zip(
            "abijkBTSNHDVACRZ",
            (2, 3, 5, 7, 11, 2, 3, 4, 5, 6, 7, 8, 9, 3, 5, 1),
            strict=True,
        )
    )
    *inputs, out = spec.replace("->", ",").split(",")
    return [
        normal(*(sizes[c] for c in axes), seed=i)
        for i, axes in enumerate((*inputs, out))
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_products_and_its_gradients(spec):
    a, b, g = operands(spec)

    def total(multiply):
        return lambda a, b: (multiply(a, b) * g).sum()

    def exact(a, b):
        return jnp.einsum(spec, a, b, precision="highest")

    expected = jax.jit(jax.grad(total(exact), (0, 1)))(a, b)
    found = jax.jit(jax.grad(total(lambda a, b: product(spec, a, b)), (0, 1)))(a, b)
    for x, y in zip(found, expected, strict=True):
        assert oracle.relative(x, np.float64(y)) <= 1e-5


@pytest.mark.parametrize("spec", SPECS)
def test_bfloat16_products_rounds_operands_and_cotangents_and_nothing_else(spec):
    a, b, g = operands(spec)
    half = [np.float64(np.asarray(x, jnp.bfloat16)) for x in (a, b, g)]
    y, pull = jax.vjp(lambda a, b: product(spec, a, b, "bfloat16"), a, b)
    assert y.dtype == jnp.float32
    assert oracle.relative(y, np.einsum(spec, *half[:2])) <= 1e-6
    *inputs, out = spec.replace("->", ",").split(",")
    da, db = pull(jnp.asarray(g))
    assert da.dtype == db.dtype == jnp.float32
    assert (
        oracle.relative(
            da, np.einsum(f"{out},{inputs[1]}->{inputs[0]}", half[2], half[1])
        )
        <= 1e-6
    )
    assert (
        oracle.relative(
            db, np.einsum(f"{out},{inputs[0]}->{inputs[1]}", half[2], half[0])
        )
        <= 1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS)
def test_products_and_their_gradients_have_the_types_that_are_asked_for(spec, dtype):
    a, b, g = operands(spec)
    exact, pull = jax.vjp(lambda a, b: product(spec, a, b, dtype), a, b)
    rounded, pull_rounded = jax.vjp(
        lambda a, b: product(spec, a, b, dtype, output_dtype="bfloat16"),
        jnp.asarray(a, jnp.bfloat16),
        b,
    )
    if dtype == "bfloat16":  # otherwise `a` differs
        np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))
    (da, db), (da_rounded, db_rounded) = (
        pull(jnp.asarray(g)),
        pull_rounded(jnp.asarray(g, jnp.bfloat16)),
    )
    assert (rounded.dtype, da_rounded.dtype, db_rounded.dtype) == (
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
    )
    if dtype == "bfloat16":
        np.testing.assert_array_equal(da_rounded, da.astype(jnp.bfloat16))
        np.testing.assert_array_equal(db_rounded, db)


def test_products_on_gpus_write_the_type_that_is_asked_for():
    """If a product in float32 were converted, cuBLAS would write float32, and
    another kernel would round it.
    """
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 3, 5), (5, 7)))

    def loss(a, b):
        return (
            product("abi,ij->abj", a, b, "bfloat16", output_dtype="bfloat16")
            .astype(jnp.float32)
            .sum()
        )

    lowered = (
        jax.jit(jax.value_and_grad(loss, (0, 1)))
        .trace(a, b)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    results = re.findall(r"stablehlo.dot_general.*-> tensor<\S+x(\w+)>", lowered)
    assert results == ["bf16"] * 3


def test_a_single_row_in_bfloat16_converts_no_matrix():
    """Converted to float32, it took two and a half times as long to write a token."""
    row, matrix = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 48), (48, 64))
    )
    compiled = (
        jax.jit(lambda a, b: product("Zi,ij->Zj", a, b, "bfloat16"))
        .lower(row, matrix)
        .compile()
        .as_text()
    )
    assert "bf16[48,64]" in compiled
    assert "f32[48,64]" not in compiled


@pytest.mark.parametrize("spec", SPECS)
def test_tangents_and_second_derivatives(spec):
    """Test forward mode, and forward over reverse, in float32, with both factors
    changing.
    """
    a, b, g = operands(spec)
    moved = normal(*a.shape, seed=3), normal(*b.shape, seed=4)
    _, tangent = jax.jvp(lambda a, b: product(spec, a, b), (a, b), moved)
    expected = np.einsum(spec, *map(np.float64, (moved[0], b))) + np.einsum(
        spec, *map(np.float64, (a, moved[1]))
    )
    assert oracle.relative(tangent, expected) <= 1e-5

    def gradient(multiply):
        return jax.grad(lambda a, b: (multiply(spec, a, b) ** 2 * g).sum(), (0, 1))

    _, found = jax.jvp(gradient(product), (a, b), moved)
    _, expected = jax.jvp(
        gradient(lambda *x: jnp.einsum(*x, precision="highest")), (a, b), moved
    )
    for x, y in zip(found, expected, strict=True):
        assert oracle.relative(x, np.float64(y)) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
@pytest.mark.parametrize("spec", ["abi,ij->abj", "BTNH,BSNH->BNTS"])
def test_a_vectorized_product_is_a_loop_over_products(spec, axes, dtype):
    a, b, _ = operands(spec)
    a, b = (
        x if axis is None else np.stack([x, -2 * x, x + 1], axis)
        for x, axis in zip((a, b), axes, strict=True)
    )
    found = jax.jit(jax.vmap(lambda a, b: product(spec, a, b, dtype), axes))(a, b)
    for i in range(3):
        one = (
            x if axis is None else np.take(x, i, axis)
            for x, axis in zip((a, b), axes, strict=True)
        )
        np.testing.assert_allclose(
            found[i], product(spec, *one, dtype), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [((), (5,)), ((2,), (5,)), ((3, 2), (5,)), ((3, 2, 7), (5,)), ((3, 2), (7, 5))],
)
def test_bias_and_its_gradient(rows, columns, platform, monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    shape = rows + columns
    x, g, bias = (
        normal(*shape, seed=1),
        normal(*shape, seed=2),
        normal(*columns, seed=3),
    )
    y, pull = jax.vjp(plus_bias, x, bias)
    np.testing.assert_array_equal(y, x + bias)
    dx, dbias = pull(g)
    np.testing.assert_array_equal(dx, g)
    assert (
        oracle.relative(dbias, np.float64(g).reshape(-1, *columns).sum(axis=0)) <= 1e-6
    )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError,
        match=r"abi,ij->abj does not fit arrays of shapes \(2, 3, 5\) and \(7, 5\)",
    ):
        product("abi,ij->abj", normal(2, 3, 5), normal(7, 5))
