"""ConvS2S against NumPy float64, position by position; what sees what; padding,
caches, dropout and initial values.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.closed_forms import forward_flops, num_parameters
from transformer_jax.models import counting
from transformer_jax.models.convs2s import (
    Affine,
    ConvS2S,
    Encoder,
    GatedConvolution,
    scale_gradient,
    windows,
)
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.layers import Dropout
from transformer_jax.tasks.teacher_forcing import start, teacher_forced

SOURCE = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])
TARGET = np.array([[1, 4, 5, 6], [1, 5, 6, 0]])
VALID = SOURCE != 0
V = 23
TINY = ConvS2SConfig(
    source_vocab_size=20,
    target_vocab_size=V,
    embedding_dim=6,
    d_model=5,
    num_encoder_layers=2,
    num_decoder_layers=3,
    max_length=13,
    vocab_multiple=4,
)
VARIANTS = [
    {},
    {"weight_norm": False},
    {"encoder_kernel_width": 5, "decoder_kernel_width": 4},
    {"encoder_kernel_width": 1, "decoder_kernel_width": 1, "num_decoder_layers": 1},
    {"encoder_kernel_width": 7, "decoder_kernel_width": 2, "num_encoder_layers": 1},
]
each_variant = pytest.mark.parametrize("changes", VARIANTS, ids=str)


def make(**changes):
    """Return a model and parameters for it."""
    model = ConvS2S(dataclasses.replace(TINY, **changes))
    shapes = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)
    return model, {"params": oracle.randomized(nn.unbox(shapes)["params"])}


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


@each_variant
def test_the_model_is_its_equations(changes):
    """Compare logits and weights for sentences of different lengths, and logits of a
    cache that reads word by word.
    """
    model, variables = make(**changes)

    @jax.jit
    def forward(variables):
        logits, sown = model.apply(
            variables, SOURCE, TARGET, VALID, mutable="intermediates"
        )
        cache = model.apply(variables, SOURCE, VALID, 4, method=start)
        return logits, model.attention_maps(sown["intermediates"]), cache

    extend = jax.jit(functools.partial(model.apply, method=ConvS2S.extend))
    logits, maps, cache = forward(variables)
    weights = maps["multi-step attention", "target", "source"]
    columns = []
    for t in range(TARGET.shape[1]):
        column, cache = extend(variables, cache, TARGET[:, t : t + 1], t)
        columns.append(column)
    cached = np.concatenate(columns, axis=1)
    assert logits.shape == (2, 4, 24)
    assert weights.shape == (2, model.config.num_decoder_layers, 1, 4, 5)
    for row in range(2):
        length = VALID[row].sum()
        expected, expected_weights = oracle.ConvS2S(model.config, variables["params"])(
            SOURCE[row, :length], TARGET[row]
        )
        assert oracle.relative(logits[row, :, :V], expected) < 1e-5
        assert oracle.relative(cached[row, :, :V], expected) < 1e-5
        assert oracle.relative(weights[row, :, 0, :, :length], expected_weights) < 1e-5
        assert (weights[row, ..., length:] == 0).all()


def test_a_window_and_a_gate_computed_by_hand():
    x = np.float32([[[0], [1], [2], [4]]])
    np.testing.assert_array_equal(windows(x, 3), [[[0, 1, 2], [1, 2, 4]]])
    # A = x_{t} + 10 x_{t+1}, and B = log 3, so that σ(B) = 0.75
    params = {
        "convolution": {
            "kernel": np.float32([[1, 0], [10, 0]]),
            "bias": np.float32([0, np.log(3)]),
        }
    }
    config = ConvS2SConfig(d_model=1, weight_norm=False)
    y = GatedConvolution(config, 2).apply({"params": params}, x)
    np.testing.assert_allclose(y, [[[7.5], [15.75], [31.5]]], rtol=1e-6)


def test_weights_are_directions_of_a_length():
    """Only the direction of v counts (Salimans and Kingma 2016, eq. 2)."""
    x = normal(2, 3, 4)
    params = {"kernel": normal(4, 5), "scale": normal(5), "bias": normal(5, seed=1)}
    map_ = Affine(TINY, 5)
    expected = map_.apply({"params": params}, x)
    longer = params | {"kernel": params["kernel"] * np.arange(1, 6)}
    found = map_.apply({"params": longer}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    twice = params | {"scale": 2 * params["scale"], "bias": 2 * params["bias"]}
    found = map_.apply({"params": twice}, x)
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-5)


@each_variant
def test_forward_flops(changes):
    """The count is that of the products in the program of one sentence."""
    model, variables = make(**changes, vocab_multiple=1)
    source, target = SOURCE[:1], TARGET[:1]
    counted = counting.flops(model.apply, variables, source, target)
    assert counted == forward_flops(model.config, 5, 4)


@each_variant
def test_parameters_are_counted(changes):
    model, variables = make(**changes, vocab_multiple=1)
    assert num_parameters(model.config) == sum(
        leaf.size for leaf in jax.tree.leaves(variables)
    )


@pytest.mark.parametrize("changes", VARIANTS[:3], ids=str)
def test_gradients(changes):
    """Gradients reach every parameter and are the slopes of the float64 equations,
    except that what goes through the encoder's output z is divided by the number of
    decoder layers (Section 3.4). What goes through e in the values is not.

    The ids in the padding, in the source and after the target, do not change them.
    """
    model, variables = make(**changes)

    @jax.jit
    def gradient(variables, source, target):
        def total(variables):
            logits = model.apply(variables, source, target, VALID)[..., :V]
            return (logits.at[1, 3].set(0) ** 2).sum()

        return jax.grad(total)(variables)

    found = gradient(variables, SOURCE, TARGET)
    other = gradient(
        variables, np.where(VALID, SOURCE, 11), np.where(TARGET == 0, 11, TARGET)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        assert np.isfinite(a).all()
        assert np.abs(a).max() > 0
        assert oracle.relative(b, a) < 1e-5

    def total(params, of_z):
        read = oracle.ConvS2S(model.config, params, of_z)
        return sum(
            (read(SOURCE[i, :s], TARGET[i, :t])[0] ** 2).sum()
            for i, s, t in ((0, 5, 4), (1, 3, 3))
        )

    params = variables["params"]
    for path, g in jax.tree.leaves_with_path(oracle.float64(found["params"])):
        length = np.linalg.norm(g)

        def moved(by, path=path, direction=g / length):
            return jax.tree.map_with_path(
                lambda at, p: np.float64(p) + (by * direction if at == path else 0),
                params,
            )

        more, less = moved(1e-5), moved(-1e-5)
        direct = (total(more, params) - total(less, params)) / 2e-5
        through_z = (total(params, more) - total(params, less)) / 2e-5
        slope = direct + through_z / model.config.num_decoder_layers
        assert abs(slope - length) < 2e-5 * length, jax.tree_util.keystr(path)


def test_a_scaled_gradient_leaves_the_value_as_it_is():
    x = normal(7)
    np.testing.assert_array_equal(scale_gradient(x, 0.3), x)
    gradient = jax.grad(lambda x: (scale_gradient(x, 0.3) ** 2).sum())(x)
    np.testing.assert_allclose(gradient, 0.6 * x, rtol=1e-6)


def test_initial_values():
    """Standard deviations are those of Section 3.5, and W is the drawn v."""
    config = ConvS2SConfig(
        source_vocab_size=500,
        target_vocab_size=400,
        embedding_dim=60,
        d_model=50,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout_rate=0.36,
        max_length=300,
    )
    ids = np.zeros((1, 1), int)
    params = jax.jit(ConvS2S(config).init)(jax.random.key(0), ids, ids)
    params = nn.unbox(params)["params"]
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    # 1 - 0.36 = 0.8²
    expected = {
        "encoder/first/kernel": 0.8 / math.sqrt(60),
        "encoder/block_0/convolution/kernel": 2 * 0.8 / math.sqrt(3 * 50),
        "encoder/last/kernel": 1 / math.sqrt(50),
        "decoder/first/kernel": 0.8 / math.sqrt(60),
        "decoder/block_0/convolution/kernel": 2 * 0.8 / math.sqrt(3 * 50),
        "decoder/attention_0/query/kernel": 1 / math.sqrt(50),
        "decoder/attention_0/context/kernel": 1 / math.sqrt(60),
        "decoder/last/kernel": 1 / math.sqrt(50),
        "output/kernel": 0.8 / math.sqrt(60),
        "source_embedding/table": 0.1,
        "source_positions/table": 0.1,
        "target_embedding/table": 0.1,
        "target_positions/table": 0.1,
    }
    drawn = {name for name in flat if name.endswith(("kernel", "table"))}
    assert drawn == expected.keys()
    for name, deviation in expected.items():
        assert abs(flat[name].std() / deviation - 1) < 0.05, name
        assert abs(flat[name].mean()) < 0.1 * deviation, name
    for name in flat.keys() - drawn:
        folder, _, kind = name.rpartition("/")
        if kind == "bias":
            assert (flat[name] == 0).all()
        else:
            inputs = 1 if folder == "output" else 0
            lengths = np.linalg.norm(flat[f"{folder}/kernel"], axis=inputs)
            np.testing.assert_allclose(flat[name], lengths, rtol=1e-5)


def test_the_encoder_preserves_the_variance():
    """Without the factor √0.5 of Section 3.4, the variance would grow by 2¹⁰, and with
    half the weights before a gate, it would fall.
    """
    config = dataclasses.replace(
        TINY, embedding_dim=64, d_model=64, num_encoder_layers=10, dropout_rate=0.0
    )
    e = 0.1 * normal(4, 30, 64)
    encoder = Encoder(config)
    valid = np.ones((4, 30), bool)
    variables = jax.jit(encoder.init)(jax.random.key(0), e, valid)
    memory = jax.jit(encoder.apply)(variables, e, valid)
    assert 0.7 < memory.vectors.std() / e.std() < 1.4


def changes_by(function, ids, at):
    """Return True for each row and position of the result of `function` (B, T, D)
    that changes with the id at a position.
    """
    other = ids.copy()
    other[:, at] = 11
    return (function(other) != function(ids)).any(axis=-1)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_no_position_of_the_decoder_sees_a_later_one(width):
    model, variables = make(decoder_kernel_width=width, num_decoder_layers=1)
    target = np.arange(1, 9)[None].repeat(2, axis=0)
    logits = jax.jit(lambda target: model.apply(variables, SOURCE, target, VALID))
    for at in range(8):
        seen = at + np.arange(width)
        changed = np.flatnonzero(changes_by(logits, target, at)[0])
        np.testing.assert_array_equal(changed, seen[seen < 8])


@pytest.mark.parametrize(("width", "layers"), [(1, 2), (3, 1), (3, 2), (5, 1)])
def test_the_encoder_sees_its_neighbours_on_both_sides(width, layers):
    model, variables = make(encoder_kernel_width=width, num_encoder_layers=layers)
    source = np.arange(1, 10)[None]

    @jax.jit
    def z(source):
        return model.apply(variables, source, method=ConvS2S.encode).vectors

    reach = layers * (width // 2)
    changed = np.flatnonzero(changes_by(z, source, 4)[0])
    np.testing.assert_array_equal(changed, np.arange(4 - reach, 5 + reach))


def test_padding_changes_nothing():
    """Logits are those of rows on their own, of other ids in the padding, and of a
    longer row.
    """
    model, variables = make(encoder_kernel_width=5)
    apply = jax.jit(model.apply)
    logits = apply(variables, SOURCE, TARGET, VALID)
    alone = apply(variables, SOURCE[1:, :3], TARGET[1:])
    assert oracle.relative(logits[1:, :, :V], alone[..., :V]) < 1e-6
    other = np.where(VALID, SOURCE, 11)
    np.testing.assert_array_equal(apply(variables, other, TARGET, VALID), logits)
    longer = apply(
        variables,
        np.pad(SOURCE, ((0, 0), (0, 4)), constant_values=12),
        np.pad(TARGET, ((0, 0), (0, 3))),
        np.pad(VALID, ((0, 0), (0, 4))),
    )
    assert oracle.relative(longer[:, :4, :V], logits[..., :V]) < 1e-6


def test_an_empty_source_gives_no_context():
    model, variables = make()
    valid = VALID & np.array([[True], [False]])
    apply = jax.jit(functools.partial(model.apply, mutable="intermediates"))
    logits, sown = apply(variables, SOURCE, TARGET, valid)
    assert np.isfinite(logits).all()
    (weights,) = sown["intermediates"]["weights"]
    assert (weights[1] == 0).all()
    np.testing.assert_allclose(weights[0].sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_pieces_of_any_length_give_the_logits_of_the_whole(width):
    """A cache keeps enough of what was read, also if pieces are shorter or longer than
    a window.
    """
    model, variables = make(decoder_kernel_width=width)
    target = np.arange(1, 9)[None].repeat(2, axis=0)
    whole = jax.jit(model.apply)(variables, SOURCE, target, VALID)
    begin = functools.partial(model.apply, method=start)
    cache = jax.jit(begin, static_argnums=3)(variables, SOURCE, VALID, 8)
    extend = jax.jit(functools.partial(model.apply, method=ConvS2S.extend))
    at = 0
    for length in (1, 4, 1, 2):
        piece = target[:, at : at + length]
        logits, cache = extend(variables, cache, piece, at)
        expected = whole[:, at : at + length, :V]
        assert oracle.relative(logits[..., :V], expected) < 1e-6
        at += length
    for kept in cache.past.inputs:
        assert kept.shape == (2, width - 1, 5)


def test_hypotheses_share_their_source():
    """Adjacent rows of a cache that share a source give the results of rows with a
    source of their own.
    """
    model, variables = make()
    extend = jax.jit(functools.partial(model.apply, method=ConvS2S.extend))
    begin = functools.partial(model.apply, method=start)
    begin = jax.jit(begin, static_argnums=(3, 4))
    alone = begin(variables, SOURCE, VALID, 4)
    twice = begin(variables, SOURCE, VALID, 4, 2)
    tokens = np.array([[4], [5], [6], [7]])
    found, extended = extend(variables, twice, tokens, 0)
    for j in range(2):
        expected, one = extend(variables, alone, tokens[j::2], 0)
        assert oracle.relative(found[j::2, :, :V], expected[..., :V]) < 1e-6
        for a, b in zip(extended.past.inputs, one.past.inputs, strict=True):
            assert oracle.relative(a[j::2], b) < 1e-6


def test_more_positions_than_there_are_tables_for_are_refused():
    model, variables = make()
    with pytest.raises(ValueError, match=r"length=14: must be at most max_length = 13"):
        model.apply(variables, SOURCE, VALID, 14, method=start)
    long = np.ones((1, 14), int)
    with pytest.raises(ValueError, match=r"14 positions is longer than max_length"):
        model.apply(variables, long, method=ConvS2S.encode)


def test_bfloat16():
    """Products in bfloat16 have 8 bits of precision, so logits change by less than 3
    %.
    """
    model, variables = make()
    half, _ = make(dtype="bfloat16")
    logits, rounded = (
        jax.jit(m.apply)(variables, SOURCE, TARGET, VALID)[..., :V]
        for m in (model, half)
    )
    assert rounded.dtype == np.float32
    assert 0 < oracle.relative(rounded, logits) < 0.03


def test_dropout_acts_only_with_a_key():
    model, variables = make()
    apply = jax.jit(
        lambda rngs: model.apply(variables, SOURCE, TARGET, VALID, rngs=rngs)
    )
    without = apply(None)
    np.testing.assert_array_equal(without, apply(None))
    one, other = (apply({"dropout": jax.random.key(key)}) for key in (1, 2))
    assert np.abs(one - other)[..., :V].max() > 0.01
    assert np.abs(one - without)[..., :V].max() > 0.01


def test_dropout_acts_on_embeddings_inputs_of_convolutions_and_the_output():
    """Section 4.2. The widths of a source and a target position are E = 6 or D = 5."""
    model, variables = make()
    shapes = []

    def record(call, arguments, options, context):
        if isinstance(context.module, Dropout):
            shapes.append(arguments[0].shape)
        return call(*arguments, **options)

    with nn.intercept_methods(record):
        jax.eval_shape(model.apply, variables, SOURCE, TARGET, VALID)
    source = [(2, 5, 6), (2, 5, 5), (2, 5, 5)]
    assert shapes == [*source, (2, 4, 6), *[(2, 4, 5)] * 3, (2, 4, 6)]


def test_a_model_can_be_used_twice_in_one_method():
    """Both calls have the same parameters."""

    def twice(model, source, target, valid):
        memory = model.encode(source, valid)
        first = model.head()(model.hidden(memory, target))
        cache = model.start(memory, 4)
        second, _ = model.extend(cache, target, 0)
        return first, second

    model, variables = make()
    apply = jax.jit(functools.partial(model.apply, method=twice))
    first, second = apply(variables, SOURCE, TARGET, VALID)
    np.testing.assert_allclose(first, second, rtol=1e-6)
    with_init = jax.eval_shape(
        functools.partial(model.init, method=twice),
        jax.random.key(0),
        SOURCE,
        TARGET,
        VALID,
    )
    assert jax.tree.structure(nn.unbox(with_init)["params"]) == jax.tree.structure(
        variables["params"]
    )


def test_forward_mode():
    """Compare the slope in a direction, computed in forward mode, with the gradient."""
    model, variables = make()
    direction = jax.tree.map(lambda p: normal(*p.shape, seed=7), variables)

    def total(variables):
        x, head = model.apply(variables, SOURCE, VALID, TARGET, method=teacher_forced)
        return (head(x)[..., :V] ** 2).sum()

    gradient = jax.jit(jax.grad(total))(variables)
    _, slope = jax.jit(lambda *x: jax.jvp(total, *x))((variables,), (direction,))
    expected = sum(
        np.vdot(np.float64(g), d)
        for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
