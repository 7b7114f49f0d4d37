"""The Transformer against NumPy float64; the inputs that each output sees; the sizes
in the table of the paper.
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
from helpers.papers import BASE, BIG, TABLE_3
from helpers.sizes import ENCODER_DECODER
from transformer_jax.models import counting
from transformer_jax.models.layers import Dropout
from transformer_jax.models.stack import Block, BlockConfig, unstack_layers
from transformer_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    annotated,
    shift_right,
)
from transformer_jax.tasks.teacher_forcing import start

B, T, S = 5, 11, 13
TINY = TransformerConfig(
    **ENCODER_DECODER,
    head_dim=23,
    value_dim=29,
    max_length=37,
    dropout_rate=0.5,
)
TWO_VOCABULARIES = dataclasses.replace(
    TINY, source_vocab_size=41, tie_embeddings="decoder"
)
SMALL = dataclasses.replace(
    TINY,
    num_encoder_layers=1,
    num_decoder_layers=2,
    d_model=5,
    d_ff=7,
    num_heads=2,
    head_dim=3,
    value_dim=3,
)


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng([seed, *shape]).normal(size=shape))


@functools.cache
def shapes(config):
    ids = np.zeros((1, 1), np.int32)
    return nn.unbox(
        jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)
    )["params"]


def parameters(config):
    return oracle.randomized(shapes(config))


def some_ids(config, rows=B, source_length=S, length=T):
    rng = np.random.default_rng(1)
    source = rng.integers(0, config.source_vocab_size, (rows, source_length))
    return source, rng.integers(0, config.target_vocab_size, (rows, length))


@functools.cache
def compiled(config):
    return jax.jit(Transformer(config).apply)


def logits(config, params, *args, **kwargs):
    return np.asarray(compiled(config)({"params": params}, *args, **kwargs))


ORACLE_CASES = {
    "base": TINY,
    "pre": dataclasses.replace(TINY, norm="pre", vocab_multiple=8),
    "learned": dataclasses.replace(
        TWO_VOCABULARIES, positions="learned", activation="gelu", vocab_multiple=8
    ),
    "pre, no positions": dataclasses.replace(
        TINY, norm="pre", positions="none", activation="gelu_tanh"
    ),
    "untied": dataclasses.replace(
        TWO_VOCABULARIES, tie_embeddings="none", activation="silu", vocab_multiple=8
    ),
    "untied, pre, output bias": dataclasses.replace(
        TWO_VOCABULARIES,
        tie_embeddings="none",
        norm="pre",
        positions="learned",
        output_bias=True,
        norm_epsilon=0.1,
    ),
    "halves, norms of embeddings, output bias of a shared table": dataclasses.replace(
        TINY,
        positions="sinusoidal_halves",
        embedding_norm=True,
        output_bias=True,
        vocab_multiple=8,
    ),
    "output bias of the decoder's table": dataclasses.replace(
        TWO_VOCABULARIES, output_bias=True
    ),
    "no attention bias": dataclasses.replace(TINY, attention_bias=False),
    "unscaled": dataclasses.replace(TINY, embedding_scale=False, init="normal"),
    "one head, unrolled": dataclasses.replace(TINY, num_heads=1, unroll=2),
    "gated, multi-query, RMSNorm": dataclasses.replace(
        TINY,
        feed_forward="gated",
        num_kv_heads=1,
        norm="pre",
        norm_type="rms_norm",
        embedding_norm=True,
    ),
}


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_the_model_is_the_equations(name):
    config = ORACLE_CASES[name]
    params, (source, target) = parameters(config), some_ids(config)
    source_valid = np.arange(S) < np.array([13, 7, 3, 1, 5])[:, None]
    target_valid = np.arange(T) < np.array([5, 11, 2, 7, 1])[:, None]
    found = logits(config, params, source, target, source_valid, target_valid)
    expected = oracle.transformer(
        params, config, source, target, source_valid, target_valid
    )
    assert found.dtype == np.float32
    assert oracle.relative(found[..., : config.target_vocab_size], expected) <= 1e-5
    padding = found[..., config.target_vocab_size :]
    assert padding.shape[-1] == -config.target_vocab_size % config.vocab_multiple
    assert (
        np.asarray(jax.nn.softmax(found))[..., config.target_vocab_size :] == 0
    ).all()


def test_without_valid_nothing_is_padding():
    params, (source, target) = parameters(SMALL), some_ids(SMALL)
    found = logits(SMALL, params, source, target)
    assert (
        oracle.relative(found, oracle.transformer(params, SMALL, source, target))
        <= 1e-5
    )
    explicit = logits(
        SMALL, params, source, target, np.ones((B, S), bool), np.ones((B, T), bool)
    )
    assert oracle.relative(found, explicit) <= 1e-6


def test_any_pattern_of_padding_and_an_empty_source():
    rng = np.random.default_rng(2)
    source_valid, target_valid = rng.random((B, S)) < 0.5, rng.random((B, T)) < 0.5
    source_valid[3] = False
    target_valid[1, :3] = False
    params, (source, target) = parameters(TINY), some_ids(TINY)
    found = logits(TINY, params, source, target, source_valid, target_valid)
    expected = oracle.transformer(
        params, TINY, source, target, source_valid, target_valid
    )
    assert oracle.relative(found, expected) <= 1e-5


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("cross", [False, True])
def test_a_block_is_the_equations(cross, norm):
    config = dataclasses.replace(TINY, norm=norm)
    x, memory = normal(B, T, 17), normal(B, S, 17)
    own = np.random.default_rng(0).random((B, 1, T, T)) < 0.7
    seen = np.random.default_rng(1).random((B, 1, 1, S)) < 0.7
    block, args = Block(config, cross), (x, own, memory, seen) if cross else (x, own)
    params = oracle.randomized(
        nn.unbox(jax.eval_shape(block.init, jax.random.key(0), *args))["params"]
    )
    found, cache = jax.jit(block.apply)({"params": params}, *args)
    assert cache is None
    if cross:
        expected = oracle.decoder_block(params, x, memory, own, seen, config)
    else:
        expected = oracle.encoder_block(params, x, own, config)
    assert oracle.relative(found, expected) <= 1e-5


def test_layers_start_different_and_as_one_layer_does():
    config = dataclasses.replace(TINY, d_model=53, num_heads=3)
    ids = np.zeros((1, 1), np.int32)
    params = nn.unbox(jax.jit(Transformer(config).init)(jax.random.key(0), ids, ids))[
        "params"
    ]
    query = np.asarray(
        params["decoder"]["layers"]["cross_attention"]["query"]["kernel"]
    )
    assert query.shape == (3, 53, 3, 23)
    assert (query[0] != query[1]).all()
    limit = np.sqrt(6 / (53 + 3 * 23))
    for kernel in query:
        assert 0.98 * limit < np.abs(kernel).max() <= limit
    assert (
        query
        != np.asarray(params["decoder"]["layers"]["self_attention"]["query"]["kernel"])
    ).all()
    norms = params["decoder"]["layers"]["cross_attention_residual"]["layer_norm"]
    assert (norms["scale"] == 1).all()
    assert (norms["bias"] == 0).all()


# Learned positions are added to the embeddings, so the gradient of their table is the
# gradient of the inputs of encoder and decoder, position by position.
BY_GRADIENT = dataclasses.replace(SMALL, positions="learned", max_length=S)
SOURCE_VALID = np.arange(S) < np.array([13, 7, 3])[:, None]
ALL_VALID = {"source": np.ones((3, S), bool), "target": np.ones((3, T), bool)}


@jax.jit
def jacobians(source_valid, target_valid):
    """Return the derivatives of logits and memory, (3, outputs, positions, D), by each
    table of positions.
    """
    params, (source, target) = parameters(BY_GRADIENT), some_ids(BY_GRADIENT, rows=3)
    model = Transformer(BY_GRADIENT)

    def run(tables):
        variables = {"params": params | tables}
        memory = model.apply(variables, source, source_valid, method=model.encode)
        logits = model.apply(variables, source, target, source_valid, target_valid)
        return {"memory": memory[0] @ normal(5), "logits": logits @ normal(31)}

    return jax.jacrev(run)(
        {name: params[name] for name in ("source_positions", "target_positions")}
    )


def sensitivities(
    side,
    source_valid=ALL_VALID["source"],
    target_valid=ALL_VALID["target"],
    output="logits",
):
    """Return an array (3, outputs, inputs), True where the output depends on that
    position of `side`.
    """
    found = jacobians(source_valid, target_valid)[output]
    jacobian = np.asarray(found[f"{side}_positions"]["table"])
    inputs = ALL_VALID[side].shape[1]
    assert (jacobian[:, :, inputs:] == 0).all()
    return (jacobian != 0).any(axis=-1)[:, :, :inputs]


def test_the_decoder_is_causal():
    np.testing.assert_array_equal(
        sensitivities("target"), np.broadcast_to(np.tri(T, dtype=bool), (3, T, T))
    )


def test_nothing_depends_on_target_padding_but_its_own_output():
    target_valid = np.ones((3, T), bool)
    target_valid[1, [0, 4]] = False
    target_valid[2, 6:] = False
    seen = np.tri(T, dtype=bool) & target_valid[:, None, :] | np.eye(T, dtype=bool)
    np.testing.assert_array_equal(
        sensitivities("target", SOURCE_VALID, target_valid), seen
    )


def test_every_output_depends_on_every_source_token_and_on_no_padding():
    seen = np.broadcast_to(SOURCE_VALID[:, None, :], (3, T, S))
    np.testing.assert_array_equal(sensitivities("source", SOURCE_VALID), seen)


def test_the_encoder_is_bidirectional():
    seen = SOURCE_VALID[:, None, :] | np.eye(S, dtype=bool)
    np.testing.assert_array_equal(
        sensitivities("source", SOURCE_VALID, output="memory"), seen
    )


def test_padded_ids_do_not_matter():
    params, (source, target) = parameters(SMALL), some_ids(SMALL)
    source_valid = np.arange(S) < np.array([13, 7, 3, 1, 5])[:, None]
    target_valid = np.arange(T) < np.array([5, 11, 2, 7, 1])[:, None]
    found = logits(SMALL, params, source, target, source_valid, target_valid)
    other_source, other_target = (
        np.where(source_valid, source, 3),
        np.where(target_valid, target, 3),
    )
    assert (other_source != source).any()
    assert (other_target != target).any()
    other = logits(
        SMALL, params, other_source, other_target, source_valid, target_valid
    )
    np.testing.assert_array_equal(other[target_valid], found[target_valid])


def test_cross_attention_asks_from_the_decoder_and_looks_at_the_encoder():
    """The gradient of a kernel vanishes if the input of that kernel is zero."""
    config = dataclasses.replace(SMALL, norm="pre")
    block, x, memory = Block(config, cross=True), normal(B, T, 5), normal(B, S, 5)
    params = oracle.randomized(
        nn.unbox(jax.eval_shape(block.init, jax.random.key(0), x, None, memory))[
            "params"
        ]
    )

    @jax.jit
    def touched(params, memory):
        def total(params, memory):
            return (
                block.apply({"params": params}, x, None, memory)[0]
                * normal(B, T, 5, seed=1)
            ).sum()

        by_params, by_memory = jax.grad(total, argnums=(0, 1))(params, memory)
        kernels = {
            name: by_params["cross_attention"][name]["kernel"]
            for name in ("query", "key", "value")
        }
        return {name: (kernel != 0).any() for name, kernel in kernels.items()} | {
            "memory": (by_memory != 0).all()
        }

    def names(found):
        return {name for name, value in found.items() if value}

    assert names(touched(params, memory)) == {"query", "key", "value", "memory"}
    # A norm with zero gain and bias makes the queries' input zero.
    silenced = params | {
        "cross_attention_residual": {
            "layer_norm": {"scale": np.zeros(5), "bias": np.zeros(5)}
        }
    }
    assert names(touched(silenced, memory)) == {"key", "value", "memory"}
    assert not names(touched(params, np.zeros_like(memory))) & {"key", "value"}


def test_attention_weights_can_be_looked_at():
    params, (source, target) = parameters(TINY), some_ids(TINY)
    source_valid = np.arange(S) < np.array([13, 7, 3, 1, 5])[:, None]
    apply = functools.partial(Transformer(TINY).apply, mutable=["intermediates"])
    _, state = jax.jit(apply)({"params": params}, source, target, source_valid)
    seen = jax.tree.map(np.asarray, state["intermediates"])
    (encoder,) = seen["encoder"]["layers"]["self_attention"]["weights"]
    (decoder,) = seen["decoder"]["layers"]["self_attention"]["weights"]
    (cross,) = seen["decoder"]["layers"]["cross_attention"]["weights"]
    assert encoder.shape == (2, B, 7, S, S)
    assert decoder.shape == (3, B, 7, T, T)
    assert cross.shape == (3, B, 7, T, S)
    for weights in (encoder, decoder, cross):
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    assert (decoder[..., ~np.tri(T, dtype=bool)] == 0).all()
    for b, n in enumerate(source_valid.sum(axis=1)):
        assert (encoder[:, b, ..., n:] == 0).all()
        assert (cross[:, b, ..., n:] == 0).all()
    maps = Transformer(TINY).attention_maps(seen)
    np.testing.assert_array_equal(
        maps["cross-attention", "target", "source"], cross.swapaxes(0, 1)
    )
    np.testing.assert_array_equal(
        maps["encoder self-attention", "source", "source"], encoder.swapaxes(0, 1)
    )
    np.testing.assert_array_equal(
        maps["decoder self-attention", "target", "input"], decoder.swapaxes(0, 1)
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"norm": "pre", "positions": "learned", "embedding_norm": True}],
    ids=["post", "pre"],
)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole(change):
    """Use prompts of every length, followed by single tokens."""
    config, length = dataclasses.replace(SMALL, **change), 4
    params, (source, target) = (
        parameters(config),
        some_ids(config, rows=3, length=length),
    )
    whole = logits(config, params, source, target, SOURCE_VALID)
    apply = functools.partial(
        Transformer(config).apply, {"params": jax.tree.map(jnp.asarray, params)}
    )
    begin = jax.jit(functools.partial(apply, method=start), static_argnums=2)
    extend = jax.jit(functools.partial(apply, method=Transformer.extend))
    first = begin(source, SOURCE_VALID, length + 2)
    assert all(len(leaf) == 3 for leaf in jax.tree.leaves(first))
    assert [layer.key.shape for layer in first.past.layers] == [
        (3, 2, length + 2, 3)
    ] * 2
    assert [layer.value.shape for layer in first.memory.layers] == [(3, 2, S, 3)] * 2
    for prompt in range(1, length + 1):
        found, cache = extend(first, target[:, :prompt], 0)
        found = [found]
        for t in range(prompt, length):
            one, cache = extend(cache, target[:, t : t + 1], t)
            found.append(one)
        assert oracle.relative(np.concatenate(found, axis=1), whole) <= 1e-5


def test_a_cache_can_be_reordered_by_rows():
    params, (source, target) = parameters(SMALL), some_ids(SMALL, rows=3, length=4)
    whole, order = (
        logits(SMALL, params, source, target, SOURCE_VALID),
        np.array([2, 0, 0]),
    )
    apply = functools.partial(
        Transformer(SMALL).apply, {"params": jax.tree.map(jnp.asarray, params)}
    )

    @jax.jit
    def run(source, source_valid, target, order):
        cache = apply(source, source_valid, 4, method=start)
        _, cache = apply(cache, target[:, :3], 0, method=Transformer.extend)
        cache = jax.tree.map(lambda leaf: leaf[order], cache)
        return apply(cache, target[order, 3:], 3, method=Transformer.extend)[0]

    assert (
        oracle.relative(run(source, SOURCE_VALID, target, order), whole[order, 3:])
        <= 1e-5
    )


def test_rows_that_share_a_source_read_it_once():
    """Three neighbouring rows share each source in the cache, with stacked or
    unstacked layers.
    """
    params, (source, _) = parameters(SMALL), some_ids(SMALL, rows=3, length=4)
    _, target = some_ids(SMALL, rows=9, length=4)
    whole = logits(
        SMALL,
        params,
        np.repeat(source, 3, axis=0),
        target,
        np.repeat(SOURCE_VALID, 3, axis=0),
    )
    cache = jax.jit(
        functools.partial(Transformer(SMALL).apply, method=start), static_argnums=3
    )({"params": params}, source, SOURCE_VALID, 4)
    for given in (params, unstack_layers(params)):
        extend = jax.jit(
            functools.partial(
                Transformer(SMALL).apply, {"params": given}, method=Transformer.extend
            )
        )
        found, extended = extend(cache.repeat(3), target, 0)
        assert oracle.relative(found, whole) <= 1e-5
    assert extended.memory.layers[0].key.shape[0] == 3


@pytest.mark.parametrize(
    "name", ["dropout_rate", "attention_dropout_rate", "feed_forward_dropout_rate"]
)
def test_dropout_acts_when_given_a_key_wherever_it_has_a_rate(name):
    config = dataclasses.replace(SMALL, **({"dropout_rate": 0.0} | {name: 0.5}))
    params, (source, target) = parameters(config), some_ids(config)
    plain = logits(dataclasses.replace(config, **{name: 0.0}), params, source, target)
    np.testing.assert_array_equal(logits(config, params, source, target), plain)
    rngs, others = {"dropout": jax.random.key(0)}, {"dropout": jax.random.key(1)}
    dropped = logits(config, params, source, target, rngs=rngs)
    assert oracle.relative(dropped, plain) > 0.01
    np.testing.assert_array_equal(
        logits(config, params, source, target, rngs=rngs), dropped
    )
    assert (logits(config, params, source, target, rngs=others) != dropped).any()


def test_every_layer_and_sublayer_drops_other_units():
    params, (source, target) = parameters(TINY), some_ids(TINY)

    def is_dropout(module, _):
        return isinstance(module, Dropout)

    apply = functools.partial(
        Transformer(TINY).apply,
        mutable=["intermediates"],
        capture_intermediates=is_dropout,
    )
    _, state = jax.jit(apply)(
        {"params": params}, source, target, rngs={"dropout": jax.random.key(0)}
    )
    names = (
        "self_attention_residual",
        "cross_attention_residual",
        "feed_forward_residual",
    )
    layers = state["intermediates"]["decoder"]["layers"]
    kept = np.concatenate(
        [np.asarray(layers[name]["dropout"]["__call__"][0]) != 0 for name in names]
    )
    assert kept.shape == (9, B, T, 17)
    assert len({mask.tobytes() for mask in kept}) == 9
    np.testing.assert_allclose(
        kept.mean(axis=(1, 2, 3)), 0.5, atol=5 * 0.5 / np.sqrt(B * T * 17)
    )


def test_half_precision_products_leave_logits_and_parameters_in_float32():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    params, (source, target) = parameters(config), some_ids(config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes(config)))
    found = logits(config, params, source, target)
    assert found.dtype == np.float32
    assert (
        oracle.relative(found, oracle.transformer(params, config, source, target))
        <= 0.05
    )


def test_too_long_a_sequence_is_refused():
    params, (source, target) = parameters(SMALL), some_ids(SMALL, source_length=38)
    with pytest.raises(
        ValueError, match="a sequence of 38 positions is longer than max_length = 37"
    ):
        Transformer(SMALL).apply({"params": params}, source, target)


def test_shift_right():
    np.testing.assert_array_equal(
        shift_right(jnp.asarray([[5, 6, 7], [8, 9, 2]]), 1), [[1, 5, 6], [1, 8, 9]]
    )


PAPER_TOLERANCE = 0.08


def counted(config):
    """Count the parameters in the arrays, without the padding rows of embedding and
    output tables.
    """
    padding = (
        -config.target_vocab_size % config.vocab_multiple,
        -config.source_vocab_size % config.vocab_multiple,
    )
    tables = {
        "all": padding[0],
        "decoder": sum(padding),
        "embeddings": 2 * padding[0],
        "none": padding[0] + sum(padding),
    }
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))
    return (
        total
        - tables[config.tie_embeddings] * config.d_model
        - config.output_bias * padding[0]
    )


@pytest.mark.parametrize("row", TABLE_3)
def test_parameters_of_the_papers_models(row):
    changes, millions = TABLE_3[row]
    config = TransformerConfig(**changes)
    assert num_parameters(config) == counted(config)
    assert abs(num_parameters(config) / (millions * 1e6) - 1) < PAPER_TOLERANCE


def test_parameters_as_literals():
    def count(row):
        return num_parameters(TransformerConfig(**TABLE_3[row][0]))

    assert count("base") == count("D dropout=0") == count("D dropout=0.2") == 63_082_496
    assert count("big") == 214_245_376
    # The widths of all heads have the same sum, so the numbers of parameters are equal.
    assert {count(f"A h={h}") for h in (1, 4, 16, 32)} == {63_082_496}
    assert count("base") - count("B d_k=32") == 18 * (2 * 512 * 8 * 32 + 2 * 8 * 32)
    assert count("E learned positions") - count("base") == 2 * 1024 * 512
    assert num_parameters(annotated(10000, 10000)) == 59_510_544


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_parameters_of_variants_without_padding_rows(name):
    config = ORACLE_CASES[name]
    assert num_parameters(config) == counted(config)
    padded = dataclasses.replace(config, vocab_multiple=128)
    assert num_parameters(padded) == num_parameters(config) == counted(padded)


def test_annotated_parameters_are_counted_from_the_arrays():
    config = annotated(10000, 10000)
    assert num_parameters(config) == counted(config)
    assert not list(config.problems())


def by_hand(c, s, t):
    """Return the FLOPs of one pair: 2·m·k·n for every product (m, k) × (k, n)."""

    def attention(queries, keys):
        one_head = [(queries, c.head_dim, keys), (queries, keys, c.value_dim)]
        return [
            (queries, c.d_model, c.num_heads * c.head_dim),
            (keys, c.d_model, c.num_heads * c.head_dim),
            (keys, c.d_model, c.num_heads * c.value_dim),
            *(c.num_heads * one_head),
            (queries, c.num_heads * c.value_dim, c.d_model),
        ]

    def ffn(length):
        return [(length, c.d_model, c.d_ff), (length, c.d_ff, c.d_model)]

    products = c.num_encoder_layers * (attention(s, s) + ffn(s))
    products += c.num_decoder_layers * (attention(t, t) + attention(t, s) + ffn(t))
    products += [(t, c.d_model, c.target_vocab_size)]
    return sum(2 * m * k * n for m, k, n in products)


def test_forward_flops():
    assert forward_flops(TWO_VOCABULARIES, 13, 11) == by_hand(TWO_VOCABULARIES, 13, 11)
    ids = [jax.ShapeDtypeStruct((1, length), jnp.int32) for length in (13, 11)]
    model = Transformer(TWO_VOCABULARIES)
    variables = jax.eval_shape(model.init, jax.random.key(0), *ids)
    counted = counting.flops(model.apply, variables, *ids)
    assert counted == by_hand(TWO_VOCABULARIES, 13, 11)
    sources, targets = np.array([13, 1, 5]), np.array([11, 3, 1])
    expected = [
        by_hand(TWO_VOCABULARIES, s, t) for s, t in zip(sources, targets, strict=True)
    ]
    np.testing.assert_array_equal(
        forward_flops(TWO_VOCABULARIES, sources, targets), expected
    )
    assert (
        forward_flops(dataclasses.replace(TWO_VOCABULARIES, vocab_multiple=64), 13, 11)
        == expected[0]
    )


PROBLEMS = [
    *(
        ({name: 0}, name, "must be at least 1")
        for name in (
            "num_encoder_layers",
            "num_decoder_layers",
            "d_model",
            "d_ff",
            "num_heads",
            "head_dim",
            "value_dim",
            "max_length",
            "vocab_multiple",
            "unroll",
        )
    ),
    (
        {"source_vocab_size": 0, "tie_embeddings": "none"},
        "source_vocab_size",
        "must be at least 1",
    ),
    (
        {"target_vocab_size": 0, "tie_embeddings": "none"},
        "target_vocab_size",
        "must be at least 1",
    ),
    *(
        ({name: rate}, name, "must be in [0, 1)")
        for name in (
            "dropout_rate",
            "attention_dropout_rate",
            "feed_forward_dropout_rate",
        )
        for rate in (-0.1, 1.0)
    ),
    ({"norm_epsilon": 0.0}, "norm_epsilon", "must be positive, e.g. 1e-6"),
    (
        {"activation": "tanh"},
        "activation",
        "must be one of relu, gelu, gelu_tanh, silu",
    ),
    ({"norm": "Pre"}, "norm", "must be one of post, pre"),
    (
        {"positions": "fixed"},
        "positions",
        "must be one of sinusoidal, sinusoidal_halves, learned, relative, "
        "relative_bias, rotary, none",
    ),
    (
        {"tie_embeddings": "some"},
        "tie_embeddings",
        "must be one of all, decoder, embeddings, none",
    ),
    (
        {"embedding_init": "zeros"},
        "embedding_init",
        "must be one of xavier_uniform, normal, truncated_normal, fan_in, "
        "standard_normal",
    ),
    (
        {"init": "zeros"},
        "init",
        "must be one of xavier_uniform, normal, truncated_normal, fan_in, "
        "standard_normal",
    ),
    ({"dtype": "float16"}, "dtype", "must be one of float32, bfloat16"),
    ({"num_heads": 0}, "num_heads", "must be at least 1"),
    (
        {"attention_implementation": "flash"},
        "attention_implementation",
        "must be one of auto, einsum, blocked, short, splash, cudnn, jax",
    ),
    ({"remat": "all"}, "remat", "must be one of none, scores, full"),
    *(
        (
            {"attention_implementation": name, "dtype": "bfloat16", **change},
            next(iter(change)),
            (
                f"is not supported by attention_implementation = '{name}': "
                f"set that to 'auto', or this to {remedy}"
            ),
        )
        for name, change, remedy in (
            ("jax", {"attention_dropout_rate": 0.1}, "0"),
            ("jax", {"positions": "relative"}, "another value"),
            ("jax", {"value_dim": 32}, "head_dim = 64"),
            ("splash", {"attention_dropout_rate": 0.1}, "0"),
            ("splash", {"positions": "relative"}, "another value"),
            (
                "short",
                {"head_dim": 60, "value_dim": 60},
                "a divisor of 128, or a multiple of it",
            ),
            ("cudnn", {"attention_dropout_rate": 0.1}, "0"),
            ("cudnn", {"dtype": "float32"}, "'bfloat16'"),
            (
                "cudnn",
                {"head_dim": 60, "value_dim": 60},
                "a multiple of 8, at most 128",
            ),
        )
    ),
    (
        {"source_vocab_size": 7, "target_vocab_size": 11},
        "tie_embeddings",
        (
            "'all' shares one table, but source_vocab_size = 7 and "
            "target_vocab_size = 11: make them equal or set tie_embeddings to 'decoder'"
        ),
    ),
]


@pytest.mark.parametrize(("changes", "field", "rule"), PROBLEMS)
def test_what_is_wrong_with_a_config_is_said(changes, field, rule):
    assert list(TransformerConfig(**changes).problems()) == [(field, rule)]


@functools.cache
def loss_and_gradient(config):
    """Return the loss with dropout, and the whole gradient as one vector.

    The gradient of the keys' biases cannot be compared alone: softmax is invariant to
    them, so it is only rounding.
    """
    source, target = some_ids(config)

    def loss(params):
        key = {"dropout": jax.random.key(1)}
        logits = Transformer(config).apply(
            {"params": params}, source, target, source_valid=source > 2, rngs=key
        )
        return (logits**2).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(parameters(config))
    return value, np.concatenate([np.ravel(g) for g in jax.tree.leaves(gradient)])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"remat": "full"}, marks=pytest.mark.slow),
        {"remat": "scores", "unroll": 2},
        pytest.param({"attention_implementation": "jax"}, marks=pytest.mark.slow),
        {"attention_implementation": "blocked"},
    ],
)
def test_other_ways_to_the_same(changes):
    config = dataclasses.replace(SMALL, dropout_rate=0.1)
    for a, b in zip(
        loss_and_gradient(dataclasses.replace(config, **changes)),
        loss_and_gradient(config),
        strict=True,
    ):
        assert oracle.relative(a, b) <= 1e-5


def test_remat_scores_keeps_the_products_with_weights():
    """The value "scores" recomputes fewer products than "full" and more than "none"."""

    def products(remat):
        config = dataclasses.replace(SMALL, remat=remat)
        ids = jnp.ones((2, 3), jnp.int32)
        loss = jax.grad(
            lambda params: Transformer(config).apply({"params": params}, ids, ids).sum()
        )
        return str(jax.make_jaxpr(loss)(parameters(config))).count("product[")

    assert products("none") < products("scores") < products("full")


def test_modules_refuse_a_config_that_is_wrong():
    """A config made in code skips the checks of a config file, so a misspelt choice
    could give another model.
    """
    config = dataclasses.replace(TINY, positions="rope")
    x = jnp.ones((1, 3, config.d_model))
    token = jnp.ones((1, 3), jnp.int32)
    for module, inputs in (
        (Transformer(config), (token, token)),
        (Block(config), (x,)),
    ):
        with pytest.raises(
            ValueError,
            match=r"TransformerConfig.positions = 'rope': must be one of sinusoidal, ",
        ):
            module.init(jax.random.key(0), *inputs)
    with pytest.raises(ValueError, match=r"TransformerConfig.norm = 'Pre'"):
        Block(dataclasses.replace(TINY, norm="Pre"), cross=True).init(
            jax.random.key(0), x, None, x
        )
    with pytest.raises(ValueError, match=r"BlockConfig.d_ff = 0: must be at least 1"):
        Block(BlockConfig(d_ff=0)).init(jax.random.key(0), x)


def test_a_cache_beyond_the_positions_is_refused():
    source, valid = np.ones((1, 3), np.int32), np.ones((1, 3), bool)
    begin = functools.partial(Transformer(SMALL).apply, method=start)
    with pytest.raises(ValueError, match=r"length=38: must be at most max_length = 37"):
        jax.eval_shape(
            lambda params: begin({"params": params}, source, valid, 38), shapes(SMALL)
        )


def test_all_that_is_wrong_is_said_at_once():
    config = TransformerConfig(dropout_rate=2.0, norm="none", d_model=0, init="zeros")
    assert {name for name, _ in config.problems()} == {
        "dropout_rate",
        "norm",
        "d_model",
        "init",
    }


@pytest.mark.parametrize(
    "changes",
    [BASE, BIG, {"output_bias": True}, {"tie_embeddings": "none", "output_bias": True}],
)
def test_nothing_is_wrong_with_the_papers_configs(changes):
    assert not list(TransformerConfig(**changes).problems())


@pytest.mark.slow
def test_modes_of_differentiation_agree():
    """Compare forward mode with reverse mode, for the logits of the whole model and
    for a Hessian.
    """
    config = dataclasses.replace(
        SMALL, positions="relative", dropout_rate=0.2, remat="scores"
    )
    params, (source, target) = parameters(config), some_ids(config)
    direction = oracle.randomized(shapes(config), seed=1)

    def run(params):
        apply = functools.partial(
            Transformer(config).apply, rngs={"dropout": jax.random.key(0)}
        )
        return apply({"params": params}, source, target, source_valid=source > 2)

    @jax.jit
    def reverse(params, cotangent):
        y, pull = jax.vjp(run, params)
        return y, *pull(cotangent)

    @jax.jit
    def linearized(params, direction):
        y, push = jax.linearize(run, params)
        return y, push(direction)

    cotangent = normal(*jax.eval_shape(run, params).shape)
    y, gradient = reverse(params, cotangent)
    same, pushed = linearized(params, direction)
    np.testing.assert_allclose(same, y, rtol=1e-5, atol=1e-5)
    forward, backward = (
        np.float64(pushed),
        jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction),
    )
    np.testing.assert_allclose(
        (forward * cotangent).sum(), sum(jax.tree.leaves(backward)), rtol=1e-4
    )

    bias = params["decoder"]["layers"]["feed_forward"]["inner"]["bias"]

    def loss(bias):
        feed_forward = params["decoder"]["layers"]["feed_forward"]
        inner = feed_forward["inner"] | {"bias": bias}
        layers = params["decoder"]["layers"] | {
            "feed_forward": feed_forward | {"inner": inner}
        }
        return (
            run(params | {"decoder": params["decoder"] | {"layers": layers}}) ** 2
        ).mean()

    hessian = np.asarray(jax.jit(jax.hessian(loss))(bias)).reshape(bias.size, bias.size)
    assert np.abs(hessian).max() > 1e-3
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-4 * np.abs(hessian).max())
    reverse = jax.jit(jax.jacrev(jax.grad(loss)))(bias).reshape(hessian.shape)
    assert oracle.relative(hessian, reverse) <= 1e-4
