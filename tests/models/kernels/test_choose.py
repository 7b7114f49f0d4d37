"""Which kernel computes attention, and what each one refuses."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models.attention import MultiHeadAttention, attend
from transformer_jax.models.kernels import accelerators, choose, platforms
from transformer_jax.models.masks import CAUSAL

B, T, S, N, H, W, D = 2, 3, 5, 7, 11, 13, 17


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def some_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


@pytest.mark.parametrize(
    ("implementation", "change", "message"),
    [
        *(
            (implementation, change, message)
            for implementation in ("splash", "cudnn", "jax")
            for change, message in (
                (
                    {"dropout_rate": 0.1},
                    (
                        "this value of attention_dropout_rate; "
                        "set it to 0, or use 'einsum'"
                    ),
                ),
                (
                    {"positions": "relative"},
                    "this value of positions; set it to another value",
                ),
            )
        ),
        (
            "short",
            {"positions": "relative"},
            "this value of positions; set it to another value",
        ),
        ("jax", {"value_dim": 8}, "this value of value_dim; set it to head_dim = 16"),
        ("cudnn", {"value_dim": 8}, "this value of value_dim; set it to head_dim = 16"),
        ("short", {"value_dim": 8}, "this value of value_dim; set it to head_dim = 16"),
        *(
            (
                "short",
                {"head_dim": n, "value_dim": n},
                "this value of head_dim; set it to a divisor of 128, or a multiple",
            )
            for n in (20, 192)
        ),
        ("cudnn", {"dtype": "float32"}, "this value of dtype; set it to 'bfloat16'"),
        (
            "cudnn",
            {"head_dim": 20, "value_dim": 20},
            "this value of head_dim; set it to a multiple of 8, at most 128",
        ),
        (
            "cudnn",
            {"head_dim": 136, "value_dim": 136},
            "this value of head_dim; set it to a multiple of 8, at most 128",
        ),
    ],
)
def test_what_an_implementation_does_not_support_is_refused(
    implementation, change, message
):
    options = {"head_dim": 16, "value_dim": 16, "dtype": "bfloat16"} | change
    module = MultiHeadAttention(2, 8, implementation=implementation, **options)
    x = jnp.ones((1, 3, 8))
    with pytest.raises(
        ValueError,
        match=f"implementation = '{implementation}': does not support {message}",
    ):
        module.init(jax.random.key(0), x, x)


def test_splash_in_bfloat16_does_not_compile_where_products_of_float32_are_precise():
    for precision, refused in (
        ("highest", True),
        ("tensorfloat32", True),
        ("bfloat16", False),
        (None, False),
    ):
        with jax.default_matmul_precision(precision):
            needs = choose.Needs(0.0, "none", "bfloat16", 64, 64)
            lacks = list(choose.SPLASH.unsupported(needs))
            assert [name for name, _ in lacks] == ["dtype"] * refused
            needs = needs._replace(dtype="float32")
            assert not list(choose.SPLASH.unsupported(needs))


@pytest.mark.parametrize(
    ("implementation", "backend"),
    [("splash", "cpu"), ("splash", "gpu"), ("short", "gpu"), ("cudnn", "tpu")],
)
def test_kernels_are_refused_on_other_platforms(implementation, backend, monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: backend)
    x = jnp.ones((1, 3, 8))
    module = MultiHeadAttention(
        2, 8, 8, 8, dtype="bfloat16", implementation=implementation
    )
    variables = jax.jit(module.init)(jax.random.key(0), x, x)
    message = (
        f"implementation = '{implementation}': "
        f"does not run on this platform, '{backend}'; use 'auto'"
    )
    with pytest.raises(ValueError, match=message):
        module.apply(variables, x, x)


def test_short_attention_refuses_long_sequences(monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    module = MultiHeadAttention(2, 8, 8, 8, implementation="short")
    message = (
        "supports at most 256 positions, "
        "but there are 3 queries and 257 keys; use 'auto'"
    )
    x, memory = jnp.ones((1, 3, 8)), jnp.ones((1, 257, 8))
    variables = jax.jit(module.init)(jax.random.key(0), x, memory)
    with pytest.raises(ValueError, match=message):
        module.apply(variables, x, memory)


def used(module, x, mask, **kwargs):
    """Return True if the attention of x to itself is computed in blocks, i.e. in a
    loop over them.
    """
    variables = {
        "params": nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))[
            "params"
        ]
    }
    program = jax.make_jaxpr(lambda v: module.apply(v, x, x, mask=mask, **kwargs))(
        variables
    )
    return "scan[" in str(program)


def test_long_sequences_are_attended_to_in_blocks(monkeypatch, caplog):
    monkeypatch.setitem(choose.BLOCKED_FROM, "cpu", 136)
    choose._log_once.cache_clear()
    short, long = normal(1, 135, D), normal(1, 136, D)
    auto = functools.partial(MultiHeadAttention, N, D, H, W)
    with caplog.at_level("INFO"):
        assert not used(auto(implementation="auto"), short, CAUSAL)
        assert used(auto(implementation="auto"), long, CAUSAL)
        assert used(auto(implementation="auto"), long, CAUSAL)
        assert used(auto(implementation="auto"), normal(1, 144, D), CAUSAL)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == choose.log.name
    ]
    # once, and none for einsum
    assert lines == ["attention: blocked, as there are at least 136 positions (cpu)"]
    choose._log_once.cache_clear()


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_what_is_added_to_scores_is_computed_by_the_equation(
    platform, monkeypatch, caplog
):
    """The reason is logged once, where there would be a kernel."""
    choose._log_once.cache_clear()
    monkeypatch.setattr(platforms, "current", lambda: platform)
    x, bias = normal(1, 300, N, 8), normal(1, N, 300, 300)
    run = functools.partial(attend, x, x, x, bias=bias, how="auto")
    with caplog.at_level("INFO"):
        for _ in range(2):
            _, weights = jax.eval_shape(run)
            assert weights.shape == (1, N, 300, 300)
    lines = [r.getMessage() for r in caplog.records if r.name == choose.log.name]
    expected = ["attention: einsum, which alone adds to the scores (tpu)"]
    assert lines == (expected if platform == "tpu" else [])
    choose._log_once.cache_clear()


BFLOAT16 = {"dtype": "bfloat16"}

NO_DROPOUT = "splash does not support this value of attention_dropout_rate"


@pytest.mark.parametrize(
    ("backend", "length", "key_length", "options", "name", "why"),
    [
        ("tpu", 16, 1024, {}, "short", "16 to 1024 (tpu)"),
        ("tpu", 15, 1024, {}, "einsum", "fewer than 16 (tpu)"),
        ("tpu", 256, 1025, {}, "splash", "at least 256 (tpu)"),
        ("tpu", 255, 1025, {}, "einsum", "fewer than 256 (tpu)"),
        ("tpu", 64, 2048, {}, "blocked", "at least 2048 (tpu)"),
        (
            "tpu",
            512,
            513,
            {"head_dim": 256, "value_dim": 256},
            "splash",
            "at least 256 (tpu)",
        ),
        (
            *("tpu", 255, 513, {"head_dim": 256, "value_dim": 256}, "einsum"),
            (
                "fewer than 256 (tpu; "
                "short does not support more than 512 positions with this head_dim)"
            ),
        ),
        ("tpu", 256, 300, {"value_dim": 8}, "splash", "at least 256 (tpu)"),
        (
            *("tpu", 64, 64, {"value_dim": 8}, "einsum"),
            "fewer than 256 (tpu; short does not support this value of value_dim)",
        ),
        ("tpu", 512, 512, {"dropout_rate": 0.1}, "short", "16 to 1024 (tpu)"),
        (
            "tpu",
            1025,
            1025,
            {"dropout_rate": 0.1},
            "einsum",
            f"fewer than 2048 (tpu; {NO_DROPOUT})",
        ),
        (
            "tpu",
            2048,
            2048,
            {"dropout_rate": 0.1},
            "blocked",
            f"at least 2048 (tpu; {NO_DROPOUT})",
        ),
        ("gpu", 128, 256, BFLOAT16, "cudnn", "at least 128 (gpu)"),
        ("gpu", 127, 256, BFLOAT16, "einsum", "fewer than 128 (gpu)"),
        ("cuda", 256, 256, BFLOAT16, "cudnn", "at least 128 (cuda)"),
        (
            "gpu",
            256,
            256,
            {},
            "einsum",
            "fewer than 2048 (gpu; cudnn does not support this value of dtype)",
        ),
        (
            *("gpu", 4096, 4096, BFLOAT16 | {"value_dim": 32}, "blocked"),
            "at least 2048 (gpu; cudnn does not support this value of value_dim)",
        ),
        (
            "old gpu",
            256,
            256,
            BFLOAT16,
            "einsum",
            "fewer than 2048 (gpu; cudnn does not support this device)",
        ),
        ("cpu", 256, 256, BFLOAT16, "blocked", "at least 192 (cpu)"),
    ],
)
def test_auto_is_a_kernel_of_the_platform(
    backend, length, key_length, options, name, why, monkeypatch, caplog
):
    choose._log_once.cache_clear()
    monkeypatch.setattr(platforms, "current", lambda: backend.removeprefix("old "))
    called, dropping = [], []

    def kernel(called_name):
        def attend(query, key, value, **options):
            called.append(called_name)
            dropping.append((options.get("dropout_rate", 0), "dropout_key" in options))
            return jnp.zeros((*query.shape[:3], value.shape[-1]))

        return attend

    def counted(kernels):
        return tuple(
            each._replace(
                function=kernel(each.name),
                runs_here=lambda: not backend.startswith("old"),
            )
            for each in kernels
        )

    for platform, kernels in choose.KERNELS.items():
        monkeypatch.setitem(choose.KERNELS, platform, counted(kernels))
    monkeypatch.setattr(choose, "blocked_attention", kernel("blocked"))
    module = MultiHeadAttention(
        2, 8, implementation="auto", **{"head_dim": 64, "value_dim": 64, **options}
    )
    x, memory = normal(1, length, 8), normal(1, key_length, 8)
    boxed = jax.eval_shape(
        module.clone(implementation="einsum").init, jax.random.key(0), x, memory
    )
    variables = {"params": nn.unbox(boxed["params"])}

    def run(rngs=None):
        jax.eval_shape(lambda v: module.apply(v, x, memory, rngs=rngs), variables)

    with caplog.at_level("INFO"):
        for _ in range(2):
            run({"dropout": jax.random.key(1)})
    assert called == ([name] * 2 if name != "einsum" else [])
    assert [r.getMessage() for r in caplog.records if r.name == choose.log.name] == [
        f"attention: {name}, as there are {why.replace(' (', ' positions (', 1)}"
    ]
    rate = options.get("dropout_rate", 0)
    assert set(dropping) == ({(rate, rate > 0)} if called else set())
    if rate:
        run()
        assert dropping[-1] == (0, False)
        # without a key, there is no dropout
        assert called[-1] == ("short" if length <= 1024 else "splash")
    choose._log_once.cache_clear()


@pytest.mark.parametrize(
    ("capability", "runs"),
    [("8.0", True), ("12.1", True), ("7.5", False), ("gfx942", False), (None, False)],
)
def test_cudnn_needs_a_recent_nvidia_gpu(capability, runs, monkeypatch):
    device = (
        types.SimpleNamespace()
        if capability is None
        else types.SimpleNamespace(compute_capability=capability)
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert accelerators.cudnn_runs_here() == runs


@pytest.mark.parametrize("implementation", ["auto", "blocked"])
def test_what_blocks_do_not_support_is_computed_without_them(
    implementation, monkeypatch
):
    monkeypatch.setitem(choose.BLOCKED_FROM, "cpu", 136)
    x, mask = normal(1, 136, D), jnp.asarray(some_mask(1, 1, 136, 136))
    module = MultiHeadAttention(N, D, H, W, implementation=implementation)
    assert used(module, x, CAUSAL)
    assert not used(module, x, mask)  # a mask of any form
    assert not used(module, x, CAUSAL, mutable="intermediates")  # the weights are sown
    assert not used(module, x, CAUSAL, bias=normal(1, 1, 136, 136))
    assert not used(
        MultiHeadAttention(
            N, D, H, W, implementation=implementation, positions="relative"
        ),
        x,
        CAUSAL,
    )
