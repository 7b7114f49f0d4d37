"""Encoder–decoders of transformers beside ours: losses, hidden states and searches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers import oracle
from helpers.parity import check_gradients
from transformer_jax import decoding, losses
from transformer_jax.models.stack import Block
from transformer_jax.models.transformer import Transformer, shift_right
from transformer_jax.tasks.teacher_forcing import start, teacher_forced

B, S, T = 5, 13, 11
SOURCE_VALID = np.arange(S) < np.array([13, 7, 3, 1, 5])[:, None]
TARGET_VALID = np.arange(T) < np.array([5, 11, 2, 7, 1])[:, None]


def some_ids(model, seed=1):
    draw = np.random.default_rng(seed)
    source = draw.integers(1, model.source_vocab_size - 1, (B, S))
    target = draw.integers(1, model.target_vocab_size - 1, (B, T))
    return source, target


@functools.cache
def compiled(model):
    """Return a function of parameters and ids: (loss, (logits, captured outputs))
    and the gradient.
    """

    def captured(module, _):
        return (
            isinstance(module, Block)
            or module.path == ("dropout",)
            or module.name == "final_norm"
        )

    def loss(params, source, target, begin):
        (x, head), state = Transformer(model).apply(
            {"params": params},
            source,
            SOURCE_VALID,
            shift_right(target, begin),
            TARGET_VALID,
            method=teacher_forced,
            capture_intermediates=captured,
            mutable="intermediates",
        )
        total, weight = losses.token_cross_entropy(head, x, target, TARGET_VALID)
        return total / weight, (head(x), state["intermediates"])

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def check_outputs(torch, theirs, found, params, layers, zero=(), wraps=False):
    """Compare logits, hidden states, loss and gradients.

    `layers` has the number of layers of "encoder" and "decoder". For `zero` see
    `check_gradients`. With `wraps`, a target ends with the id that the decoder begins
    with.
    """
    source, target = some_ids(found.model)
    begin = theirs.config.decoder_start_token_id
    if wraps:
        target[np.arange(B), TARGET_VALID.sum(axis=1) - 1] = begin
    (loss, (logits, seen)), gradient = compiled(found.model)(
        params, source, jnp.asarray(target), begin
    )
    theirs.zero_grad()
    output = theirs(
        input_ids=torch.tensor(
            np.where(SOURCE_VALID, source, theirs.config.pad_token_id)
        ),
        attention_mask=torch.tensor(SOURCE_VALID),
        labels=torch.tensor(np.where(TARGET_VALID, target, -100)),
        output_hidden_states=True,
    )
    output.loss.backward()
    assert oracle.relative(loss, output.loss.item()) <= 1e-5
    expected = output.logits.detach().numpy()
    assert oracle.relative(logits[TARGET_VALID], expected[TARGET_VALID]) <= 1e-5
    for name, first, valid in (
        ("encoder", 0, SOURCE_VALID),
        ("decoder", 1, TARGET_VALID),
    ):
        ours = [
            seen["dropout"]["__call__"][first],
            *seen[name]["layers"]["__call__"][0][0],
        ]
        if found.model.norm == "pre":
            ours[-1] = seen[name]["final_norm"]["__call__"][0]
        expected = output[f"{name}_hidden_states"]
        assert len(ours) == len(expected) == 1 + layers[name]
        for one, other in zip(ours, expected, strict=True):
            one, other = np.asarray(one)[valid], other.detach().numpy()[valid]
            assert oracle.relative(one, other) <= 1e-5
    check_gradients(found, gradient, theirs, zero)


@functools.cache
def searching(model, options, begin, end, pad=None):
    """Return a function of parameters and a source that searches as `options` say.

    `pad` is by default `begin`.
    """
    model = Transformer(model)
    pad = begin if pad is None else pad

    def run(params, source):
        apply = functools.partial(model.apply, {"params": params})
        cache = apply(source, SOURCE_VALID, T, options.beam_size, method=start)

        def step(cache, tokens, position):
            logits, cache = apply(
                cache, tokens[:, None], position, method=Transformer.extend
            )
            return logits[:, 0], cache

        ids = {"bos_id": begin, "eos_id": end, "pad_id": pad}
        sizes = {
            "batch_size": B,
            "max_length": T,
            "vocab_size": model.config.target_vocab_size,
        }
        return decoding.search(
            step,
            cache,
            options,
            only_greedy=False,
            row_ids=jnp.arange(B),
            **sizes,
            **ids,
        )

    return jax.jit(run)


def generated(torch, theirs, source, beams, **options):
    """Return what `generate` returns for `source`, and its tokens (B, beams, length)
    without the first.
    """
    begin = theirs.config.decoder_start_token_id
    output = theirs.generate(
        input_ids=torch.tensor(
            np.where(SOURCE_VALID, source, theirs.config.pad_token_id)
        ),
        attention_mask=torch.tensor(SOURCE_VALID),
        num_beams=beams,
        num_return_sequences=beams,
        max_length=T + 1,
        return_dict_in_generate=True,
        output_scores=True,
        **{"do_sample": False, "bad_words_ids": [[begin]]} | options,
    )
    tokens = output.sequences.numpy().reshape(B, beams, -1)
    assert (tokens[:, :, 0] == begin).all()
    return output, tokens[:, :, 1:]


def check_tokens(ours, expected, pad):
    """Compare tokens of ours with those of `generate`, which has no columns of
    padding alone.
    """
    length = expected.shape[2]
    np.testing.assert_array_equal(ours[:, :, :length], expected)
    assert (ours[:, :, length:] == pad).all()
