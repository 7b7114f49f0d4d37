"""The interface of encoder–decoders: methods, and caches of searches."""

import functools
import inspect

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.small_models import MODELS, PAIRS
from transformer_jax.models import EncoderDecoder, Transformer
from transformer_jax.models.stack import unstack_layers
from transformer_jax.tasks.teacher_forcing import start, teacher_forced

B, S, T, J, V = 2, 5, 4, 3, 11
METHODS = [name for name in vars(EncoderDecoder) if not name.startswith("_")]
SOURCE = np.random.default_rng(0).integers(0, V, (B, S)).astype(np.int32)
VALID = np.arange(S)[None] < np.array([[5], [3]])


def initial(model, *inputs):
    init = functools.partial(model.init, method=teacher_forced)
    shapes = jax.eval_shape(init, jax.random.key(0), *inputs)
    return oracle.randomized(nn.unbox(shapes)["params"])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_a_model_takes_the_arguments_of_the_interface(name, method):
    expected = inspect.signature(getattr(EncoderDecoder, method)).parameters.values()
    found = inspect.signature(getattr(type(MODELS[name]), method)).parameters.values()
    assert [(p.name, p.default) for p in found] == [
        (p.name, p.default) for p in expected
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_hypotheses_that_continue_others_have_the_logits_of_their_own_tokens(name):
    model = MODELS[name]
    params = initial(model, SOURCE, VALID, SOURCE)
    begin = functools.partial(model.apply, {"params": params}, method=start)
    cache = jax.jit(begin, static_argnums=(2, 3))(SOURCE, VALID, T, J)
    apply = functools.partial(model.apply, {"params": unstack_layers(params)})
    extend = jax.jit(functools.partial(apply, method=model.extend))
    generator = np.random.default_rng(5)
    read = np.zeros((B, J, T), np.int32)
    for t in range(T):
        parents = generator.integers(J, size=(B, J))
        read = np.take_along_axis(read, parents[:, :, None], axis=1)
        read[:, :, t] = generator.integers(V, size=(B, J))
        cache = cache.reorder(parents)
        logits, cache = extend(cache, read[:, :, t].reshape(-1, 1), t)
    each = np.repeat(SOURCE, J, axis=0), np.repeat(VALID, J, axis=0)
    whole = jax.jit(functools.partial(model.apply, method=teacher_forced))
    x, head = whole({"params": params}, *each, read.reshape(-1, T))
    assert oracle.relative(logits[:, 0], head(x)[:, -1]) <= 1e-5


@pytest.mark.parametrize("name", PAIRS)
def test_repeated_rows_share_what_the_decoder_reads_of_the_source(name):
    model = MODELS[name]
    params = initial(model, SOURCE, VALID, SOURCE)
    cache = model.apply({"params": params}, SOURCE, VALID, T, method=start)
    repeated = cache.repeat(J)
    assert {len(leaf) for leaf in jax.tree.leaves(repeated.past)} == {B * J}
    assert repeated.memory is cache.memory


def test_the_memory_of_the_interface_can_be_kept():
    """A source that is encoded once gives the logits of the whole."""
    model = MODELS["Transformer"]
    params = initial(model, SOURCE, VALID, SOURCE)
    apply = functools.partial(model.apply, {"params": params})
    memory = apply(SOURCE, VALID, method=Transformer.encode)
    x = apply(memory, SOURCE, method=Transformer.hidden)
    head = apply(method=Transformer.head)
    np.testing.assert_allclose(head(x), apply(SOURCE, SOURCE, VALID), atol=1e-5)
