"""Activations against formulas, dropout against statistics, initializers against
bounds.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from jax.extend.core import jaxprs_in_params

from helpers import oracle
from transformer_jax.models.kernels import platforms
from transformer_jax.models.kernels.products import product
from transformer_jax.models.layers import (
    ACTIVATIONS,
    FEED_FORWARDS,
    NORM_TYPES,
    Dropout,
    Embedding,
    FeedForward,
    Head,
    LayerNorm,
    Linear,
    OutputLayer,
    Residual,
    RMSNorm,
    dropout,
    mask_padding,
    padded_vocab_size,
)

B, T, D, F, V = 2, 3, 5, 7, 11


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def randomized(module, *args, seed=0):
    """Return variables for a module, none of them at its initial value."""
    shapes = nn.unbox(
        jax.eval_shape(lambda key: module.init(key, *args), jax.random.key(0))
    )
    return {"params": oracle.randomized(shapes["params"], seed)}


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_dropout_drops_at_the_rate_and_keeps_the_mean(rate, width):
    rows = 30011
    x = np.abs(normal(rows, width)) + 1
    y = np.asarray(dropout(x, rate, jax.random.key(3)))
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / (1 - rate), rtol=1e-6)
    # Allow five standard deviations of a binomial, for all of x and for each of its
    # columns.
    for part in (kept, *kept.T):
        assert abs(part.mean() - (1 - rate)) < 5 * np.sqrt(
            rate * (1 - rate) / part.size
        )
    deviation = np.sqrt((x**2).mean() * rate / (1 - rate) / x.size)
    assert abs(y.mean() - x.mean()) < 5 * deviation


def test_dropout_treats_neighbours_independently():
    dropped = (
        np.asarray(dropout(np.ones((30011, 7), np.float32), 0.5, jax.random.key(4)))
        == 0
    )
    correlation = np.corrcoef(dropped.T) - np.eye(7)
    assert np.abs(correlation).max() < 5 / np.sqrt(30011)
    assert abs(
        np.corrcoef(dropped[1:].ravel(), dropped[:-1].ravel())[0, 1]
    ) < 5 / np.sqrt(30010 * 7)


def test_dropout_is_a_function_of_its_key():
    x, key = normal(B, T, 31), jax.random.key(0)
    np.testing.assert_array_equal(dropout(x, 0.5, key), dropout(x, 0.5, key))
    assert (dropout(x, 0.5, key) != dropout(x, 0.5, jax.random.key(1))).any()
    np.testing.assert_array_equal(dropout(x, 0.0, key), x)
    gradient = jax.grad(lambda x: dropout(x, 0.25, key).sum())(x)
    np.testing.assert_array_equal(
        gradient, np.where(dropout(x, 0.25, key) == 0, 0, np.float32(4 / 3))
    )
    assert dropout(jnp.asarray(x, jnp.bfloat16), 0.5, key).dtype == jnp.bfloat16


def test_a_parameter_of_another_shape_is_refused():
    x = jnp.zeros((B, D))
    wide = Linear("BD,DF->BF", (D, F), ("embed", "mlp"))
    variables = wide.init(jax.random.key(0), x)
    narrow = Linear("BD,DF->BF", (D, F - 1), ("embed", "mlp"))
    with pytest.raises(ScopeParamShapeError, match=r"\(5, 6\).*\(5, 7\)"):
        narrow.apply(variables, x)


def test_the_dropout_module_acts_when_given_a_key():
    x, rngs = normal(B, T, 31), {"dropout": jax.random.key(0)}
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, rngs=rngs), x)
    y = np.asarray(Dropout(0.5).apply({}, x, rngs=rngs))
    np.testing.assert_array_equal(y, np.where(y == 0, 0, 2 * x))
    assert 0 < (y == 0).sum() < y.size


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name):
    x = np.linspace(-6, 6, 121, dtype=np.float32)
    expected = oracle.ACTIVATIONS[name](np.float64(x))
    np.testing.assert_allclose(ACTIVATIONS[name](x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("kind", FEED_FORWARDS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_feed_forward_is_the_equation(name, kind, use_bias):
    module, x = FeedForward(D, F, name, kind=kind, use_bias=use_bias), normal(B, T, D)
    variables = randomized(module, x)
    assert set(variables["params"]) == {"inner", "outer"} | (
        {"gate"} if kind == "gated" else set()
    )
    assert all(
        ("bias" in linear) == use_bias for linear in variables["params"].values()
    )
    expected = oracle.feed_forward(variables["params"], x, name)
    assert oracle.relative(module.apply(variables, x), expected) <= 1e-5


def test_swiglu_computed_by_hand():
    """With x = 2, W = 0.5, V = 3 and W₂ = -1, the output is -silu(1) · 6."""
    kernels = {
        name: {"kernel": jnp.full((1, 1), w)}
        for name, w in (("gate", 0.5), ("inner", 3.0), ("outer", -1.0))
    }
    module = FeedForward(1, 1, "silu", kind="gated", use_bias=False)
    found = module.apply({"params": kernels}, jnp.full((1, 1, 1), 2.0))
    np.testing.assert_allclose(found, [[[-6 / (1 + np.exp(-1))]]], rtol=1e-6)


def test_feed_forward_drops_hidden_units_when_given_a_key():
    module, x, rngs = (
        FeedForward(D, F, dropout_rate=0.5),
        normal(B, T, D),
        {"dropout": jax.random.key(0)},
    )
    variables = randomized(module, x)
    plain = FeedForward(D, F).apply(variables, x)
    np.testing.assert_array_equal(module.apply(variables, x), plain)
    dropped = module.apply(variables, x, rngs=rngs)
    assert oracle.relative(dropped, plain) > 0.01
    # Hidden units are dropped, not outputs: an output is still a sum over the units
    # that are kept, plus the bias.
    assert (dropped != 0).all()


def test_layer_norm_is_the_equation():
    module, x = LayerNorm(0.01), 3 * normal(B, T, D) + 2
    variables = randomized(module, x)
    expected = oracle.layer_norm(variables["params"], x, 0.01)
    assert oracle.relative(module.apply(variables, x), expected) <= 1e-5


def test_layer_norm_gives_zero_mean_and_unit_variance_over_the_features_of_a_position():
    x = 3 * normal(B, T, 101) + 2
    y = np.asarray(
        LayerNorm(1e-6).apply(
            {"params": {"scale": jnp.ones(101), "bias": jnp.zeros(101)}}, x
        )
    )
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-5)


def test_rms_norm_is_the_equation():
    module, x = RMSNorm(0.01), 3 * normal(B, T, D) + 2
    variables = randomized(module, x)
    assert set(variables["params"]) == {"scale"}
    assert (
        oracle.relative(
            module.apply(variables, x), oracle.rms_norm(variables["params"], x, 0.01)
        )
        <= 1e-5
    )
    # √(26 / 2 + 3) = 4
    found = RMSNorm(3.0).apply(
        {"params": {"scale": jnp.ones(2)}}, jnp.asarray([[[1.0, -5.0]]])
    )
    np.testing.assert_allclose(found, [[[0.25, -1.25]]], rtol=1e-6)


def test_the_statistics_of_rms_norm_are_float32():
    """In bfloat16, which has 8 bits of precision, the squares of 255 ones and of 16
    would sum to 512.
    """
    x = jnp.ones((1, 1, 256), jnp.bfloat16).at[0, 0, 0].set(16)
    found = RMSNorm(1e-6).apply({"params": {"scale": jnp.ones(256)}}, x)
    np.testing.assert_allclose(found[0, 0, 1], (256 / 511) ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_accelerators_keep_the_statistics_of_a_norm(platform, norm_type, monkeypatch):
    module, x = NORM_TYPES[norm_type](1e-6), normal(B, T, D)
    variables = randomized(module, x)
    expected = module.apply(variables, x)
    monkeypatch.setattr(platforms, "current", lambda: platform)
    found = jax.make_jaxpr(lambda x: module.apply(variables, x))(x)
    inner = [x for equation in found.eqns for x in jaxprs_in_params(equation.params)]
    equations = [*found.eqns, *(x for jaxpr in inner for x in jaxpr.eqns)]
    kept = sum(
        len(equation.invars)
        for equation in equations
        if equation.primitive.name == "optimization_barrier"
    )
    assert kept == (
        0 if platform == "cpu" else {"layer_norm": 2, "rms_norm": 1}[norm_type]
    )
    # on CPUs, `expected` was compiled as a whole, and rounds otherwise
    np.testing.assert_allclose(module.apply(variables, x), expected, rtol=0, atol=1e-6)


def check_stored(f, x, only_argument):
    """Check whether x is the only array of its size that f stores for the backward
    pass.
    """
    _, backward = jax.vjp(f, x)
    stored = [array for array in jax.tree.leaves(backward) if array.size == x.size]
    if only_argument:
        (only,) = stored
        np.testing.assert_array_equal(only, x)
    else:
        assert len(stored) > 1


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_cpus_store_only_the_argument_of_an_activation(
    platform, activation, monkeypatch
):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    x = jnp.asarray(normal(B, D))
    check_stored(ACTIVATIONS[activation], x, only_argument=platform == "cpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_cpus_store_no_array_of_the_size_of_a_norm_but_its_argument(
    platform, norm_type, monkeypatch
):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    module, x = NORM_TYPES[norm_type](1e-6), jnp.asarray(normal(B, T, D))
    variables = randomized(module, x)

    def norm(x):
        return module.apply(variables, x)

    check_stored(norm, x, only_argument=platform == "cpu")


def test_cpus_store_two_arrays_of_a_gated_network_and_compute_it_twice():
    module, x = FeedForward(D, F, "gelu", kind="gated"), jnp.asarray(normal(B, T, D))
    variables = randomized(module, x)

    def output(variables):
        return module.apply(variables, x)

    _, backward = jax.vjp(output, variables)
    hidden = [array for array in jax.tree.leaves(backward) if array.size == B * T * F]
    # both arguments, and the hidden units, for the gradient of the last map
    assert len(hidden) == 3
    gradient = jax.make_jaxpr(lambda v: jax.vjp(output, v)[1](x))(variables)
    assert str(gradient).count("= erfc ") == 2


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_accelerators_round_a_linear_map_before_the_bias_is_added(
    platform, monkeypatch
):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    dtypes = {"dtype": "bfloat16", "output_dtype": "bfloat16"}
    module = Linear("BTD,DF->BTF", (33, 17), ("embed", "mlp"), **dtypes)
    x = normal(B, 65, 33)
    variables = randomized(module, x)
    params = variables["params"]
    exact = product("abi,ij->abj", x, params["kernel"], "bfloat16")
    first = exact if platform == "cpu" else exact.astype(jnp.bfloat16)
    expected = (first + jnp.broadcast_to(params["bias"], first.shape)).astype(
        jnp.bfloat16
    )
    np.testing.assert_array_equal(module.apply(variables, x), expected)


@pytest.mark.parametrize(
    ("platform", "rounded"),
    [("cpu", False), ("tpu", False), ("gpu", True), ("cuda", True)],
)
def test_gpus_round_the_gradient_of_a_linear_map(platform, rounded, monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    module = Linear("BTD,DF->BTF", (D, F), ("embed", "mlp"), dtype="bfloat16")
    x = normal(B, T, D)
    variables = randomized(module, x)
    found = jax.grad(lambda x: (module.apply(variables, x) * normal(B, T, F)).sum())(x)
    assert (found == found.astype(jnp.bfloat16).astype(jnp.float32)).all() == rounded


def around(module, variables, x, sublayer, **kwargs):
    return nn.apply(lambda m, x: m.after(x, sublayer(m.before(x))), module)(
        variables, x, **kwargs
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_residual_is_the_equation(norm, norm_type):
    x, gain = normal(B, T, D), {"scale": 1 + 0.3 * normal(D)}
    bias = {"bias": normal(D, seed=1)} if norm_type == "layer_norm" else {}
    variables = {"params": {norm_type: gain | bias}}

    def sublayer(h):
        return h**2 - 3 * h

    output = around(Residual(norm, 0.5, 1e-6, norm_type), variables, x, sublayer)
    assert (
        oracle.relative(
            output, oracle.residual(variables["params"], x, sublayer, norm, 1e-6)
        )
        <= 1e-5
    )


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_residual_rounds_its_result_and_on_accelerators_its_sum(
    norm, platform, monkeypatch
):
    """tests/compilation/test_topologies.py tests that rounding the sum saves memory."""
    monkeypatch.setattr(platforms, "current", lambda: platform)
    x, gain = normal(64, T, D), {"scale": 1 + normal(D), "bias": normal(D, seed=1)}
    variables = {"params": {"layer_norm": gain}}
    exact, rounded = (
        around(Residual(norm, 0.0, 1e-6, dtype=dtype), variables, x, jnp.sin)
        for dtype in ("float32", "bfloat16")
    )
    if norm == "post" and platform == "tpu":
        total = jnp.asarray(x + np.sin(x), jnp.bfloat16).astype(jnp.float32)
        exact = LayerNorm(1e-6).apply({"params": gain}, total)
    assert rounded.dtype == jnp.bfloat16
    assert (rounded == exact.astype(jnp.bfloat16)).mean() > 0.99


def test_dropout_acts_on_the_sublayer_and_not_on_the_residual():
    x, rngs = 5 + normal(B, T, 31), {"dropout": jax.random.key(0)}
    variables = {
        "params": {"layer_norm": {"scale": jnp.ones(31), "bias": jnp.zeros(31)}}
    }
    pre = np.asarray(
        around(Residual("pre", 0.5, 1e-6), variables, x, lambda h: 0 * h + 3, rngs=rngs)
        - x
    )
    zero = np.abs(pre) < 1e-5
    assert 0 < zero.sum() < zero.size
    np.testing.assert_allclose(pre[~zero], 6, rtol=1e-5)
    post = np.asarray(
        around(
            Residual("post", 0.5, 1e-6), variables, x, lambda h: 0 * h + 3, rngs=rngs
        )
    )
    expected = oracle.layer_norm(
        variables["params"]["layer_norm"], x + np.where(zero, 0, 6), 1e-6
    )
    assert oracle.relative(post, expected) <= 1e-5


@pytest.mark.parametrize(("multiple", "padded"), [(1, 11), (8, 16), (11, 11)])
def test_embedding(multiple, padded):
    assert padded_vocab_size(V, multiple) == padded
    module, ids, x = (
        Embedding(V, D, multiple),
        np.array([[0, 3, 10], [7, 3, 1]]),
        normal(B, T, D),
    )
    initial = nn.unbox(module.init(jax.random.key(0), ids))["params"]["table"]
    assert initial.shape == (padded, D)
    assert (initial[V:] == 0).all()
    assert (initial[:V] != 0).all()
    variables = randomized(module, ids)
    table = variables["params"]["table"]
    np.testing.assert_allclose(
        module.apply(variables, ids), table[ids] * np.sqrt(D), rtol=1e-6
    )
    logits = module.apply(variables, method=Embedding.head)(x)
    assert logits.shape == (B, T, padded)
    assert oracle.relative(logits[..., :V], np.float64(x) @ table[:V].T) <= 1e-5
    probabilities = jax.nn.softmax(logits)
    assert (probabilities[..., V:] == 0).all()
    np.testing.assert_allclose(probabilities[..., :V].sum(axis=-1), 1, rtol=1e-6)


def test_logits_without_padding_are_left_alone():
    logits = normal(B, T, V)
    assert mask_padding(logits, V) is logits


def test_embedding_initializers():
    key, ids, vocab, width = jax.random.key(0), np.zeros((1, 1), int), 503, 101

    def table(initializer, scale=True):
        return nn.unbox(Embedding(vocab, width, 8, initializer, scale).init(key, ids))[
            "params"
        ]["table"][:vocab]

    np.testing.assert_allclose(table("normal").std(), width**-0.5, rtol=0.02)
    assert np.abs(table("normal")).max() > 3 * width**-0.5
    limit = np.sqrt(6 / (vocab + width))
    assert 0.99 * limit < np.abs(table("xavier_uniform")).max() <= limit
    np.testing.assert_allclose(
        table("xavier_uniform").std(), limit / np.sqrt(3), rtol=0.02
    )
    np.testing.assert_allclose(table("normal", scale=False).std(), 0.02, rtol=0.02)
    for scale in (False, True):
        assert 0.0399 < np.abs(table("truncated_normal", scale)).max() <= 0.04


def test_an_embedding_without_scale():
    module, ids = Embedding(V, D, scale=False), np.array([[0, 3, 10], [7, 3, 1]])
    variables = randomized(module, ids)
    np.testing.assert_array_equal(
        module.apply(variables, ids), variables["params"]["table"][ids]
    )


@pytest.mark.parametrize(
    ("initializer", "deviation", "largest"),
    [("normal", 0.02, 1), ("truncated_normal", 0.0176, 0.04)],
)
def test_linear_maps_and_output_layers_that_start_small(
    initializer, deviation, largest
):
    linear = Linear(
        "BNH,NHD->BD", (53, 7, 61), ("a", "b", "c"), initializer=initializer
    )
    output = OutputLayer(211, 101, initializer=initializer)
    kernel = nn.unbox(linear.init(jax.random.key(0), np.zeros((1, 53, 7), np.float32)))[
        "params"
    ]["kernel"]
    table = nn.unbox(output.init(jax.random.key(0), method=OutputLayer.head))["params"][
        "table"
    ]
    for matrix in (kernel, table):
        np.testing.assert_allclose(matrix.std(), deviation, rtol=0.03)
        assert 0.0395 < np.abs(matrix).max() <= largest


@pytest.mark.parametrize(
    ("spec", "shape", "num_inputs", "fan_in", "fan_out"),
    [
        ("BD,DE->BE", (53, 61), 1, 53, 61),
        ("...D,DE->...E", (53, 61), 1, 53, 61),
        ("BD,DNH->BNH", (61, 7, 11), 1, 61, 77),
        ("BNH,NHD->BD", (7, 11, 61), 2, 77, 61),
    ],
)
def test_linear_starts_as_xavier_uniform_of_the_whole_matrix(
    spec, shape, num_inputs, fan_in, fan_out
):
    module = Linear(spec, shape, ("a", "b", "c")[: len(shape)])
    params = nn.unbox(
        module.init(jax.random.key(0), np.zeros((1, *shape[:num_inputs]), np.float32))
    )["params"]
    limit = np.sqrt(6 / (fan_in + fan_out))
    kernel = np.asarray(params["kernel"])
    assert kernel.shape == shape
    assert 0.99 * limit < np.abs(kernel).max() <= limit
    np.testing.assert_allclose(kernel.var(), limit**2 / 3, rtol=0.07)
    assert abs(kernel.mean()) < 5 * limit / np.sqrt(3 * kernel.size)
    assert params["bias"].shape == shape[num_inputs:]
    assert (params["bias"] == 0).all()


@pytest.mark.parametrize(
    ("spec", "shape", "num_inputs"),
    [
        ("BTD,DE->BTE", (5, 7), 1),
        ("...D,DE->...E", (5, 7), 1),
        ("BTD,DNH->BTNH", (5, 7, 11), 1),
        ("BTNH,NHD->BTD", (5, 7, 11), 2),
        ("...NH,NHD->...D", (5, 7, 11), 2),
    ],
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_is_the_equation(spec, shape, num_inputs, use_bias):
    module = Linear(spec, shape, ("a", "b", "c")[: len(shape)], use_bias=use_bias)
    x = normal(B, T, *shape[:num_inputs])
    variables = randomized(module, x)
    p = oracle.float64(variables["params"])
    assert set(p) == ({"kernel", "bias"} if use_bias else {"kernel"})
    flat = np.float64(x).reshape(B, T, -1) @ p["kernel"].reshape(
        np.prod(shape[:num_inputs]), -1
    )
    expected = flat.reshape(B, T, *shape[num_inputs:]) + p.get("bias", 0)
    assert oracle.relative(module.apply(variables, x), expected) <= 1e-5
    rounded = module.clone(dtype="bfloat16").apply(variables, x)
    assert rounded.dtype == jnp.float32
    assert 1e-5 < oracle.relative(rounded, expected) <= 0.02


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match=rf"rate={rate}: must be in \[0, 1\)"):
        dropout(normal(3), rate, jax.random.key(0))


def matrix_products(jaxpr):
    """Yield the matrix products of a jaxpr, including those in calls, but not those
    with biases.
    """
    for equation in jaxpr.eqns:
        arrays = [v.aval for v in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == "product" and all(
            array.ndim > 1 for array in arrays
        ):
            yield arrays
        for sub in jaxprs_in_params(equation.params):
            yield from matrix_products(sub)


def test_bfloat16_products_stay_bfloat16_backward():
    """No product of the gradient has a float32 operand, because that would be slow."""
    module, x = FeedForward(D, F, dtype="bfloat16"), normal(B, T, D)
    variables = nn.unbox(module.init(jax.random.key(0), x))
    jaxpr = jax.make_jaxpr(jax.grad(lambda v, x: module.apply(v, x).sum(), (0, 1)))(
        variables, x
    )
    products = list(matrix_products(jaxpr.jaxpr))
    assert len(products) == 6
    for arrays in products:
        assert [array.dtype for array in arrays] == [
            jnp.bfloat16,
            jnp.bfloat16,
            jnp.float32,
        ]


def test_a_head_is_a_tree_of_its_parameters():
    """It can be an argument and a result of compiled functions, and be
    differentiated.
    """
    head = Head(jnp.asarray(normal(8, D)), jnp.asarray(normal(8)), V)
    x = normal(B, T, D)
    same = jax.jit(lambda head: head)(head)
    assert (same.vocab_size, same.dtype) == (V, "float32")
    np.testing.assert_array_equal(same(x), head(x))
    gradient = jax.grad(lambda head: (head(x)[..., :V] ** 2).sum())(head)
    assert gradient.table.shape == (8, D)
    assert (gradient.bias[V:] == 0).all()
