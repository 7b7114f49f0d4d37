"""Layers and models can be exported with `jax.export` for any batch and length, and
serialized.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from helpers import oracle
from helpers.small_models import MODELS, PAIRS
from transformer_jax.errors import UserError
from transformer_jax.models.attention import MultiHeadAttention
from transformer_jax.models.stack import BlockConfig, Stack

B, S, T, D = 3, 5, 4, 8
LIMITS = ("s <= 16", "t <= 16")


def parameters(module, *args):
    shapes = jax.eval_shape(module.init, jax.random.key(0), *args)
    return {"params": oracle.randomized(nn.unbox(shapes)["params"])}


def check_export(module, shapes, *args):
    """Export a module for arrays of symbolic `shapes`, call it after a round trip,
    compare with the module itself.
    """
    pytest.importorskip(
        "flatbuffers", reason="serializing exported functions needs flatbuffers"
    )

    scope = export.SymbolicScope(
        [limit for limit in LIMITS if limit[0] in "".join(shapes)]
    )
    symbols = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), x.dtype)
        for shape, x in zip(shapes, args, strict=True)
    ]
    params, apply = parameters(module, *args), jax.jit(module.apply)
    data = export.export(apply)(params, *symbols).serialize()
    found, expected = (
        export.deserialize(data).call(params, *args),
        apply(params, *args),
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
SOURCE = np.random.default_rng(1).integers(0, 11, (B, S)).astype(np.int32)
TARGET = np.random.default_rng(2).integers(0, 11, (B, T)).astype(np.int32)
SOURCE_VALID = np.arange(S)[None] < np.array([[5], [3], [4]])
VALID = np.arange(T)[None] < np.array([[4], [1], [2]])


@pytest.mark.parametrize("positions", ["none", "relative", "relative_bias", "rotary"])
def test_stacks_with_each_kind_of_positions(positions):
    config = BlockConfig(
        d_model=D, d_ff=5, num_heads=2, head_dim=4, value_dim=4, positions=positions
    )
    check_export(Stack(config, 2), ["b,t,8"], X)


@pytest.mark.parametrize("implementation", ["auto", "jax"])
def test_attention_with_each_general_implementation(implementation):
    module = MultiHeadAttention(2, D, 4, 4, implementation=implementation)
    check_export(module, ["b,t,8", "b,t,8"], X, X)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model = MODELS[name]
    if name in PAIRS:
        check_export(model, ["b,s", "b,t", "b,s"], SOURCE, TARGET, SOURCE_VALID)
    else:
        check_export(model, ["b,t", "b,t"], TARGET, VALID)


@pytest.mark.parametrize("name", PAIRS)
def test_decoding_of_encoder_decoders(name):
    def decode(model, source, target, valid):
        cache = model.start(model.encode(source, valid), 16)
        return model.extend(cache, target, 0)[0]

    model = MODELS[name]
    params = parameters(model, SOURCE, TARGET)
    (b, s, t) = export.symbolic_shape("b, s, t", constraints=LIMITS)
    shapes = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((b, s), (b, t))]

    @jax.jit
    def call(params, source, target, valid):
        return model.apply(params, source, target, valid, method=decode)

    exported = export.export(call)(
        params, *shapes, jax.ShapeDtypeStruct((b, s), jnp.bool_)
    )
    found = exported.call(params, SOURCE, TARGET, SOURCE_VALID)
    np.testing.assert_allclose(
        found, call(params, SOURCE, TARGET, SOURCE_VALID), atol=1e-5
    )


@pytest.mark.parametrize("name", ["GPT", "RecurrentLM"])
def test_decoding_of_language_models_with_a_cache_as_an_argument(name):
    @jax.jit
    def extend(params, cache, tokens, position):
        return model.apply(params, cache, tokens, position, method=model.extend)

    model = MODELS[name]
    params = parameters(model, TARGET)
    cache = model.apply(params, B, 16, method=model.start)
    (b,) = export.symbolic_shape("b")
    free = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), cache
    )
    exported = export.export(extend)(
        params, free, jax.ShapeDtypeStruct((b, 1), jnp.int32), jnp.int32(0)
    )
    arguments = params, cache, TARGET[:, :1], jnp.int32(2)
    for found, expected in zip(
        *map(jax.tree.leaves, (exported.call(*arguments), extend(*arguments))),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_boxed_parameters_can_be_serialized():
    pytest.importorskip(
        "flatbuffers", reason="serializing exported functions needs flatbuffers"
    )
    module = MultiHeadAttention(2, D, 4, 4)
    params, apply = jax.jit(module.init)(jax.random.key(0), X, X), jax.jit(module.apply)
    data = export.export(apply)(params, X, X).serialize()
    np.testing.assert_allclose(
        export.deserialize(data).call(params, X, X), apply(params, X, X), atol=1e-6
    )


def test_a_length_without_a_limit_is_refused_where_positions_have_one():
    model = MODELS["GPT"]
    tokens = jax.ShapeDtypeStruct(export.symbolic_shape("b, t"), jnp.int32)
    with pytest.raises(
        UserError, match=r"t positions: must be at most 16 .*constraints=\['t <= 16'\]"
    ):
        export.export(jax.jit(model.apply))(parameters(model, TARGET), tokens)


def test_blocks_need_fixed_lengths():
    module = MultiHeadAttention(2, D, 4, 4, implementation="blocked")
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 8"), jnp.float32)
    with pytest.raises(
        UserError, match="'blocked': does not support the symbolic lengths t and t"
    ):
        export.export(jax.jit(module.apply))(parameters(module, X, X), x, x)
