"""The recurrent language model against NumPy float64, token by token; packed rows,
caches, dropout and counts.
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
from transformer_jax.models import counting, layers
from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig

B, T, V, D = 2, 7, 11, 5
TINY = RecurrentLMConfig(vocab_size=V, d_model=D)
TOKENS = np.random.default_rng(1).integers(0, V, (B, T))
VARIANTS = [{}, {"cell": "gru", "num_layers": 3, "tie_embeddings": True}]


def make(**changes):
    """Return a model and parameters for it."""
    model = RecurrentLM(dataclasses.replace(TINY, **changes))
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS))["params"]
    return model, {"params": jax.tree.map(jnp.asarray, oracle.randomized(shapes))}


@pytest.mark.parametrize("changes", VARIANTS, ids=["lstm", "gru, tied"])
def test_the_model_is_its_equations(changes):
    """Compare the whole, documents packed in a row, and a cache that reads a prompt
    and then single tokens.
    """
    model, variables = make(vocab_multiple=4, **changes)
    segments = np.array([[1, 1, 2, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]])

    @jax.jit
    def forward(variables):
        logits = model.apply(variables, TOKENS)
        return logits, model.apply(variables, TOKENS, None, segments)

    whole, packed = forward(variables)
    extend = jax.jit(
        functools.partial(model.apply, variables, method=RecurrentLM.extend)
    )
    cache = model.apply(variables, B, T, method=RecurrentLM.start)
    column, cache = extend(cache, TOKENS[:, :3], 0)
    columns = [column]
    for t in range(3, T):
        column, cache = extend(cache, TOKENS[:, t : t + 1], t)
        columns.append(column)
    cached = np.concatenate(columns, axis=1)
    assert whole.shape == (B, T, 12)
    assert whole.dtype == np.float32
    assert (np.asarray(jax.nn.softmax(whole))[..., V:] == 0).all()
    for row in range(B):
        expected = oracle.recurrent_lm(variables["params"], model.config, TOKENS[row])
        assert oracle.relative(whole[row, :, :V], expected) <= 1e-5
        assert oracle.relative(cached[row, :, :V], expected) <= 1e-5
        for number in range(1, 4):
            (places,) = np.nonzero(segments[row] == number)
            if places.size:
                alone = oracle.recurrent_lm(
                    variables["params"], model.config, TOKENS[row, places]
                )
                assert oracle.relative(packed[row, places, :V], alone) <= 1e-5


def test_rows_that_begin_later_ignore_what_comes_before():
    model, variables = make()
    start = np.array([0, 4])
    extend = jax.jit(
        functools.partial(model.apply, variables, method=RecurrentLM.extend)
    )
    cache = model.apply(variables, B, T, method=RecurrentLM.start)
    assert all(len(leaf) == B for leaf in jax.tree.leaves(cache))
    first, cache = extend(cache, TOKENS[:, :3], 0, start)
    second, _ = extend(cache, TOKENS[:, 3:], 3, start)
    found = np.concatenate([first, second], axis=1)
    for row in range(B):
        expected = oracle.recurrent_lm(
            variables["params"], TINY, TOKENS[row, start[row] :]
        )
        assert oracle.relative(found[row, start[row] :], expected) <= 1e-5


def test_what_sees_what():
    """Test the gradient of each output with respect to the embedding of each token.

    No id occurs twice.
    """
    model, variables = make()

    def run(table):
        changed = variables["params"] | {"embedding": {"table": table}}
        return model.apply({"params": changed}, np.arange(T)[None])[0].sum(axis=-1)

    jacobian = jax.jit(jax.jacrev(run))(variables["params"]["embedding"]["table"])
    np.testing.assert_array_equal(
        (jacobian != 0).any(axis=-1)[:, :T], np.tri(T, dtype=bool)
    )


def test_dropout_acts_between_layers_and_not_between_steps(monkeypatch):
    """It acts on the input of each layer and on the last output, at all positions at
    once.
    """
    model, variables = make(num_layers=3)
    run = functools.partial(model.apply, variables, TOKENS, method=RecurrentLM.hidden)
    drop, shapes = layers.dropout, []
    monkeypatch.setattr(
        layers,
        "dropout",
        lambda x, rate, key: shapes.append((x.shape, rate)) or drop(x, rate, key),
    )
    run()
    assert shapes == []
    x, _ = run(rngs={"dropout": jax.random.key(0)})
    assert shapes == [((B, T, D), 0.5)] * 4
    assert 0 < (x == 0).sum() < x.size


@pytest.mark.parametrize("changes", VARIANTS, ids=["lstm", "gru, tied"])
def test_parameters_and_products_are_counted(changes):
    model, variables = make(**changes)
    assert num_parameters(model.config) == sum(
        leaf.size for leaf in jax.tree.leaves(variables)
    )
    counted = counting.flops(model.apply, variables, TOKENS[:1])
    assert counted == forward_flops(model.config, T)


@pytest.mark.parametrize(("d_model", "millions"), [(650, 20), (1500, 66)])
def test_parameters_of_the_papers_models(d_model, millions):
    """The medium and the large model of Zaremba et al. 2014, as counted by Merity et
    al. 2017 (Table 2).
    """
    assert round(num_parameters(RecurrentLMConfig(d_model=d_model)) / 1e6) == millions


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architecture": "gpt"}, "architecture"),
        ({"cell": "rnn"}, "cell"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_config_problems(changes, field):
    config = dataclasses.replace(TINY, **changes)
    assert [name for name, _ in config.problems()] == [field]
    with pytest.raises(ValueError, match=f"RecurrentLMConfig.{field} = "):
        RecurrentLM(config).init(jax.random.key(0), TOKENS)
