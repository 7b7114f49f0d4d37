"""Marian of transformers against ours: logits, hidden states, loss, gradients,
greedy search and beam search.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import oracle
from helpers.parity import (
    check_gradients,
    check_loads,
    flat,
    need_transformers,
    random_model,
)
from transformer_jax import decoding, losses
from transformer_jax.decoding import DecodingConfig
from transformer_jax.interop import huggingface
from transformer_jax.models.kernels import platforms
from transformer_jax.models.stack import Block
from transformer_jax.models.transformer import Transformer, shift_right
from transformer_jax.tasks.sequence_to_sequence import start, teacher_forced

transformers, torch = need_transformers()

PAD, EOS, V, OTHER_V = 30, 0, 31, 29
B, S, T, K = 5, 13, 11, 3
SIZES = {
    "vocab_size": V,
    "d_model": 21,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 23,
    "decoder_ffn_dim": 23,
    "max_position_embeddings": 37,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
}
OTHER_PAD = {"pad_token_id": OTHER_V - 1, "decoder_start_token_id": OTHER_V - 1}
SEPARATE = {
    "share_encoder_decoder_embeddings": False,
    "decoder_vocab_size": OTHER_V,
    **OTHER_PAD,
}
KINDS = {
    "shared": {"activation_function": "swish", "scale_embedding": True},
    "separate": {"activation_function": "relu", **SEPARATE},
    "untied": {"activation_function": "gelu", "tie_word_embeddings": False, **SEPARATE},
}
SOURCE_VALID = np.arange(S) < np.array([13, 7, 3, 1, 5])[:, None]
TARGET_VALID = np.arange(T) < np.array([5, 11, 2, 7, 1])[:, None]


@functools.cache
def models(kind, seed, folder):
    """Return a model of theirs in `folder`, and ours with its parameters."""
    config = transformers.MarianConfig(**SIZES | KINDS[kind])
    theirs = random_model(transformers, torch, "MarianMTModel", config, seed, folder)
    for stack in (theirs.model.encoder, theirs.model.decoder):
        # this only keeps the gradient of a row from look-ups
        stack.embed_tokens.padding_idx = None
    found = huggingface.read(folder)
    return theirs, found, found.params()


@pytest.fixture(
    params=[(kind, seed) for kind in KINDS for seed in range(3)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def pair(request, tmp_path_factory):
    kind, seed = request.param
    return models(kind, seed, tmp_path_factory.getbasetemp() / f"marian-{kind}-{seed}")


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
        return isinstance(module, Block) or module.path == ("dropout",)

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


def test_logits_hidden_states_loss_and_gradients(pair):
    theirs, found, params = pair
    source, target = some_ids(found.model)
    begin = theirs.config.decoder_start_token_id
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
    assert (
        oracle.relative(
            logits[TARGET_VALID], output.logits.detach().numpy()[TARGET_VALID]
        )
        <= 1e-5
    )
    for name, first, valid in (
        ("encoder", 0, SOURCE_VALID),
        ("decoder", 1, TARGET_VALID),
    ):
        ours = [
            seen["dropout"]["__call__"][first],
            *seen[name]["layers"]["__call__"][0][0],
        ]
        expected = output[f"{name}_hidden_states"]
        assert len(ours) == len(expected) == 1 + len(getattr(theirs.model, name).layers)
        for one, other in zip(ours, expected, strict=True):
            assert (
                oracle.relative(np.asarray(one)[valid], other.detach().numpy()[valid])
                <= 1e-5
            )
    # softmax is invariant to the keys' biases
    check_gradients(found, gradient, theirs, zero=("k_proj.bias",))


def test_back_and_forth(pair, tmp_path):
    theirs, found, params = pair
    special_ids = {
        "pad_id": theirs.config.pad_token_id,
        "bos_id": theirs.config.decoder_start_token_id,
        "eos_id": EOS,
    }
    settings = found.outputs.settings
    huggingface.write(
        tmp_path / "again",
        "sequence_to_sequence",
        found.model,
        params,
        settings,
        special_ids=special_ids,
    )
    loaded = check_loads(transformers, "MarianMTModel", tmp_path / "again").state_dict()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(
            loaded[name].numpy(), tensor.numpy(), err_msg=name
        )
    again = huggingface.read(tmp_path / "again")
    assert (again.model, again.outputs) == (found.model, found.outputs)
    for path, leaf in flat(again.params()).items():
        np.testing.assert_array_equal(leaf, flat(params)[path], err_msg=path)


@functools.cache
def searching(model, options, begin):
    model = Transformer(model)

    def run(params, source):
        apply = functools.partial(model.apply, {"params": params})
        cache = apply(source, SOURCE_VALID, T, options.beam_size, method=start)

        def step(cache, tokens, position):
            logits, cache = apply(
                cache, tokens[:, None], position, method=Transformer.extend
            )
            return logits[:, 0], cache

        ids = {"bos_id": begin, "eos_id": EOS, "pad_id": begin}
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


RULES = {"never": "hf_never", False: "hf_false", True: "hf_true"}
SEARCHES = [(1, 1.0, False)] + [
    (K, alpha, stopping) for alpha, stopping in zip((1.3, 0.7, 1.0), RULES, strict=True)
]


def generated(theirs, source, beams, **options):
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
        **{"do_sample": False, "bad_words_ids": [[begin]], "forced_eos_token_id": EOS}
        | options,
    )
    tokens = output.sequences.numpy().reshape(B, beams, -1)
    assert (tokens[:, :, 0] == begin).all()
    return output, tokens[:, :, 1:]


def check_tokens(ours, expected, begin):
    """Compare tokens of ours with those of `generate`, which has no columns of
    padding alone.
    """
    length = expected.shape[2]
    np.testing.assert_array_equal(ours[:, :, :length], expected)
    assert (ours[:, :, length:] == begin).all()


@pytest.mark.parametrize(("beams", "alpha", "stopping"), SEARCHES)
def test_searches_are_those_of_generate(pair, beams, alpha, stopping, monkeypatch):
    # whose cache of a beam has less to do with theirs
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    theirs, found, params = pair
    source, _ = some_ids(found.model)
    begin = theirs.config.decoder_start_token_id
    options = DecodingConfig(
        beam_size=beams,
        n_best=beams,
        length_penalty=alpha,
        length_penalty_form="power",
        stopping_rule=RULES[stopping],
        at_limit="end",
    )
    ours = searching(found.model, options, begin)(params, source)
    more = {"length_penalty": alpha, "early_stopping": stopping} if beams > 1 else {}
    output, expected = generated(theirs, source, beams, **more)
    check_tokens(ours.tokens, expected, begin)
    if beams > 1:
        assert (
            oracle.relative(
                ours.scores, output.sequences_scores.numpy().reshape(B, beams)
            )
            <= 1e-5
        )


# Options of `generate` and ours.
RULE_CASES = {
    "renormalize": ({"renormalize_logits": True}, {"renormalize": True}),
    "bigrams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram": 2}),
    "trigrams": ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram": 3}),
    "min_length": ({"min_length": 7}, {"min_tokens": 7}),
    "min_new_tokens": ({"min_new_tokens": 5}, {"min_tokens": 6}),
    "penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "first": ({"forced_bos_token_id": 5}, {"first_id": 5}),
    "bad words": ({"bad_words_ids": [[PAD], [8], [27]]}, {"forbidden_ids": (8, 27)}),
    "several ends": ({"eos_token_id": [EOS, 8, 27]}, {"end_ids": (8, 27)}),
    "all": (
        {
            "renormalize_logits": True,
            "no_repeat_ngram_size": 2,
            "min_length": 4,
            "repetition_penalty": 1.3,
            "forced_bos_token_id": 5,
            "suppress_tokens": [8],
            "eos_token_id": [EOS, 27],
        },
        {
            "renormalize": True,
            "no_repeat_ngram": 2,
            "min_tokens": 4,
            "repetition_penalty": 1.3,
            "first_id": 5,
            "forbidden_ids": (8,),
            "end_ids": (27,),
        },
    ),
}


@functools.cache
def ending_model(folder):
    """Return a model of theirs with one layer that likes to end, and ours."""
    config = transformers.MarianConfig(
        **SIZES | KINDS["shared"] | {"encoder_layers": 1, "decoder_layers": 1}
    )
    theirs = random_model(transformers, torch, "MarianMTModel", config, 0, folder)
    theirs.final_logits_bias[0, EOS] += 4
    theirs.save_pretrained(folder)
    found = huggingface.read(folder)
    return theirs, found, found.params()


@pytest.mark.parametrize(
    ("case", "beams"),
    [*((case, K) for case in RULE_CASES), ("first", 1), ("min_length", 1), ("all", 1)],
)
def test_rules_are_those_of_generate(case, beams, tmp_path_factory):
    theirs, found, params = ending_model(
        tmp_path_factory.getbasetemp() / "marian-ending"
    )
    source, _ = some_ids(found.model)
    begin = theirs.config.decoder_start_token_id
    asked, rules = RULE_CASES[case]
    power = {
        "length_penalty_form": "power",
        "length_penalty": 1.0,
        "stopping_rule": "hf_false",
    }
    options = DecodingConfig(
        beam_size=beams, n_best=beams, at_limit="end", **power, **rules
    )
    ours = searching(found.model, options, begin)(params, source)
    output, expected = generated(theirs, source, beams, **asked)
    check_tokens(ours.tokens, expected, begin)
    without, plain = generated(theirs, source, beams)
    scores = (
        [found.sequences_scores.numpy() for found in (output, without)]
        if beams > 1
        else []
    )
    assert (
        plain.shape != expected.shape
        or (plain != expected).any()
        or (scores[0] != scores[1]).any()
    )
    if beams > 1:
        assert oracle.relative(ours.scores, scores[0].reshape(B, beams)) <= 1e-5
