"""Wrong masks, ids and shapes raise errors that say what is expected, in every
model.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.processes import on_devices
from helpers.small_models import MODELS, PAIRS
from transformer_jax.errors import UserError
from transformer_jax.models import checks, masks
from transformer_jax.models.attention import (
    MultiHeadAttention,
    attention_weights,
    dot_product_attention,
)
from transformer_jax.models.kernels.blocked import blocked_attention
from transformer_jax.models.kernels.library import library_attention
from transformer_jax.models.stack import Block, BlockConfig, Stack

B, T, D = 2, 3, 8
CONFIG = BlockConfig(d_model=D, d_ff=5, num_heads=2, head_dim=4, value_dim=4)
X = np.ones((B, T, D), np.float32)
VALID = np.array([[True, True, True], [True, False, False]])
ADDITIVE = np.where(VALID, 0.0, -1e9).astype(np.float32)
IDS = np.array([[1, 2, 3], [4, 0, 0]], np.int32)


def trace(module, *args, **options):
    """Initialize a module without computing anything: errors of shapes and types do
    not need values.
    """
    return jax.eval_shape(
        lambda key: module.init(key, *args, **options), jax.random.key(0)
    )


ATTENTION = MultiHeadAttention(2, D, 4, 4)
LAYERS = {
    "MultiHeadAttention": lambda mask: trace(ATTENTION, X, X, mask=mask),
    "dot_product_attention": lambda mask: dot_product_attention(
        *[np.ones((B, T, 2, 4), np.float32)] * 3, mask=mask
    ),
    "attention_weights": lambda mask: attention_weights(jnp.ones((B, 2, T, T)), mask),
    "library_attention": lambda mask: library_attention(
        *[np.ones((B, T, 2, 4), np.float32)] * 3, mask=mask
    ),
    "Block": lambda mask: trace(Block(CONFIG), X, mask),
    "Stack": lambda mask: trace(Stack(CONFIG, 2), X, mask),
    "cross-attention": lambda mask: trace(
        Stack(CONFIG, 2, cross=True), X, None, X, mask
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_an_additive_mask_is_refused(layer):
    message = (
        r"dtype float32 and shape \(2, 1, 1, 3\): must be boolean .*True \(or 1\) = may"
        r" attend.*== 0"
    )
    with pytest.raises(UserError, match=message):
        LAYERS[layer](ADDITIVE[:, None, None])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_mask_without_the_axes_of_heads_and_queries_is_refused(layer):
    with pytest.raises(
        UserError,
        match=r"shape \(2, 3\): must .* with 4 axes; .*valid\[:, None, None, :\]",
    ):
        LAYERS[layer](VALID)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_mask_for_other_lengths_is_refused(layer):
    with pytest.raises(
        UserError,
        match=r"shape \(2, 1, 1, 5\): must be boolean and broadcast to \(2, 2, 3, 3\)",
    ):
        LAYERS[layer](np.ones((B, 1, 1, 5), bool))


def test_masks_of_zeros_and_ones_equal_boolean_masks():
    mask = VALID[:, None, None]
    for module in (ATTENTION, MultiHeadAttention(2, D, 4, 4, implementation="jax")):
        params = module.init(jax.random.key(0), X, X)
        x = jax.random.normal(jax.random.key(1), X.shape)
        expected = module.apply(params, x, x, mask=mask)
        np.testing.assert_array_equal(
            module.apply(params, x, x, mask=mask.astype(np.int32)), expected
        )


def test_integers_other_than_zero_and_one_are_refused():
    with pytest.raises(UserError, match=r"dtype int32 .*, but it contains -10000"):
        LAYERS["Stack"](np.where(VALID, 0, -10000).astype(np.int32)[:, None, None])


def test_lists_are_no_masks():
    with pytest.raises(UserError, match="of type list: must be a JAX or NumPy array"):
        LAYERS["Stack"]([[[[True]]]])


def test_a_padding_mask_of_another_length_is_refused():
    with pytest.raises(UserError, match=r"has \(2, 5\) positions: must have \(2, 3\)"):
        LAYERS["Stack"](masks.padding(np.ones((B, 5), bool)))


def test_kernels_take_no_arrays_as_masks():
    message = (
        r"mask: is an array of shape \(2, 1, 1, 3\), but .* needs rules; combine"
        r" masks\.CAUSAL, .* or use 'einsum'"
    )
    with pytest.raises(UserError, match=message):
        blocked_attention(*[jnp.ones((B, T, 2, 4))] * 3, mask=VALID[:, None, None])


@pytest.mark.parametrize("other", [masks.ALL, masks.CAUSAL, masks.Mask(allowed=VALID)])
def test_masks_of_floats_cannot_be_combined(other):
    with pytest.raises(UserError, match="dtype float32"):
        masks.Mask(allowed=ADDITIVE) & other
    with pytest.raises(UserError, match="but it contains -10000"):
        other & masks.Mask(allowed=np.where(VALID, 0, -10000))


def test_a_boolean_bias_is_refused():
    with pytest.raises(
        UserError, match="dtype bool: must be floating; pass a boolean mask as mask="
    ):
        trace(ATTENTION, X, X, bias=VALID[:, None, None])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            X[0],
            (
                r"shape \(3, 8\): must be \(batch, positions, 8\); for one sequence, .*"
                r" x\[None\]"
            ),
        ),
        (X[..., :7], r"shape \(2, 3, 7\): must be \(batch, positions, 8\); .* d_model"),
    ],
)
@pytest.mark.parametrize(
    "module", [Block(CONFIG), Stack(CONFIG, 2)], ids=["Block", "Stack"]
)
def test_vectors_of_another_shape_are_refused(module, x, message):
    with pytest.raises(UserError, match=message):
        trace(module, x)


def test_memory_of_another_width_is_refused():
    with pytest.raises(
        UserError,
        match=r"memory has shape \(2, 3, 7\): must be \(batch, positions, 8\)",
    ):
        trace(ATTENTION, X, X[..., :7])


def call(name, ids=IDS, valid=VALID):
    """Run a model on `ids`, with `valid` as the last argument, outside of `jax.jit`.

    Only `ids` and `valid` vary.
    """
    model = MODELS[name]
    args = (IDS, IDS) if name in PAIRS else (IDS,)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *args, VALID))
    params = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), params)
    return model.apply(params, ids, *args[1:], valid)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS + 8, r"contains 12: must be at least 0 and below 11"),
        (IDS - 1, r"contains -1: must be at least 0 and below 11"),
        (
            IDS.astype(np.float32),
            r"has dtype float32: must be integers .*astype\('int32'\)",
        ),
        (
            IDS[0],
            r"has shape \(3,\): must be integers \(batch, positions\); .*\[None\]",
        ),
    ],
    ids=["large", "negative", "float", "flat"],
)
def test_wrong_ids_are_refused(name, ids, message):
    with pytest.raises(UserError, match=message):
        call(name, ids)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("valid", "message"),
    [
        (ADDITIVE, r"dtype float32 and shape \(2, 3\): must be boolean .* = padding"),
        (np.ones((B, 4), bool), r"has shape \(2, 4\): must be \(2, 3\)"),
        (
            np.ones((B, 1, 1, T), bool),
            r"has shape \(2, 1, 1, 3\): must be boolean \(batch, positions\)",
        ),
    ],
    ids=["additive", "long", "four axes"],
)
def test_wrong_validity_is_refused(name, valid, message):
    with pytest.raises(UserError, match=message):
        call(name, valid=valid)


@pytest.mark.parametrize("name", ["GPTClassifier", "RecurrentSeq2Seq", "RecurrentLM"])
def test_padding_before_tokens_is_refused_where_only_lengths_are_used(name):
    with pytest.raises(UserError, match="has tokens after padding"):
        call(name, valid=VALID[:, ::-1])


def test_values_are_not_checked_while_tracing():
    assert (
        jax.jit(lambda ids: checks.check_ids("ids", ids, 1) or ids)(IDS).shape
        == IDS.shape
    )
    assert checks.values(IDS) is IDS


def test_layers_work_without_compilation():
    stack = Stack(CONFIG, 1)
    params = jax.jit(stack.init)(jax.random.key(0), X)
    expected = jax.jit(stack.apply)(params, X, masks.CAUSAL)
    with jax.disable_jit():
        np.testing.assert_allclose(
            stack.apply(params, X, masks.CAUSAL), expected, atol=1e-5
        )


def test_positions_beyond_the_table_are_refused():
    model = MODELS["GPT"]
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)
    params = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), nn.unbox(shapes))
    with pytest.raises(
        UserError, match="positions contains 16: must be at least 0 and below 16"
    ):
        model.apply(params, IDS, None, None, np.full_like(IDS, 16))
    with pytest.raises(
        UserError, match="a sequence of 17 positions is longer than max_length = 16"
    ):
        model.apply(params, IDS, None, None, 14)


EXPLICIT = """
import flax.linen as nn, jax, numpy as np
from transformer_jax.errors import UserError
from transformer_jax.models.stack import BlockConfig, Stack
stack = Stack(BlockConfig(d_model=8, d_ff=5, num_heads=2, head_dim=4, value_dim=4), 2)
x = np.ones((2, 3, 8), np.float32)
mesh = jax.make_mesh((2,), ("data",))
sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
params = stack.init(jax.random.key(0), x)
for rules, value in ((), sharded), ((("batch", "data"),), x):
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        try:
            jax.jit(stack.apply)(params, value)
        except UserError as error:
            print(error)
automatic = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,) * 1)
with jax.set_mesh(automatic), nn.logical_axis_rules((("batch", "data"),)):
    print(jax.jit(stack.apply)(params, x).sharding.spec)
"""


def test_a_mesh_with_explicit_axes_is_refused_with_the_call_that_works():
    *refused, works = on_devices(2, EXPLICIT).splitlines()
    assert len(refused) == 2
    for line in refused:
        assert re.search(
            r"make_mesh\(shape, \('data',\), axis_types=\(jax.sharding.AxisType.Auto,\)"
            r" \* 1\)",
            line,
        )
    assert "data" in works
