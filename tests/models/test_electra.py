"""ELECTRA against NumPy float64: both networks, the draws of the generator, and what
they replace.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from helpers.sizes import SINGLE_STACK
from transformer_jax.models.bert import BertConfig
from transformer_jax.models.electra import Electra, replace, sample
from transformer_jax.models.layers import Head

B, T, V, P = 3, 11, 31, 2
VALID = np.arange(T) < np.array([11, 5, 1])[:, None]
TOKENS, SEGMENTS = (np.random.default_rng(n).integers(0, n, (B, T)) for n in (V, 3))
POSITIONS = np.array([[7, 3], [4, 0], [0, 0]])
SMALL = BertConfig(**SINGLE_STACK, num_segments=3, embedding_dim=13, vocab_multiple=8)
# the widths of the embeddings and of the generator: different, or the same
WIDTHS = [(13, 10), pytest.param(0, 17, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("embedding_dim", "width"), WIDTHS)
def test_both_networks_are_the_equations(embedding_dim, width):
    config = dataclasses.replace(SMALL, embedding_dim=embedding_dim)
    read = config.embedding_width
    small = dataclasses.replace(
        config,
        d_model=width,
        d_ff=9,
        num_layers=1,
        embedding_dim=0 if read == width else read,
    )
    model = Electra(config, small)
    ids = np.zeros((1, 1), np.int32)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids == 0))
    params = jax.tree.map(jnp.asarray, oracle.randomized(shapes["params"]))
    assert set(params) == {"bert", "generator", "replaced_tokens"}
    assert "pooler" not in params["bert"]
    assert ("embeddings_project" in params["bert"]) == bool(embedding_dim)
    assert ("embeddings_project" in params["generator"]) == (read != width)

    @jax.jit
    def run(params):
        variables = {"params": params}
        texts = (TOKENS, VALID, SEGMENTS)
        vectors, head = model.apply(variables, *texts, POSITIONS, method=model.generate)
        return model.apply(variables, *texts), head(vectors)

    found, generated = run(params)
    x = oracle.bert_layers(params["bert"], config, TOKENS, VALID, SEGMENTS)[-1]
    head = oracle.float64(params["replaced_tokens"])
    h = oracle.ACTIVATIONS["gelu"](oracle.linear(head["transform"], x))
    expected = oracle.linear(head["output"], h)[..., 0]
    assert found.dtype == np.float32
    assert oracle.relative(found, expected) <= 1e-5

    # a BERT with the embeddings of the discriminator
    encoder = {**params["bert"], **params["generator"]}
    x = oracle.bert_layers(encoder, small, TOKENS, VALID, SEGMENTS)[-1]
    at = np.take_along_axis(x, POSITIONS[..., None], axis=1)
    both = {"bert": params["bert"], "masked_lm": params["generator"]["masked_lm"]}
    expected = oracle.masked_lm(both, small, at)
    assert oracle.relative(generated[..., :V], expected) <= 1e-5


def test_draws_have_the_probabilities_of_the_softmax():
    """The deviation of each share of 40,000 draws is at most 4.5 standard errors."""
    rows, count, size = 10_000, 4, 9
    draw = np.random.default_rng(0)
    head = Head(jnp.asarray(draw.normal(size=(16, 5)), jnp.float32), None, 14)
    vector = draw.normal(size=5).astype(np.float32)
    vectors = np.broadcast_to(vector, (rows, count, 5))
    keys = jax.random.split(jax.random.key(1), rows)
    ids = np.asarray(jax.jit(sample, static_argnums=3)(head, vectors, keys, size))
    assert (ids.shape, ids.dtype) == ((rows, count), np.int32)
    logits = np.asarray(head.table, np.float64)[:size] @ vector
    p = oracle.softmax(logits)
    shares = np.bincount(ids.ravel(), minlength=size) / ids.size
    assert len(shares) == size
    errors = np.sqrt(p * (1 - p) / ids.size)
    assert (np.abs(shares - p) / errors).max() < 4.5
    # positions of a row are drawn independently: the chance that two are equal is Σp²
    same = (ids[:, 0] == ids[:, 1]).mean()
    assert same == pytest.approx((p**2).sum(), abs=4.5 * np.sqrt(0.25 / rows))
    again = jax.jit(sample, static_argnums=3)(head, vectors[5:8], keys[5:8], size)
    np.testing.assert_array_equal(again, ids[5:8])


def test_replacements_are_those_of_a_loop():
    draw = np.random.default_rng(0)
    tokens, new = draw.integers(0, 50, (4, 7)), draw.integers(50, 99, (4, 3))
    positions = np.array([draw.permutation(7)[:3] for _ in range(4)])
    counted = np.arange(3) < np.array([3, 2, 1, 0])[:, None]
    expected = tokens.copy()
    for b, p in zip(*np.nonzero(counted), strict=True):
        expected[b, positions[b, p]] = new[b, p]
    found = jax.jit(replace)(tokens, positions, counted, new)
    np.testing.assert_array_equal(found, expected)
