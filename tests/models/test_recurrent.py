"""Recurrent models against NumPy float64, word by word; effects of padding, caches
and dropout.
"""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.closed_forms import forward_flops, num_parameters
from transformer_jax.models import counting
from transformer_jax.models.recurrent import RecurrentSeq2Seq
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.tasks.teacher_forcing import start, teacher_forced

SOURCE = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])

TARGET = np.array([[1, 4, 5, 6], [1, 5, 6, 0]])

VALID = SOURCE != 0

V = 23

TINY = RecurrentConfig(
    source_vocab_size=20,
    target_vocab_size=V,
    embedding_dim=6,
    encoder_dim=8,
    d_model=8,
    attention_dim=5,
    num_heads=2,
    readout_dim=7,
    vocab_multiple=4,
)

TWO_WAYS = {"bidirectional": True, "encoder_dim": 12}
EQUAL = {"embedding_dim": 6, "encoder_dim": 6}  # without an encoder

VARIANTS = [
    {},
    {"cell": "lstm", "num_layers": 2, "reverse_source": True},
    {"summary": "every_step"},
    {"summary": "every_step", "readout": "maxout", **TWO_WAYS},
    {"attention": "additive", **TWO_WAYS},
    {"attention": "additive", "readout": "maxout", "cell": "lstm", **TWO_WAYS},
    {"attention": "concat"},
    {
        "attention": "dot",
        "input_feeding": True,
        "cell": "lstm",
        "num_layers": 2,
        "bidirectional": True,
    },
    {"attention": "general", **TWO_WAYS},
    {"attention": "general", "local_window": 2, **TWO_WAYS},
    {"attention": "scaled_dot", "damping": True},
    {"attention": "multi_head", **TWO_WAYS},
    {"encoder": "none", "attention": "additive", "context_gate": True, **EQUAL},
    {"encoder": "none", "attention": "multi_head", "cell": "lstm", **EQUAL},
    {"encoder": "none", "summary": "every_step", "num_layers": 2, **EQUAL},
]


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


def make(**changes):
    """Return a model and parameters for it."""
    model = RecurrentSeq2Seq(dataclasses.replace(TINY, **changes))
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET))[
        "params"
    ]
    return model, {"params": oracle.randomized(shapes)}


@pytest.mark.parametrize(
    "changes",
    VARIANTS,
    ids=lambda changes: "-".join(map(str, changes.values())) or "gru",
)
def test_model_is_its_equations(changes):
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
        return logits, sown["intermediates"]["weights"][0], cache

    extend = jax.jit(functools.partial(model.apply, method=RecurrentSeq2Seq.extend))
    logits, weights, cache = forward(variables)
    columns = []
    for t in range(TARGET.shape[1]):
        column, cache = extend(variables, cache, TARGET[:, t : t + 1], t)
        columns.append(column)
    cached = np.concatenate(columns, axis=1)
    assert logits.shape == (2, 4, 24)
    for row in range(2):
        length = VALID[row].sum()
        expected, expected_weights = oracle.Recurrent(
            model.config, variables["params"]
        )(SOURCE[row, :length], TARGET[row])
        assert oracle.relative(logits[row, :, :V], expected[:, :V]) < 1e-5
        assert oracle.relative(cached[row, :, :V], expected[:, :V]) < 1e-5
        if expected_weights is None:
            assert weights.shape == (2, 0, 4, 5)
        else:
            assert oracle.relative(weights[row, :, :, :length], expected_weights) < 1e-5
            assert (weights[row, :, :, length:] == 0).all()


@pytest.mark.parametrize(
    "changes",
    VARIANTS,
    ids=lambda changes: "-".join(map(str, changes.values())) or "gru",
)
def test_forward_flops(changes):
    """The count is that of the products in the program of one sentence."""
    model, variables = make(**changes, vocab_multiple=1)
    source, target = SOURCE[:1], TARGET[:1]
    counted = counting.flops(model.apply, variables, source, target)
    assert counted == forward_flops(model.config, 5, 4)


@pytest.mark.parametrize(
    "changes",
    VARIANTS,
    ids=lambda changes: "-".join(map(str, changes.values())) or "gru",
)
def test_parameters_are_counted(changes):
    model, variables = make(**changes, vocab_multiple=1)
    assert num_parameters(model.config) == sum(
        leaf.size for leaf in jax.tree.leaves(variables)
    )


