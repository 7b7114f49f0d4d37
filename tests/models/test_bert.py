"""BERT and its heads against NumPy float64; the inputs that each output sees; sizes
of the models in the paper.
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
from transformer_jax.models.bert import (
    Bert,
    BertConfig,
    Classifier,
    Pretraining,
    TokenClassifier,
)
from transformer_jax.models.positions import IN_ATTENTION, POSITIONS

B, T, V, CLASSES = 3, 11, 31, 5
SMALL = BertConfig(**SINGLE_STACK, num_segments=3)
VALID = np.arange(T) < np.array([11, 5, 1])[:, None]
TOKENS, SEGMENTS = (np.random.default_rng(n).integers(0, n, (B, T)) for n in (V, 3))


def initial(model):
    ids = np.zeros((1, 1), np.int32)
    return nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids == 0))[
        "params"
    ]


@functools.cache
def shapes(config):
    return initial(Bert(config))


def parameters(config):
    return jax.tree.map(jnp.asarray, oracle.randomized(shapes(config)))


def encode(config, params, *args, **kwargs):
    return jax.tree.map(
        np.asarray, jax.jit(Bert(config).apply)({"params": params}, *args, **kwargs)
    )


def apart(config):
    """Return the relative distances of x and of the pooled vector from the
    equations.
    """
    params = parameters(config)
    both = (
        encode(config, params, TOKENS, VALID, SEGMENTS),
        oracle.bert(params, config, TOKENS, VALID, SEGMENTS),
    )
    assert all(found.dtype == np.float32 for found in both[0])
    return [
        oracle.relative(found, expected) for found, expected in zip(*both, strict=True)
    ]


CASES = {
    **{kind: {"positions": kind} for kind in POSITIONS},
    "pre": {"norm": "pre", "activation": "relu"},
    "causal": {"causal": True},
    "narrow embeddings": {"embedding_dim": 11, "pooler_activation": "gelu"},
    "RMSNorm, gated": {
        "norm_type": "rms_norm",
        "feed_forward": "gated",
        "feed_forward_bias": False,
    },
    "scaled, padded": {
        "embedding_scale": True,
        "vocab_multiple": 8,
        "attention_bias": False,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_equations(name):
    assert max(apart(dataclasses.replace(SMALL, **CASES[name]))) <= 1e-5


def test_without_segments_all_are_the_first():
    params = parameters(SMALL)
    found, expected = (
        encode(SMALL, params, TOKENS, VALID),
        encode(SMALL, params, TOKENS, VALID, 0 * SEGMENTS),
    )
    assert oracle.relative(found[0], expected[0]) <= 1e-6
    other = encode(SMALL, params, TOKENS, VALID, 0 * SEGMENTS + 1)
    assert oracle.relative(other[0], expected[0]) > 0.01


def test_what_is_added_to_the_embeddings():
    """Adding the embeddings of the tokens once more doubles them."""
    params = parameters(SMALL)
    added = params["embedding"]["table"][TOKENS]
    apply = jax.jit(Bert(SMALL).apply)
    found = apply({"params": params}, TOKENS, VALID, SEGMENTS, added)
    doubled = {**params, "embedding": {"table": 2 * params["embedding"]["table"]}}
    expected = apply({"params": doubled}, TOKENS, VALID, SEGMENTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert oracle.relative(ours, theirs) <= 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["learned", *IN_ATTENTION])
def test_what_sees_what(kind, causal):
    """Test the gradient of each output with respect to the embedding of each token.

    No id occurs twice.

    The classifier sees the same tokens as the pooled vector. In a causal model, only
    that of the last token, 8, sees all tokens and no padding.
    """
    config = dataclasses.replace(SMALL, positions=kind, causal=causal)
    params = oracle.randomized(initial(Classifier(config, CLASSES)))
    valid = (np.arange(T) != 4) & (np.arange(T) < 9)

    def run(table):
        bert = params["bert"] | {"embedding": {"table": table}}
        x, pooled = Bert(config).apply(
            {"params": bert}, np.arange(T)[None], valid[None]
        )
        logits = Classifier(config, CLASSES).apply(
            {"params": params | {"bert": bert}}, np.arange(T)[None], valid[None]
        )
        return x[0] @ np.arange(17.0), pooled[0].sum(), logits[0] @ np.arange(5.0)

    jacobians = jax.jit(jax.jacrev(run))(params["bert"]["embedding"]["table"])
    x, pooled, classes = (
        np.asarray((jacobian != 0).any(axis=-1))[..., :T] for jacobian in jacobians
    )
    seen = valid & (np.tri(T, dtype=bool) if causal else True)
    np.testing.assert_array_equal(x, seen | np.eye(T, dtype=bool))
    np.testing.assert_array_equal(pooled, valid)
    np.testing.assert_array_equal(classes, valid)


def test_the_classifier_is_a_linear_map_of_the_pooled_vector():
    model = Classifier(dataclasses.replace(SMALL, vocab_multiple=8), CLASSES)
    params = oracle.randomized(initial(model))
    found = np.asarray(
        jax.jit(model.apply)({"params": params}, TOKENS, VALID, SEGMENTS)
    )
    _, pooled = oracle.bert(params["bert"], model.config, TOKENS, VALID, SEGMENTS)
    assert found.shape == (B, CLASSES)
    assert found.dtype == np.float32
    assert (
        oracle.relative(found, oracle.linear(oracle.float64(params["head"]), pooled))
        <= 1e-5
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_classifiers_of_tokens_and_of_features(norm, layers):
    """Without `layers`, tags are a linear map of the last layer.

    With them, both read the last layers, concatenated.
    """
    config = dataclasses.replace(SMALL, norm=norm)
    model = TokenClassifier(config, CLASSES, layers)
    params = oracle.randomized(initial(model))
    x = np.concatenate(
        oracle.bert_layers(params["bert"], config, TOKENS, VALID, SEGMENTS)[
            -(layers or 1) :
        ],
        axis=-1,
    )
    found = np.asarray(
        jax.jit(model.apply)({"params": params}, TOKENS, VALID, SEGMENTS)
    )
    assert found.dtype == np.float32
    assert (
        oracle.relative(found, oracle.linear(oracle.float64(params["head"]), x)) <= 1e-5
    )
    if layers:
        classify = jax.jit(Classifier(config, CLASSES, layers).apply)
        mean = np.array(
            [row[seen].mean(axis=0) for row, seen in zip(x, VALID, strict=True)]
        )
        found = np.asarray(classify({"params": params}, TOKENS, VALID, SEGMENTS))
        assert (
            oracle.relative(found, oracle.linear(oracle.float64(params["head"]), mean))
            <= 1e-5
        )


def test_features_have_no_dropout():
    """The head is the identity: dropout before it leaves zeros and doubled features."""
    model = TokenClassifier(
        dataclasses.replace(SMALL, dropout_rate=0.5, attention_dropout_rate=0.5),
        2 * 17,
        2,
    )
    params = oracle.randomized(initial(model)) | {
        "head": {"kernel": np.eye(34), "bias": np.zeros(34)}
    }
    plain, dropped = (
        np.asarray(jax.jit(model.apply)({"params": params}, TOKENS, VALID, rngs=rngs))
        for rngs in ({}, {"dropout": jax.random.key(0)})
    )
    kept = dropped != 0
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_allclose(dropped[kept], 2 * plain[kept], rtol=1e-5)


HEADS = {
    "post": {},
    "pre, padded": {"norm": "pre", "activation": "relu", "vocab_multiple": 8},
    "half": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_pretraining(name):
    config = dataclasses.replace(SMALL, **HEADS[name])
    model, tolerance = Pretraining(config), 0.05 if name == "half" else 1e-5
    params = oracle.randomized(initial(model))
    x, pooled = oracle.bert(params["bert"], config, TOKENS, VALID, SEGMENTS)
    places = np.random.default_rng(2).integers(0, T, (B, 7))

    @jax.jit
    def run(positions):
        vectors, head, follows = model.apply(
            {"params": params}, TOKENS, VALID, SEGMENTS, positions
        )
        return head(vectors), follows

    for positions in (places, None):
        logits, follows = map(np.asarray, run(positions))
        chosen = (
            x if positions is None else np.stack([x[b, places[b]] for b in range(B)])
        )
        assert logits.dtype == follows.dtype == np.float32
        assert (
            oracle.relative(logits[..., :V], oracle.masked_lm(params, config, chosen))
            <= tolerance
        )
        assert (logits[..., V:] < -1e38).all()
        expected = oracle.linear(oracle.float64(params["next_sentence"]), pooled)
        assert oracle.relative(follows, expected) <= tolerance
    assert logits.shape[-1] == (32 if config.vocab_multiple == 8 else V)


def test_the_masked_lm_head_is_tied_to_the_embeddings():
    """A logit has a gradient with respect to the embedding of its token, even if
    that token is not in the text.
    """
    model = Pretraining(SMALL)
    params = oracle.randomized(initial(model))

    def logit(params):
        vectors, head, _ = model.apply({"params": params}, TOKENS[:1] % 5, VALID[:1])
        return head(vectors)[0, 0, 23]

    gradient = jax.jit(jax.grad(logit))(params)
    rows = np.asarray((gradient["bert"]["embedding"]["table"] != 0).any(axis=-1))
    assert set(np.flatnonzero(rows)) == {*(TOKENS[0] % 5).tolist(), 23}
    np.testing.assert_array_equal(gradient["masked_lm"]["bias"], np.arange(V) == 23)


def test_attention_maps():
    heads = (
        Classifier(SMALL, CLASSES),
        TokenClassifier(SMALL, CLASSES, 2),
        Pretraining(SMALL),
    )
    for model in (Bert(SMALL), *heads):
        params = oracle.randomized(initial(model))
        apply = jax.jit(functools.partial(model.apply, mutable="intermediates"))
        _, sown = apply({"params": params}, TOKENS, VALID)
        maps = model.attention_maps(sown["intermediates"])
        assert list(maps) == [("self-attention", "text", "text")]
        weights = np.asarray(maps["self-attention", "text", "text"])
        assert weights.shape == (B, 2, 5, T, T)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
        assert (weights[1, ..., :5] > 0).all()
        assert (weights[1, ..., 5:] == 0).all()


def test_everything_starts_small():
    """Kernels, tokens, segments and positions start normal with deviation 0.02.

    Values are cut off at two deviations, which leaves a deviation of 0.0176.
    """
    config = dataclasses.replace(
        SMALL,
        d_model=101,
        d_ff=211,
        vocab_size=503,
        max_length=307,
        num_segments=101,
        vocab_multiple=8,
    )
    model = Classifier(config, 61)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS, VALID))["params"]
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        leaf = leaf[:503] if "embedding" in jax.tree_util.keystr(path) else leaf
        if name in ("kernel", "table", "segments"):
            np.testing.assert_allclose(leaf.std(), 0.0176, rtol=0.04)
            assert 0.0395 < np.abs(leaf).max() <= 0.04
        else:
            assert (leaf == (name == "scale")).all()
    assert (params["bert"]["embedding"]["table"][503:] == 0).all()


@pytest.mark.parametrize(
    "name", ["dropout_rate", "attention_dropout_rate", "feed_forward_dropout_rate"]
)
def test_dropout_acts_when_given_a_key(name):
    off = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
    config = dataclasses.replace(SMALL, **(off | {name: 0.5}))
    params = parameters(config)
    plain, _ = encode(dataclasses.replace(SMALL, **off), params, TOKENS, VALID)
    np.testing.assert_array_equal(encode(config, params, TOKENS, VALID)[0], plain)
    dropped, _ = encode(
        config, params, TOKENS, VALID, rngs={"dropout": jax.random.key(0)}
    )
    assert oracle.relative(dropped, plain) > 0.01


def test_dropout_acts_on_embeddings_and_on_the_pooled_vector():
    """Layers that give zero leave only the embeddings.

    The pooler gives tanh of its bias.
    """
    config = dataclasses.replace(SMALL, norm="pre", dropout_rate=0.5)
    model, rngs = Classifier(config, CLASSES), {"dropout": jax.random.key(0)}
    params = oracle.randomized(initial(model))
    silent = jax.tree.map(jnp.zeros_like, params["bert"]["encoder"]["layers"])
    bert = params["bert"] | {"encoder": params["bert"]["encoder"] | {"layers": silent}}
    apply = jax.jit(Bert(config).apply)
    run = functools.partial(apply, {"params": bert}, TOKENS, VALID)
    assert (run()[0] != run(rngs=rngs)[0]).any(axis=-1).all()

    pooler = {"kernel": np.zeros((17, 17), np.float32), "bias": np.ones(17, np.float32)}
    params = params | {"bert": bert | {"pooler": pooler}}
    head = {
        "kernel": np.eye(17, dtype=np.float32)[:, :CLASSES],
        "bias": np.zeros(CLASSES, np.float32),
    }
    logits = np.asarray(
        jax.jit(model.apply)(
            {"params": params | {"head": head}}, TOKENS, VALID, rngs=rngs
        )
    )
    np.testing.assert_allclose(logits[logits != 0], 2 * np.tanh(1), rtol=1e-5)
    assert 0 < (logits == 0).sum() < logits.size


def test_half_precision():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    assert 1e-4 < min(apart(config)) < max(apart(config)) <= 0.05


def test_too_long_a_sequence_is_refused():
    with pytest.raises(
        ValueError, match="a sequence of 14 positions is longer than max_length = 13"
    ):
        Bert(SMALL).apply(
            {"params": parameters(SMALL)},
            np.zeros((1, 14), int),
            np.ones((1, 14), bool),
        )


def test_forward_mode():
    """Compare the tangent of the pooled vector in a direction with differences of
    the equations.
    """
    params, direction = parameters(SMALL), oracle.randomized(shapes(SMALL), seed=1)

    def pooled(params):
        return Bert(SMALL).apply({"params": params}, TOKENS, VALID, SEGMENTS)[1]

    _, tangent = jax.jit(lambda *x: jax.jvp(pooled, *x))((params,), (direction,))

    def moved(by):
        at = jax.tree.map(lambda p, d: np.float64(p) + by * d, params, direction)
        return oracle.bert(at, SMALL, TOKENS, VALID, SEGMENTS)[1]

    assert oracle.relative(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6) <= 1e-4


@pytest.mark.parametrize("name", papers.BERT)
def test_parameters_of_the_papers_models(name):
    changes, expected, with_heads = papers.BERT[name]
    config = BertConfig(**changes)
    assert num_parameters(config) == expected
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes(config))) == expected
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(initial(Pretraining(config))))
        == with_heads
    )
    heads = config.d_model**2 + 5 * config.d_model + config.vocab_size + 2
    assert with_heads - expected == heads
    assert not list(config.problems())


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_products_are_counted(name):
    config = dataclasses.replace(SMALL, **CASES[name])
    padding = -V % config.vocab_multiple * 17
    assert (
        num_parameters(config)
        == sum(leaf.size for leaf in jax.tree.leaves(shapes(config))) - padding
    )
    variables = {"params": parameters(config)}
    counted = counting.flops(Bert(config).apply, variables, TOKENS[:1], VALID[:1])
    assert forward_flops(config, T) == counted
    np.testing.assert_array_equal(
        forward_flops(config, np.array([0, T])), [0, forward_flops(config, T)]
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architecture": "gpt"}, "architecture"),
        ({"num_segments": -1}, "num_segments"),
        ({"embedding_init": "zeros"}, "embedding_init"),
        ({"init": "zeros"}, "init"),
        ({"norm_epsilon": 0.0}, "norm_epsilon"),
        ({"positions": "rotary", "head_dim": 63}, "head_dim"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(changes, field):
    config = BertConfig(**changes)
    assert [name for name, _ in config.problems()] == [field]
    with pytest.raises(ValueError, match=rf"BertConfig\.{field} = "):
        Classifier(config, CLASSES).init(jax.random.key(0), TOKENS, VALID)
