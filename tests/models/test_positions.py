"""Positions: sinusoids, relative positions and rotations against the papers'
equations in NumPy float64.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from helpers.closed_forms import forward_flops, num_parameters
from helpers.sizes import ENCODER_DECODER
from transformer_jax.errors import UserError
from transformer_jax.models import stack
from transformer_jax.models.attention import MultiHeadAttention, dot_product_attention
from transformer_jax.models.caches import SharedPast
from transformer_jax.models.masks import CAUSAL
from transformer_jax.models.positions import (
    IN_ATTENTION,
    POSITIONS,
    Positions,
    Relations,
    Scaling,
    clipped_distances,
    grid_positions,
    make_places,
    relative_scores,
    relative_values,
    rotary_waves,
    rotate,
    sinusoidal_positions,
)
from transformer_jax.models.transformer import Memory, Transformer, TransformerConfig
from transformer_jax.tasks.teacher_forcing import start

# of `MultiHeadAttention` alone; the bias belongs to a stack
OF_ONE_ATTENTION = [kind for kind in IN_ATTENTION if kind != "relative_bias"]
B, T, S, N, H, W, D = 2, 3, 11, 5, 6, 13, 17
K = 2
SMALL = TransformerConfig(
    **ENCODER_DECODER,
    head_dim=6,
    value_dim=5,
    max_length=3,  # shorter than every sequence here
    max_relative_distance=K,
    relative_buckets=6,
    max_bucket_distance=7,
    dropout_rate=0.0,
)


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


@pytest.mark.parametrize("d_model", [1, 2, 7, 8, 13])
def test_sinusoids_are_the_formula(d_model):
    found = sinusoidal_positions(101, d_model)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, oracle.sinusoids(101, d_model), atol=1e-7)
    halves = sinusoidal_positions(101, d_model, halves=True)
    np.testing.assert_allclose(
        halves, oracle.sinusoids_in_halves(101, d_model), atol=1e-7
    )


def test_positions_count_from_zero_and_waves_are_interleaved():
    found = sinusoidal_positions(3, 5)
    np.testing.assert_array_equal(found[0], [0, 1, 0, 1, 0])
    np.testing.assert_allclose(found[1, :2], [np.sin(1), np.cos(1)], rtol=1e-6)
    np.testing.assert_allclose(
        found[2, 2:4], [np.sin(2 / 10000**0.4), np.cos(2 / 10000**0.4)], rtol=1e-6
    )


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions(kind):
    positions = Positions(kind, 13, D)
    shapes = nn.unbox(
        jax.eval_shape(lambda key: positions.init(key, 1), jax.random.key(0))
    )
    variables = (
        {"params": oracle.randomized(shapes["params"])} if kind == "learned" else {}
    )
    assert ("params" in shapes) == (kind == "learned")
    halves = {"sinusoidal": False, "sinusoidal_halves": True}
    tables = {
        name: sinusoidal_positions(13, D, halves=value)
        for name, value in halves.items()
    }
    table = (
        variables["params"]["table"]
        if kind == "learned"
        else tables.get(kind, np.zeros((13, D)))
    )
    assert table.shape == (13, D)
    np.testing.assert_array_equal(positions.apply(variables, 13), table[None])
    np.testing.assert_array_equal(positions.apply(variables, T), table[None, :T])
    np.testing.assert_array_equal(positions.apply(variables, T, 10), table[None, 10:])
    later = jax.jit(lambda offset: positions.apply(variables, T, offset))
    np.testing.assert_array_equal(later(4), table[None, 4:7])


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_halves", "learned", "none"])
def test_too_long_a_sequence_is_refused(kind):
    message = (
        "a sequence of 6 positions is longer than max_length = 5: "
        "cut the sequence or raise model.max_length"
    )
    with pytest.raises(ValueError, match=message):
        Positions(kind, 5, D).init(jax.random.key(0), 6)


@pytest.mark.parametrize("kind", IN_ATTENTION)
def test_positions_in_attention_have_no_greatest_length(kind):
    assert (Positions(kind, 5, D).apply({}, 6) == 0).all()


def tables(k=K):
    return normal(2 * k + 1, H), normal(2 * k + 1, W)


def some_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


def distances_from(position, length, k=K, room=S):
    """Return the distances of queries at position … to keys at 0 … room - 1."""
    return clipped_distances(position + jnp.arange(length), jnp.arange(room), k)


def turn(x, position=0, room=None, base=10000.0):
    """Rotate x (B, T, N, H), whose first vector is at `position`."""
    length = x.shape[1]
    if room is None:  # positions that are known while tracing
        waves = rotary_waves(position + np.arange(length), length, x.shape[3], base)
    else:
        waves = rotary_waves(position + jnp.arange(length), room, x.shape[3], base)
    return rotate(x, waves)


# (k, length, position): k clips most distances, equals the largest, or exceeds it;
# alone and after a prompt.
CASES = [
    (1, S, 0),
    (S - 1, S, 0),
    (S + 3, S, 0),
    (K, T, 4),
    (K, 1, S - 1),
    (7, T, S - T),
]


@pytest.mark.parametrize(("k", "length", "position"), CASES)
def test_relative_attention_is_the_equation(k, length, position):
    q, key, value, mask = (
        normal(B, length, N, H),
        normal(B, S, N, H),
        normal(B, S, N, W),
        some_mask(B, N, length, S),
    )
    mask[0, :, 0] = False
    bias = normal(1, N, length, S)

    @jax.jit
    def attend(position):
        return dot_product_attention(
            q,
            key,
            value,
            mask=mask,
            bias=bias,
            relations=Relations(*tables(k), distances_from(position, length, k)),
        )

    expected = oracle.relative_attention(
        q, key, value, *tables(k), mask, bias, position
    )
    assert oracle.relative(attend(position), expected) <= 1e-5
    assert (expected[0, 0] == 0).all()


@pytest.mark.parametrize(("k", "length", "position"), [(K, S, 0), (S + 3, T, 4)])
def test_relative_scores_and_values_are_the_loops(k, length, position):
    q, weights, (keys, values) = (
        normal(B, length, N, H),
        normal(B, N, length, S),
        tables(k),
    )
    scores, output = np.zeros((B, N, length, S)), np.zeros((B, length, N, W))
    for b, n, t, j in np.ndindex(scores.shape):
        distance = max(-k, min(k, j - position - t))
        scores[b, n, t, j] = q[b, t, n] @ keys[distance + k] / np.sqrt(H)
        output[b, t, n] += weights[b, n, t, j] * values[distance + k]
    rows = distances_from(position, length, k)
    assert oracle.relative(relative_scores(q, keys, rows), scores) <= 1e-5
    assert oracle.relative(relative_values(weights, values, rows), output) <= 1e-5


def test_gradients_of_relative_attention_are_its_differences():
    """Compare with central differences of the oracle, along a direction for each
    argument.
    """
    arguments = [
        normal(B, S, N, H),
        normal(B, S, N, H, seed=1),
        normal(B, S, N, W),
        *tables(),
    ]
    mask, projected = np.tri(S, dtype=bool)[None, None], normal(B, S, N, W, seed=1)

    def total(q, key, value, keys, values):
        return (
            dot_product_attention(
                *(q, key, value),
                mask=mask,
                relations=Relations(keys, values, distances_from(0, S)),
            )
            * projected
        ).sum()

    gradients = jax.jit(jax.grad(total, argnums=range(5)))(*arguments)
    for number, gradient in enumerate(gradients):
        direction = oracle.float64(normal(*arguments[number].shape, seed=2))

        def moved(step, number=number, direction=direction):
            changed = [oracle.float64(x) for x in arguments]
            changed[number] = changed[number] + step * direction
            return (oracle.relative_attention(*changed, mask) * projected).sum()

        expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=1e-4)


def test_tokens_farther_than_k_are_alike_and_nearer_ones_are_not():
    rows = distances_from(0, S)
    scores = np.asarray(relative_scores(normal(B, S, N, H), tables()[0], rows))
    for t in range(S):
        for left in range(max(t - K, 0)):
            np.testing.assert_array_equal(
                scores[:, :, t, left], scores[:, :, t, max(t - K, 0)]
            )
        for right in range(t + K, S):
            np.testing.assert_array_equal(
                scores[:, :, t, right], scores[:, :, t, min(t + K, S - 1)]
            )
        near = scores[:, :, t, max(t - K, 0) : t + K + 1]
        assert (np.diff(near, axis=-1) != 0).all()


def test_keys_and_values_have_a_table_each_for_all_heads():
    module = MultiHeadAttention(
        N, D, H, W, positions="relative", max_relative_distance=K
    )
    x = normal(B, S, D)
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))["params"]
    found = {name: leaf.shape for name, leaf in shapes["relative"].items()}
    assert found == {"key_table": (2 * K + 1, H), "value_table": (2 * K + 1, W)}
    params = oracle.randomized(shapes)
    whole = module.apply({"params": params}, x, x)
    assert (
        oracle.relative(whole, oracle.multi_head(params, x, x, positions="relative"))
        <= 1e-5
    )
    for name in found:
        without = params | {
            "relative": params["relative"] | {name: np.zeros(found[name], np.float32)}
        }
        assert oracle.relative(module.apply({"params": without}, x, x), whole) > 0.01


@pytest.mark.parametrize("position", [0, 4])
def test_rotation_is_the_matrix(position):
    x = normal(B, T, N, H)
    found = jax.jit(lambda position: turn(x, position, S))(position)
    assert found.dtype == np.float32
    assert oracle.relative(found, oracle.rotated(x, position)) <= 1e-6
    np.testing.assert_allclose(turn(x, position), found, rtol=1e-6, atol=1e-7)
    if position == 0:
        np.testing.assert_array_equal(found[:, 0], x[:, 0])


def test_rotation_computed_by_hand():
    """At width 4, θ_1 = 1 and θ_2 = 1/100. The vector is (1, 0, 1, 0) at position 2."""
    found = turn(
        jnp.ones((1, 3, 1, 4)) * jnp.asarray([1.0, 0, 1, 0]).reshape(1, 1, 1, 4)
    )[0, 2, 0]
    np.testing.assert_allclose(
        found, [np.cos(2), np.sin(2), np.cos(0.02), np.sin(0.02)], rtol=1e-6
    )


def test_the_product_of_rotated_vectors_depends_on_their_distance_alone():
    q = np.broadcast_to(normal(1, 1, N, H), (1, S, N, H))
    key = np.broadcast_to(normal(1, 1, N, H, seed=1), (1, S, N, H))
    products = np.einsum("BTNH,BSNH->NTS", turn(q), turn(key))
    for t, s in np.ndindex(S - 1, S - 1):
        np.testing.assert_allclose(
            products[:, t + 1, s + 1], products[:, t, s], rtol=1e-5, atol=1e-5
        )
    assert (np.abs(np.diff(products[:, 0], axis=-1)) > 1e-3).all()
    np.testing.assert_allclose(
        (turn(q) ** 2).sum(axis=-1), (q**2).sum(axis=-1), rtol=1e-5
    )


@pytest.mark.parametrize("base", [100.0, 500_000.0])
def test_the_base_of_a_rotation(base):
    """The matrix has other angles: at width 4, θ_2 = base^(-1/2).

    Keys and queries of attention have the same base.
    """
    x = normal(B, S, N, H)
    assert oracle.relative(turn(x, base=base), oracle.rotated(x, 0, base)) <= 1e-6
    found = turn(
        jnp.ones((1, 3, 1, 4)) * jnp.asarray([0, 0, 1.0, 0]).reshape(1, 1, 1, 4),
        base=base,
    )[0, 2, 0]
    np.testing.assert_allclose(
        found[2:], [np.cos(2 * base**-0.5), np.sin(2 * base**-0.5)], rtol=1e-6
    )
    module, x = (
        MultiHeadAttention(N, D, H, W, positions="rotary", rotary_base=base),
        normal(B, S, D),
    )
    params = oracle.randomized(
        nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))["params"]
    )
    expected = oracle.multi_head(params, x, x, positions="rotary", rotary_base=base)
    assert oracle.relative(module.apply({"params": params}, x, x), expected) <= 1e-5
    assert (
        oracle.relative(oracle.multi_head(params, x, x, positions="rotary"), expected)
        > 0.01
    )


def test_a_rotation_needs_pairs():
    message = (
        r"head width 7: must be even to rotate pairs of features; change"
        r" model\.head_dim"
    )
    with pytest.raises(ValueError, match=message):
        turn(normal(1, 1, 1, 7))


def test_rotary_gradients_are_its_differences():
    x, direction, projected = (
        normal(B, T, N, H),
        normal(B, T, N, H, seed=2),
        normal(B, T, N, H, seed=1),
    )
    gradient = jax.grad(lambda x: (turn(x) ** 2 * projected).sum())(x)

    def moved(step):
        return (
            oracle.rotated(oracle.float64(x) + step * direction) ** 2 * projected
        ).sum()

    np.testing.assert_allclose(
        (gradient * direction).sum(), (moved(1e-5) - moved(-1e-5)) / 2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("kind", OF_ONE_ATTENTION)
@pytest.mark.parametrize("prompt", [1, 4, S])
def test_a_prompt_and_then_pieces_give_what_the_whole_gives(kind, prompt):
    """The cache holds rotated keys, and queries know their position."""
    module = MultiHeadAttention(N, D, H, W, positions=kind, max_relative_distance=K)
    x, room = normal(B, S, D), S + 2
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))["params"]
    variables = {"params": oracle.randomized(shapes)}
    whole = oracle.multi_head(
        variables["params"], x, x, np.tri(S, dtype=bool)[None, None], positions=kind
    )

    @jax.jit
    def step(cache, x, position):
        places = make_places(
            kind,
            position + jnp.arange(x.shape[1]),
            jnp.arange(room),
            room,
            head_dim=H,
            rotary_base=10000.0,
            max_distance=K,
        )
        new = module.apply(variables, x, places, method=MultiHeadAttention.project)
        cache = cache.write(new, position)
        mask = CAUSAL.part(position, x.shape[1], 0, room)
        return module.apply(variables, x, cache, mask=mask, places=places), cache

    output, cache = step(
        module.apply(variables, B, room, method=MultiHeadAttention.empty_cache),
        x[:, :prompt],
        0,
    )
    outputs = [output]
    for t in range(prompt, S, 3):
        output, cache = step(cache, x[:, t : t + 3], t)
        outputs.append(output)
    assert oracle.relative(np.concatenate(outputs, axis=1), whole) <= 1e-5


@functools.cache
def shapes(config):
    ids = np.zeros((1, 1), np.int32)
    return nn.unbox(
        jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)
    )["params"]


def some_ids(rows=3, source_length=S, length=7):
    rng = np.random.default_rng(1)
    return rng.integers(0, 31, (rows, source_length)), rng.integers(
        0, 31, (rows, length)
    )


SOURCE_VALID, TARGET_VALID = (
    np.arange(n) < np.array(lengths)[:, None]
    for n, lengths in ((S, (11, 7, 3)), (7, (5, 7, 1)))
)


@pytest.mark.parametrize(
    ("kind", "norm"),
    [("relative", "post"), ("relative_bias", "post"), ("rotary", "pre")],
)
def test_the_model_is_the_equations(kind, norm):
    config = dataclasses.replace(SMALL, positions=kind, norm=norm)
    params, (source, target) = oracle.randomized(shapes(config)), some_ids()
    found = jax.jit(Transformer(config).apply)(
        {"params": params}, source, target, SOURCE_VALID, TARGET_VALID
    )
    expected = oracle.transformer(
        params, config, source, target, SOURCE_VALID, TARGET_VALID
    )
    assert oracle.relative(found, expected) <= 1e-5
    plain = dataclasses.replace(config, positions="none")
    assert (
        oracle.relative(
            oracle.transformer(
                params, plain, source, target, SOURCE_VALID, TARGET_VALID
            ),
            expected,
        )
        > 0.01
    )


@pytest.mark.parametrize("kind", IN_ATTENTION)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole(kind):
    config = dataclasses.replace(SMALL, positions=kind)
    params, (source, target) = (
        jax.tree.map(jnp.asarray, oracle.randomized(shapes(config))),
        some_ids(),
    )
    apply = functools.partial(Transformer(config).apply, {"params": params})
    whole = jax.jit(apply)(source, target, SOURCE_VALID)
    first = jax.jit(functools.partial(apply, method=start), static_argnums=2)(
        source, SOURCE_VALID, 9
    )
    extend = jax.jit(functools.partial(apply, method=Transformer.extend))
    logits, cache = extend(first, target[:, :4], 0)
    found = [logits]
    for t in range(4, 7):
        logits, cache = extend(cache, target[:, t : t + 1], t)
        found.append(logits)
    assert oracle.relative(np.concatenate(found, axis=1), whole) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "num_kv_heads"),
    [
        ("sinusoidal", 0),
        ("relative", 0),
        ("relative_bias", 0),
        ("relative_bias", 1),
        ("rotary", 1),
    ],
)
def test_hypotheses_of_a_beam_have_the_logits_of_their_own_tokens(
    kind, num_kv_heads, monkeypatch
):
    monkeypatch.setattr(stack, "shares_past", lambda: True)
    config = dataclasses.replace(
        SMALL, positions=kind, num_kv_heads=num_kv_heads, max_length=S
    )
    params, (source, _) = (
        jax.tree.map(jnp.asarray, oracle.randomized(shapes(config))),
        some_ids(),
    )
    apply = functools.partial(Transformer(config).apply, {"params": params})
    hypotheses, length, rows = 4, 6, np.arange(3)[:, None]
    sources, valid = (np.repeat(x, hypotheses, axis=0) for x in (source, SOURCE_VALID))
    whole = jax.jit(apply)
    begin = jax.jit(functools.partial(apply, method=start), static_argnums=(2, 3))
    extend = jax.jit(functools.partial(apply, method=Transformer.extend))
    cache = begin(source, SOURCE_VALID, length, hypotheses)
    assert isinstance(cache.past, SharedPast)
    generator = np.random.default_rng(5)
    tokens = np.zeros((3, hypotheses, length), np.int32)
    for t in range(length):
        parents = generator.integers(hypotheses, size=(3, hypotheses))
        cache = cache.reorder(parents)
        tokens = tokens[rows, parents]
        new = generator.integers(config.target_vocab_size, size=(3, hypotheses))
        tokens[:, :, t] = new
        logits, cache = extend(cache, tokens[:, :, t].reshape(-1, 1), t)
        expected = whole(sources, tokens.reshape(-1, length), valid)[:, t]
        assert oracle.relative(logits[:, 0], expected) <= 1e-5


@pytest.mark.parametrize("kind", IN_ATTENTION)
def test_what_sees_what(kind):
    """Test the gradient of each output with respect to the embedding at each
    position.
    """
    config = dataclasses.replace(
        SMALL,
        positions=kind,
        num_encoder_layers=1,
        num_decoder_layers=2,
        tie_embeddings="none",
    )
    params, model = oracle.randomized(shapes(config)), Transformer(config)
    # every id occurs once, so rows of a table are positions
    source, target = np.arange(S)[None], np.arange(7)[None]
    source_valid, target_valid = np.arange(S)[None] != 4, np.arange(7)[None] != 2

    def run(tables):
        changed = params | {
            f"{side}_embedding": {"table": table} for side, table in tables.items()
        }
        logits = model.apply(
            {"params": changed}, source, target, source_valid, target_valid
        )
        return (logits @ normal(31))[0]

    tables = {
        side: params[f"{side}_embedding"]["table"] for side in ("source", "target")
    }
    jacobians = jax.jit(jax.jacrev(run))(tables)
    seen = {
        side: np.asarray((jacobian != 0).any(axis=-1))
        for side, jacobian in jacobians.items()
    }
    seen = {"source": seen["source"][:, :S], "target": seen["target"][:, :7]}
    np.testing.assert_array_equal(
        seen["target"], np.tri(7, dtype=bool) & target_valid | np.eye(7, dtype=bool)
    )
    np.testing.assert_array_equal(seen["source"], np.broadcast_to(source_valid, (7, S)))


@pytest.mark.parametrize("kind", IN_ATTENTION)
def test_attention_to_the_source_has_no_positions(kind):
    """Cross-attention has no positions, so the decoder does not depend on the order
    of the memory.
    """
    config = dataclasses.replace(SMALL, positions=kind)
    params, (_, target) = oracle.randomized(shapes(config)), some_ids()
    layers = params["decoder"]["layers"]
    assert ("relative" in layers["self_attention"]) == (kind == "relative")
    assert set(layers["cross_attention"]) == {"query", "key", "value", "output"}
    memory, valid = normal(3, S, 17), np.ones((3, S), bool)
    order = np.random.default_rng(0).permutation(S)

    @jax.jit
    def decode(memory):
        def run(model):
            cache = model.start(Memory(memory, valid), 7)
            return model.extend(cache, target, 0)[0]

        return nn.apply(run, Transformer(config))(
            {"params": jax.tree.map(jnp.asarray, params)}
        )

    assert oracle.relative(decode(memory[:, order]), decode(memory)) <= 1e-5


@pytest.mark.parametrize("kind", OF_ONE_ATTENTION)
def test_half_precision_stays_near(kind):
    module, x = (
        MultiHeadAttention(N, D, H, W, dtype="bfloat16", positions=kind),
        normal(B, S, D),
    )
    params = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x, x))["params"]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    params = oracle.randomized(params)
    found = module.apply({"params": params}, x, x)
    assert found.dtype == jnp.bfloat16
    assert (
        1e-4
        < oracle.relative(found, oracle.multi_head(params, x, x, positions=kind))
        <= 0.05
    )
    gradient = jax.jit(jax.grad(lambda p: module.apply({"params": p}, x, x).sum()))(
        params
    )
    exact = jax.jit(
        jax.grad(
            lambda p: module.clone(dtype="float32").apply({"params": p}, x, x).sum()
        )
    )(params)
    for name in params:
        for one, other in zip(
            jax.tree.leaves(gradient[name]), jax.tree.leaves(exact[name]), strict=True
        ):
            # that of a bias of keys may be 0, as it cancels in the softmax
            atol = 0.05 * max(np.abs(other).max(), 10)
            np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", POSITIONS)
def test_parameters_and_products_are_counted(kind):
    config, plain = (
        dataclasses.replace(SMALL, positions=kind),
        dataclasses.replace(SMALL, positions="none"),
    )
    assert num_parameters(config) == sum(
        leaf.size for leaf in jax.tree.leaves(shapes(config))
    )
    tables = {
        "relative": 5 * (2 * K + 1) * (6 + 5),
        "relative_bias": 2 * 6 * 7,
        "learned": 2 * 3 * 17,
    }
    more = tables.get(kind, 0)
    assert num_parameters(config) - num_parameters(plain) == more
    products = (
        2 * (2 * K + 1) * 7 * (6 + 5) * (2 * 13 + 3 * 11) if kind == "relative" else 0
    )
    assert forward_flops(config, 13, 11) - forward_flops(plain, 13, 11) == products


def test_big_with_relative_positions():
    """The big model of Shaw et al. 2018, Section 4.1: k = 8, 17 vectors for keys and
    17 for values in every layer.
    """
    relative = TransformerConfig(
        d_model=1024,
        d_ff=4096,
        num_heads=16,
        positions="relative",
        max_relative_distance=8,
    )
    assert num_parameters(relative) == 214_245_376 + 12 * 17 * (64 + 64)
    assert not list(relative.problems())


def test_problems():
    odd = (
        "must be even, because 'rotary' rotates pairs of features: "
        "change it or model.positions"
    )
    assert list(TransformerConfig(positions="rotary", head_dim=63).problems()) == [
        ("head_dim", odd)
    ]
    assert not list(TransformerConfig(positions="rotary", value_dim=63).problems())
    assert not list(TransformerConfig(head_dim=63).problems())
    assert list(TransformerConfig(max_relative_distance=0).problems()) == [
        ("max_relative_distance", "must be at least 1")
    ]


@pytest.mark.parametrize(
    ("initializer", "deviation"),
    [
        ("normal", 0.02),
        ("truncated_normal", 0.0176),
        ("xavier_uniform", (2 / (503 + 101)) ** 0.5),
    ],
)
def test_learned_positions_start_as_the_initializer_says(initializer, deviation):
    table = nn.unbox(
        Positions("learned", 503, 101, initializer).init(jax.random.key(0), 1)
    )["params"]["table"]
    np.testing.assert_allclose(table.std(), deviation, rtol=0.02)
    if initializer == "xavier_uniform":
        assert np.abs(table).max() <= 3**0.5 * deviation * 1.001


def test_positions_of_a_grid_are_those_of_its_rows_beside_those_of_its_columns():
    found = grid_positions(3, 5, 7)
    rows = oracle.sinusoids(3, 4)
    columns = oracle.sinusoids(5, 3)
    assert found.shape == (15, 7)
    for y, x in np.ndindex(3, 5):
        expected = np.concatenate([rows[y], columns[x]])
        np.testing.assert_allclose(found[5 * y + x], expected, atol=1e-6)


def test_scaled_angles():
    """Fast pairs keep their angles, slow ones are divided by the factor, and "dynamic"
    changes nothing up to the length of the training.
    """
    width, base, factor = 32, 1e5, 4.0
    plain = Scaling().periods(width, base, 7)
    linear = Scaling("linear", factor).periods(width, base, 7)
    np.testing.assert_allclose(linear, factor * plain, rtol=1e-12)
    for kind in ("llama3", "yarn"):
        scaling = Scaling(kind, factor, 2000, slow=1.0, fast=32.0)
        stretch = scaling.periods(width, base, 7) / plain
        turns = 2000 / (2 * np.pi * plain)
        np.testing.assert_allclose(stretch[turns > 40], 1, rtol=1e-12)
        np.testing.assert_allclose(stretch[turns < 0.8], factor, rtol=1e-12)
        assert (np.diff(stretch) > -1e-12).all()
        assert 1 < np.median(stretch) < factor
    dynamic = Scaling("dynamic", factor, length=10)
    np.testing.assert_allclose(dynamic.periods(width, base, 10), plain, rtol=1e-12)
    longer = dynamic.periods(width, base, 20)
    # the slowest pair is stretched by factor · 20 / 10 - (factor - 1)
    np.testing.assert_allclose(longer[-1] / plain[-1], 2 * factor - factor + 1)
    with pytest.raises(UserError, match="'dynamic': depends on the length"):
        dynamic.periods(width, base, None)


def test_yarn_scales_queries_and_keys():
    plain = rotary_waves(np.arange(5), 5, 8)
    scaling = Scaling("yarn", 1.0, 100)
    np.testing.assert_array_equal(rotary_waves(np.arange(5), 5, 8, 1e4, scaling), plain)
    scaling = Scaling("yarn", 4.0, 100)
    waves = rotary_waves(np.arange(5), 5, 8, 1e4, scaling)
    length = np.square(waves).reshape(5, 4, 2).sum(-1)
    np.testing.assert_allclose(np.sqrt(length), 0.1 * np.log(4) + 1, rtol=1e-6)