@pytest.mark.parametrize(
    "changes",
    VARIANTS,
    ids=lambda changes: "-".join(map(str, changes.values())) or "gru",
)
def test_gradients(changes):
    """Gradients reach every parameter and are the slopes of the float64 equations.

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
    assert all(
        np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(found)
    )
    other = gradient(
        variables, np.where(VALID, SOURCE, 11), np.where(TARGET == 0, 11, TARGET)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        assert oracle.relative(b, a) < 1e-5

    def total(params):
        read = oracle.Recurrent(model.config, params)
        return sum(
            (read(SOURCE[i, :s], TARGET[i, :t])[0][:, :V] ** 2).sum()
            for i, s, t in ((0, 5, 4), (1, 3, 3))
        )

    for path, g in jax.tree.leaves_with_path(oracle.float64(found["params"])):
        length = np.linalg.norm(g)

        def moved(by, path=path, direction=g / length):
            return jax.tree.map_with_path(
                lambda at, p: np.float64(p) + (by * direction if at == path else 0),
                variables["params"],
            )

        slope = (total(moved(1e-5)) - total(moved(-1e-5))) / 2e-5
        assert abs(slope - length) < 1e-5 * length, jax.tree_util.keystr(path)


@pytest.mark.parametrize("attention", ["none", "additive", "general", "multi_head"])
def test_bfloat16(attention):
    """Products in bfloat16 have 8 bits of precision, so logits change by less than 3
    %.
    """
    model, variables = make(attention=attention)
    half, _ = make(attention=attention, dtype="bfloat16")
    logits, rounded = (
        jax.jit(m.apply)(variables, SOURCE, TARGET, VALID)[..., :V]
        for m in (model, half)
    )
    assert rounded.dtype == np.float32
    assert 0 < oracle.relative(rounded, logits) < 0.03


@pytest.mark.parametrize(
    "changes",
    [
        {"summary": "every_step"},
        {"attention": "additive"},
        {"attention": "general", "local_window": 2},
        {"attention": "multi_head", "input_feeding": True},
    ],
    ids=str,
)
def test_beams_share_their_source(changes):
    """Neighbouring rows of a cache that share a source give the results of rows with
    a source of their own.
    """
    model, variables = make(bidirectional=True, **changes)
    extend = jax.jit(functools.partial(model.apply, method=RecurrentSeq2Seq.extend))
    started = jax.jit(
        lambda variables, hypotheses: model.apply(
            variables, SOURCE, VALID, 4, hypotheses, method=start
        ),
        static_argnums=1,
    )
    cache = started(variables, 1)
    twice = started(variables, 2)
    tokens = np.array([[4], [5], [6], [7]])
    found, extended = extend(variables, twice, tokens, 0)
    for beam in range(2):
        expected, alone = extend(variables, cache, tokens[beam::2], 0)
        assert oracle.relative(found[beam::2, :, :V], expected[..., :V]) < 1e-6
        for a, b in zip(
            jax.tree.leaves(extended.past), jax.tree.leaves(alone.past), strict=True
        ):
            assert oracle.relative(a[beam::2], b) < 1e-6


def test_dropout_acts_only_with_a_key():
    model, variables = make(attention="additive", num_layers=2)
    apply = jax.jit(
        lambda rngs: model.apply(variables, SOURCE, TARGET, VALID, rngs=rngs)
    )
    without = apply(None)
    np.testing.assert_array_equal(without, apply(None))
    one, other = (apply({"dropout": jax.random.key(key)}) for key in (1, 2))
    assert np.abs(one - other)[..., :V].max() > 0.01
    assert np.abs(one - without)[..., :V].max() > 0.01


def test_teacher_forcing():
    """At rate 0, the decoder reads its most probable words.

    At rate 1, or without a key, it reads the target.
    """
    forcing = {
        "teacher_forcing": 1.0,
        "teacher_forcing_end": 0.0,
        "teacher_forcing_steps": 10,
    }
    model, variables = make(attention="additive", dropout_rate=0.0, **forcing)
    key = {"dropout": jax.random.key(0)}

    @jax.jit
    def logits(target, step, rngs=None):
        x, head = model.apply(
            variables,
            SOURCE,
            VALID,
            target,
            None,
            step,
            method=teacher_forced,
            rngs=rngs,
        )
        return head(x)

    def reading(coins):
        """Return the logits if all rows read their most probable word wherever a
        coin is False.
        """
        read = TARGET.copy()
        for t, coin in enumerate(coins, start=1):
            if not coin:
                read[:, t] = logits(read, 0)[:, t - 1].argmax(axis=-1)
        return logits(read, 0)

    np.testing.assert_array_equal(logits(TARGET, 10), logits(TARGET, 0))
    np.testing.assert_allclose(
        logits(TARGET, 10, rngs=key), reading([False] * 3), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        logits(TARGET, 0, rngs=key), reading([True] * 3), rtol=1e-5, atol=1e-6
    )
    possible = [reading(coins) for coins in itertools.product([True, False], repeat=3)]
    fell = set()
    for i in range(6):
        half = logits(TARGET, 5, rngs={"dropout": jax.random.key(i)})
        apart = [np.abs(half - x)[..., :V].max() for x in possible]
        assert min(apart) < 1e-5
        fell.add(int(np.argmin(apart)))
    assert len(fell) > 2


@pytest.mark.parametrize("attention", ["additive", "multi_head"])
def test_forward_mode(attention):
    """Compare the slope in a direction, computed in forward mode, with the gradient."""
    model, variables = make(attention=attention)
    direction = jax.tree.map(lambda p: normal(*p.shape, seed=7), variables)

    def total(variables):
        return (model.apply(variables, SOURCE, TARGET, VALID)[..., :V] ** 2).sum()

    gradient = jax.jit(jax.grad(total))(variables)
    _, slope = jax.jit(lambda *x: jax.jvp(total, *x))((variables,), (direction,))
    expected = sum(
        np.vdot(np.float64(g), d)
        for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
