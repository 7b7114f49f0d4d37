"""GPT against NumPy float64; the inputs that each output sees; the cache; sizes of
the models in the papers.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle, papers
from helpers.closed_forms import forward_flops, num_parameters
from helpers.sizes import SINGLE_STACK
from transformer_jax.models import counting
from transformer_jax.models.gpt import GPT, SIZES, GPTConfig
from transformer_jax.models.positions import IN_ATTENTION, POSITIONS
from transformer_jax.models.stack import unstack_layers

B, T, V = 3, 11, 31
LLAMA = {
    "norm": "pre",
    "norm_type": "rms_norm",
    "positions": "rotary",
    "rotary_base": 100.0,
    "feed_forward": "gated",
    "activation": "silu",
    "attention_bias": False,
    "feed_forward_bias": False,
    "tie_embeddings": False,
    "num_heads": 6,
    "num_kv_heads": 2,
}
SMALL = GPTConfig(**SINGLE_STACK)
VALID = np.arange(T) < np.array([11, 5, 1])[:, None]
TOKENS = np.random.default_rng(1).integers(0, V, (B, T))


@functools.cache
def shapes(config):
    return nn.unbox(
        jax.eval_shape(GPT(config).init, jax.random.key(0), np.zeros((1, 1), np.int32))
    )["params"]


def parameters(config):
    return jax.tree.map(jnp.asarray, oracle.randomized(shapes(config)))


def logits(config, params, *args, **kwargs):
    return np.asarray(jax.jit(GPT(config).apply)({"params": params}, *args, **kwargs))


CASES = {
    **{kind: {"positions": kind} for kind in POSITIONS},
    "GPT-2": {"norm": "pre", "activation": "gelu_tanh"},
    "Llama": LLAMA,
    "post-LN with today's parts": {
        "norm_type": "rms_norm",
        "feed_forward": "gated",
        "num_kv_heads": 1,
    },
    "untied, padded": {"tie_embeddings": False, "vocab_multiple": 8},
    "scaled, no bias": {
        "embedding_scale": True,
        "attention_bias": False,
        "activation": "relu",
        "vocab_multiple": 8,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_equations(name):
    config = dataclasses.replace(SMALL, **CASES[name])
    params = parameters(config)
    found = logits(config, params, TOKENS, VALID)
    assert found.dtype == np.float32
    assert found.shape[-1] == (32 if config.vocab_multiple == 8 else V)
    assert (
        oracle.relative(found[..., :V], oracle.gpt(params, config, TOKENS, VALID))
        <= 1e-5
    )
    assert (np.asarray(jax.nn.softmax(found))[..., V:] == 0).all()
    assert (
        oracle.relative(
            logits(config, params, TOKENS)[..., :V], oracle.gpt(params, config, TOKENS)
        )
        <= 1e-5
    )


@pytest.mark.parametrize("kind", ["learned", *IN_ATTENTION])
def test_what_sees_what(kind):
    """Test the gradient of each output with respect to the embedding of each token.

    No id occurs twice.
    """
    config = dataclasses.replace(SMALL, positions=kind, tie_embeddings=False)
    params, valid = parameters(config), np.arange(T) != 4

    @jax.jit
    @jax.jacrev
    def jacobian(table, valid):
        changed = params | {"embedding": {"table": table}}
        return (
            GPT(config)
            .apply({"params": changed}, np.arange(T)[None], valid)[0]
            .sum(axis=-1)
        )

    def seen(valid):
        found = np.asarray(jacobian(params["embedding"]["table"], valid[None]))
        return (found != 0).any(axis=-1)[:, :T]

    causal = np.tri(T, dtype=bool)
    np.testing.assert_array_equal(seen(np.ones(T, bool)), causal)
    np.testing.assert_array_equal(seen(valid), causal & valid | np.eye(T, dtype=bool))


@pytest.mark.parametrize("kind", ["learned", *IN_ATTENTION])
def test_documents_packed_in_rows_are_like_separate_ones(kind):
    """Compare the sum of log-probabilities and its gradient.

    The documents have 5, 1, 4 and 11 tokens.
    """
    config = dataclasses.replace(SMALL, positions=kind)
    segments = np.array([5 * [1] + [2] + 4 * [3] + 3 * [0], 11 * [1] + 2 * [0]])
    places = np.array([[*range(5), 0, *range(4), 0, 0, 0], [*range(11), 0, 0]])
    packed, targets = np.random.default_rng(2).integers(0, V, (2, 2, 13))
    apart = [
        (row, number)
        for row in range(2)
        for number in range(1, segments[row].max() + 1)
    ]

    def alone(values):
        return np.array(
            [
                np.pad(found := values[r][segments[r] == n], (0, 13 - len(found)))
                for r, n in apart
            ]
        )

    @functools.partial(jax.jit, static_argnames="model")
    def run(params, model, tokens, targets, counted, **packing):
        def total(params):
            logits = model.apply({"params": params}, tokens, **packing)
            return (
                jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[
                    ..., 0
                ]
                * counted
            ).sum()

        value, gradient = jax.value_and_grad(total)(params)
        return value, jnp.concatenate(
            [leaf.ravel() for leaf in jax.tree.leaves(gradient)]
        )

    params, model = parameters(config), GPT(config)
    found = run(
        params,
        model,
        packed,
        targets,
        segments > 0,
        segments=segments,
        positions=places,
    )
    expected = run(params, model, alone(packed), alone(targets), alone(segments) > 0)
    for one, other in zip(found, expected, strict=True):
        assert oracle.relative(one, other) <= 1e-5


@pytest.mark.parametrize("kind", POSITIONS)
def test_rows_of_a_cache_may_begin_at_different_places(kind):
    """Rows of 7, 1, 4 and 0 tokens end at the same place of the cache, and go on
    from there as if they were alone.
    """
    config = dataclasses.replace(SMALL, positions=kind)
    params, model, start = parameters(config), GPT(config), np.array([0, 6, 3, 7])
    tokens = np.random.default_rng(5).integers(0, V, (4, 9))
    extend = jax.jit(
        functools.partial(model.apply, {"params": params}, method=GPT.extend)
    )
    cache = model.apply({"params": params}, 4, 9, method=GPT.start)
    found, cache = extend(cache, tokens[:, :7], 0, start)
    for t in (7, 8):
        more, cache = extend(cache, tokens[:, t : t + 1], t, start)
        found = np.concatenate([found, more], axis=1)
    for row, first in enumerate(start):
        alone = logits(config, params, tokens[row : row + 1, first:])
        assert oracle.relative(found[row : row + 1, first:], alone) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"positions": kind} for kind in POSITIONS]
    + [
        {"norm": "pre", "tie_embeddings": False},
        LLAMA,
        {"num_kv_heads": 1, "positions": "relative"},
    ],
    ids=str,
)
def test_a_cache_gives_the_logits_of_the_whole(changes):
    """Use prompts of any length, then single tokens, with stacked or unstacked
    layers, and with rows in any order.
    """
    config, order = dataclasses.replace(SMALL, **changes), np.array([2, 0, 0])
    model, params = GPT(config), parameters(config)
    whole = logits(config, params, TOKENS)
    for given, prompt in (
        (params, 1),
        (unstack_layers(params), 4),
        (unstack_layers(params), T),
    ):
        extend = jax.jit(
            functools.partial(model.apply, {"params": given}, method=GPT.extend)
        )
        cache = model.apply({"params": given}, B, 13, method=GPT.start)
        assert all(len(leaf) == B for leaf in jax.tree.leaves(cache))
        heads = config.num_kv_heads or 5
        assert [(layer.key.shape, layer.value.shape) for layer in cache.layers] == [
            ((B, heads, 13, 6), (B, heads, 13, 7))
        ] * 2
        one, cache = extend(cache, TOKENS[:, :prompt], 0)
        found = [np.asarray(one)[order]]
        cache = jax.tree.map(lambda leaf: np.asarray(leaf)[order], cache)
        for t in range(prompt, T):
            one, cache = extend(cache, TOKENS[order, t : t + 1], t)
            found.append(one)
        assert oracle.relative(np.concatenate(found, axis=1), whole[order]) <= 1e-5


def test_a_sequence_or_cache_beyond_the_positions_is_refused():
    params = {"params": parameters(SMALL)}
    with pytest.raises(ValueError, match=r"length=14: must be at most max_length = 13"):
        GPT(SMALL).apply(params, B, 14, method=GPT.start)
    with pytest.raises(
        ValueError, match="a sequence of 14 positions is longer than max_length = 13"
    ):
        GPT(SMALL).apply(params, np.zeros((1, 14), int))
    rotary = dataclasses.replace(SMALL, positions="rotary")
    cache = GPT(rotary).apply({"params": parameters(rotary)}, B, 14, method=GPT.start)
    assert cache.layers[0].room == 14


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_attention_maps(kv_heads):
    model = GPT(dataclasses.replace(SMALL, num_kv_heads=kv_heads))
    apply = jax.jit(functools.partial(model.apply, mutable="intermediates"))
    _, sown = apply({"params": parameters(model.config)}, TOKENS, VALID)
    maps = model.attention_maps(sown["intermediates"])
    assert list(maps) == [("self-attention", "text", "text")]
    weights = np.asarray(maps["self-attention", "text", "text"])
    assert weights.shape == (B, 2, 5, T, T)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    assert (weights[..., ~np.tri(T, dtype=bool)] == 0).all()
    assert (weights[1, ..., 5:] == 0).all()


def test_everything_starts_small():
    """Kernels, tokens and positions start with deviation 0.02.

    The padding rows and biases start at zero.
    """
    config = dataclasses.replace(
        SMALL, d_model=101, d_ff=211, vocab_size=503, max_length=307, vocab_multiple=8
    )
    params = nn.unbox(jax.jit(GPT(config).init)(jax.random.key(0), TOKENS))["params"]
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        leaf = leaf[:503] if "embedding" in jax.tree_util.keystr(path) else leaf
        if name in ("kernel", "table"):
            np.testing.assert_allclose(leaf.std(), 0.02, rtol=0.04)
            assert np.abs(leaf).max() > 0.05  # normal, not cut off
        else:
            assert (leaf == (name == "scale")).all()
    assert (params["embedding"]["table"][503:] == 0).all()
    xavier = nn.unbox(
        jax.jit(GPT(dataclasses.replace(config, init="xavier_uniform")).init)(
            jax.random.key(0), TOKENS
        )
    )
    kernel = xavier["params"]["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    np.testing.assert_allclose(
        np.abs(kernel).max(), np.sqrt(6 / (101 + 5 * 6)), rtol=0.02
    )


@pytest.mark.parametrize(
    "name", ["dropout_rate", "attention_dropout_rate", "feed_forward_dropout_rate"]
)
def test_dropout_acts_when_given_a_key(name):
    off = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
    config = dataclasses.replace(SMALL, **(off | {name: 0.5}))
    params = parameters(config)
    plain = logits(dataclasses.replace(SMALL, **off), params, TOKENS)
    np.testing.assert_array_equal(logits(config, params, TOKENS), plain)
    assert (
        oracle.relative(
            logits(config, params, TOKENS, rngs={"dropout": jax.random.key(0)}), plain
        )
        > 0.01
    )


def test_dropout_acts_on_the_embeddings():
    config = dataclasses.replace(SMALL, num_layers=1, norm="pre", dropout_rate=0.5)
    params = jax.tree.map(jnp.zeros_like, parameters(config)) | {
        "embedding": parameters(config)["embedding"]
    }
    # layers whose parameters are zero add nothing
    params["decoder"]["final_norm"]["scale"] += 1
    apply = jax.jit(functools.partial(GPT(config).apply, method=GPT.hidden))
    run = functools.partial(apply, {"params": params}, TOKENS)
    assert ((run() - run(rngs={"dropout": jax.random.key(0)})) != 0).any(axis=-1).all()


def test_half_precision():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    params = parameters(config)
    found = logits(config, params, TOKENS)
    assert found.dtype == np.float32
    assert 1e-4 < oracle.relative(found, oracle.gpt(params, config, TOKENS)) <= 0.05
    cache = GPT(config).apply({"params": params}, B, T, method=GPT.start)
    assert cache.layers[0].key.dtype == jnp.bfloat16


def test_forward_mode():
    """Compare the tangent of the logits in a direction with differences of the
    equations.
    """
    params, direction = parameters(SMALL), oracle.randomized(shapes(SMALL), seed=1)
    _, tangent = jax.jit(
        lambda *x: jax.jvp(lambda p: GPT(SMALL).apply({"params": p}, TOKENS), *x)
    )((params,), (direction,))

    def moved(by):
        return oracle.gpt(
            jax.tree.map(lambda p, d: np.float64(p) + by * d, params, direction),
            SMALL,
            TOKENS,
        )

    assert oracle.relative(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6) <= 1e-4


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_the_papers_models(name):
    config, expected = GPTConfig(**SIZES[name]), papers.GPT[name]
    assert num_parameters(config) == expected
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes(config))) == expected
    assert not list(config.problems())


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_products_are_counted(name):
    config = dataclasses.replace(SMALL, **CASES[name], value_dim=6)
    padding = (-V % config.vocab_multiple) * 17 * (2 - config.tie_embeddings)
    assert (
        num_parameters(config)
        == sum(leaf.size for leaf in jax.tree.leaves(shapes(config))) - padding
    )
    config = dataclasses.replace(config, vocab_multiple=1)
    variables = {"params": parameters(config)}
    counted = counting.flops(GPT(config).apply, variables, TOKENS[:1])
    assert forward_flops(config, T) == counted
    two = forward_flops(config, np.array([5, T]))
    np.testing.assert_array_equal(
        two, [forward_flops(config, 5), forward_flops(config, T)]
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architecture": "bert"}, "architecture"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"max_length": 0}, "max_length"),
        ({"embedding_init": "zeros"}, "embedding_init"),
        ({"positions": "rope"}, "positions"),
        ({"attention_dropout_rate": 1.0}, "attention_dropout_rate"),
        ({"attention_implementation": "jax"}, "attention_dropout_rate"),
        ({"norm_type": "batch_norm"}, "norm_type"),
        ({"feed_forward": "swiglu"}, "feed_forward"),
        ({"rotary_base": 0.0}, "rotary_base"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"num_kv_heads": 5}, "num_kv_heads"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(changes, field):
    config = GPTConfig(**changes)
    assert [name for name, _ in config.problems()] == [field]
    with pytest.raises(ValueError, match=rf"GPTConfig\.{field} = "):
        GPT(config).init(jax.random.key(0), TOKENS)


@pytest.mark.parametrize(
    ("parts", "changes"),
    [
        ({}, {"remat": "full"}),
        ({}, {"remat": "scores", "unroll": 2}),
        ({}, {"attention_implementation": "jax"}),
        (LLAMA, {"remat": "scores", "attention_implementation": "jax"}),
        ({}, {"attention_implementation": "blocked"}),
        (LLAMA, {"remat": "scores", "attention_implementation": "blocked"}),
    ],
)
def test_other_ways_to_the_same(parts, changes):
    config = dataclasses.replace(
        SMALL, attention_dropout_rate=0.0, value_dim=6, **parts
    )
    params, other = parameters(config), dataclasses.replace(config, **changes)

    def gradient(config):
        run = functools.partial(GPT(config).apply, rngs={"dropout": jax.random.key(1)})
        found = jax.jit(
            jax.grad(lambda p: (run({"params": p}, TOKENS, VALID) ** 2).mean())
        )(params)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)])

    assert oracle.relative(gradient(other), gradient(config)) <= 1e-5
