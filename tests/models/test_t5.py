"""T5 against NumPy float64; the sizes of the paper; initial values; dropout."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from helpers.closed_forms import num_parameters
from helpers.papers import T5
from transformer_jax.models.stack import Stack
from transformer_jax.models.t5 import COMMON, SIZES, VERSIONS, dropout, t5
from transformer_jax.models.transformer import Transformer, TransformerConfig
from transformer_jax.tasks.teacher_forcing import start

B, S, T = 3, 13, 11
SMALL = {
    "source_vocab_size": 31,
    "target_vocab_size": 31,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 17,
    "d_ff": 19,
    "num_heads": 3,
    "head_dim": 5,
    "value_dim": 5,
    "relative_buckets": 6,
    "max_bucket_distance": 7,
    "norm_epsilon": 0.1,
}
MODELS = {
    version: TransformerConfig(**COMMON | fields | SMALL | dropout(0.0))
    for version, fields in VERSIONS.items()
}
SOURCE_VALID = np.arange(S) < np.array([13, 7, 3])[:, None]
TARGET_VALID = np.arange(T) < np.array([5, 11, 2])[:, None]
SOURCE = np.random.default_rng(1).integers(0, 31, (B, S))
TARGET = np.random.default_rng(2).integers(0, 31, (B, T))


@functools.cache
def parameters(config):
    shapes = jax.eval_shape(
        Transformer(config).init, jax.random.key(0), SOURCE[:1], TARGET[:1]
    )
    return oracle.randomized(nn.unbox(shapes)["params"])


def logits(config, params, **options):
    apply = jax.jit(Transformer(config).apply)
    arguments = (SOURCE, TARGET, SOURCE_VALID, TARGET_VALID)
    return np.asarray(apply({"params": params}, *arguments, **options))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_model_is_the_equations(version):
    config = MODELS[version]
    params = parameters(config)
    found = logits(config, params)
    arguments = (SOURCE, TARGET, SOURCE_VALID, TARGET_VALID)
    expected = oracle.transformer(params, config, *arguments)
    assert oracle.relative(found, expected) <= 1e-5
    # each of the settings matters
    for key in ("positions", "scale_scores", "output_scale", "norm_epsilon"):
        value = {"positions": "none", "norm_epsilon": 0.2}.get(key)
        if value is None:
            value = not getattr(config, key)
        other = dataclasses.replace(config, **{key: value})
        changed = oracle.transformer(params, other, *arguments)
        assert oracle.relative(changed, expected) > 1e-3, key


@pytest.mark.parametrize("version", VERSIONS)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole(version):
    config = MODELS[version]
    variables = {"params": jax.tree.map(jnp.asarray, parameters(config))}
    whole = jax.jit(Transformer(config).apply)(variables, SOURCE, TARGET, SOURCE_VALID)
    apply = functools.partial(Transformer(config).apply, variables)
    cache = apply(SOURCE, SOURCE_VALID, T + 2, method=start)
    extend = jax.jit(functools.partial(apply, method=Transformer.extend))
    one, cache = extend(cache, TARGET[:, :3], 0)
    found = [one]
    for t in range(3, T):
        one, cache = extend(cache, TARGET[:, t : t + 1], t)
        found.append(one)
    assert oracle.relative(np.concatenate(found, axis=1), whole) <= 1e-5


@pytest.mark.parametrize("size", T5)
def test_parameters_of_the_papers_models(size):
    config = t5(size)
    assert not list(config.problems())
    assert num_parameters(config) == T5[size]
    ids = np.zeros((1, 1), np.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == T5[size]


def test_there_is_a_count_of_every_size():
    assert T5.keys() == SIZES.keys()


def test_there_are_no_biases_and_two_tables_of_positions():
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(parameters(MODELS["v1_1"]))
    ]
    assert not [path for path in paths if path.endswith("/bias")]
    tables = [path for path in paths if "relative_bias" in path]
    assert tables == ["decoder/relative_bias/table", "encoder/relative_bias/table"]


def test_a_bias_belongs_to_its_stack_and_its_heads():
    """The gradient of a table is not zero for the buckets that occur: decoders never
    look ahead, and so have all buckets for what is behind.
    """
    config = dataclasses.replace(MODELS["v1_1"], max_bucket_distance=40)
    params, model = parameters(config), Transformer(config)

    @jax.jit
    @jax.grad
    def gradient(params):
        logits = model.apply({"params": params}, SOURCE, TARGET)
        return (logits @ np.random.default_rng(3).normal(size=31)).sum()

    found = gradient(params)
    tables = [
        np.asarray(found[stack]["relative_bias"]["table"] != 0)
        for stack in ("encoder", "decoder")
    ]
    # 3 buckets to each side: 0, 1, up to 40. Nothing later has distance 0.
    expected = np.array([1, 1, 1, 0, 1, 1], bool)
    np.testing.assert_array_equal(tables[0], np.repeat(expected[:, None], 3, axis=1))
    # 0, 1, 2, then 3 to 40 in three ranges, of which the third begins at 16.9
    expected = np.array([1, 1, 1, 1, 1, 0], bool)
    np.testing.assert_array_equal(tables[1], np.repeat(expected[:, None], 3, axis=1))


DEVIATIONS = {
    "embedding/table": 1.0,
    "output/table": 211**-0.5,
    "relative_bias/table": 211**-0.5,
    "query/kernel": (211 * 23) ** -0.5,
    "(key|value)/kernel": 211**-0.5,
    "attention/output/kernel": (7 * 23) ** -0.5,
    "(gate|inner)/kernel": 211**-0.5,
    "outer/kernel": 307**-0.5,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_initial_values(version):
    config = dataclasses.replace(
        MODELS[version],
        source_vocab_size=503,
        target_vocab_size=503,
        d_model=211,
        d_ff=307,
        num_heads=7,
        head_dim=23,
        value_dim=23,
        relative_buckets=128,
        max_bucket_distance=128,
    )
    init = jax.jit(Transformer(config).init)
    params = nn.unbox(init(jax.random.key(0), SOURCE, TARGET))["params"]
    seen = set()
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("scale"):
            assert (leaf == 1).all()
            continue
        (pattern,) = (p for p in DEVIATIONS if re.search(f"{p}$", name))
        seen.add(pattern)
        np.testing.assert_allclose(leaf.std(), DEVIATIONS[pattern], rtol=0.06)
    assert seen == DEVIATIONS.keys() - ({"output/table"} if version == "v1_0" else ())


@pytest.mark.parametrize("name", dropout(0.0))
def test_each_rate_of_dropout_acts_when_given_a_key(name):
    config = dataclasses.replace(MODELS["v1_1"], **{name: 0.5})
    params = parameters(config)
    plain = logits(MODELS["v1_1"], params)
    np.testing.assert_array_equal(logits(config, params), plain)
    dropped = logits(config, params, rngs={"dropout": jax.random.key(0)})
    assert oracle.relative(dropped, plain) > 0.01


def test_dropout_acts_on_the_output_of_each_stack():
    config = dataclasses.replace(MODELS["v1_1"], final_dropout_rate=0.5)
    model, variables = Transformer(config), {"params": parameters(config)}
    rngs = {"dropout": jax.random.key(0)}
    memory = model.apply(variables, SOURCE, method=Transformer.encode, rngs=rngs)
    hidden = model.apply(
        variables, memory, TARGET, method=Transformer.hidden, rngs=rngs
    )
    for x in (memory.vectors, hidden):
        assert 0.3 < (np.asarray(x) == 0).mean() < 0.7


@pytest.mark.parametrize("name", ["blocked", "jax", "short", "splash", "cudnn"])
def test_implementations_without_a_bias_are_refused(name):
    config = dataclasses.replace(
        MODELS["v1_1"], attention_implementation=name, dtype="bfloat16", head_dim=8
    )
    config = dataclasses.replace(config, value_dim=8)
    rule = (
        f"is not supported by attention_implementation = {name!r}: set that to 'auto', "
        "or this to another value"
    )
    assert list(config.problems()) == [("positions", rule)]


def test_auto_adds_the_bias_to_long_sequences_too():
    """Without it, "auto" would compute them in blocks here."""
    config = dataclasses.replace(MODELS["v1_1"], num_encoder_layers=1)
    x = np.float32(np.random.default_rng(0).normal(size=(1, 211, 17)))
    outputs = []
    for name in ("auto", "einsum"):
        how = dataclasses.replace(config, attention_implementation=name)
        run = jax.jit(Stack(how, 1).apply)
        outputs.append(run({"params": one_layer(config)}, x))
    np.testing.assert_array_equal(*outputs)
    plain = jax.jit(Stack(dataclasses.replace(config, positions="none"), 1).apply)
    without = {k: v for k, v in one_layer(config).items() if k != "relative_bias"}
    assert oracle.relative(plain({"params": without}, x), outputs[0]) > 0.01


def one_layer(config):
    encoder = parameters(config)["encoder"]
    return encoder | {"layers": jax.tree.map(lambda x: x[:1], encoder["layers"])}


def test_problems():
    assert list(TransformerConfig(relative_buckets=3).problems()) == [
        ("relative_buckets", "must be at least 4, e.g. 32")
    ]
    assert list(TransformerConfig(max_bucket_distance=16).problems()) == [
        (
            "max_bucket_distance",
            "must be above 16, half of relative_buckets, e.g. 128",
        )
    ]
    untied = TransformerConfig(tie_embeddings="embeddings", source_vocab_size=7)
    ((field, rule),) = untied.problems()
    assert field == "tie_embeddings"
    assert rule.startswith("'embeddings' shares one table, but source_vocab_size = 7")
