"""Marian of transformers against ours: logits, hidden states, loss, gradients,
greedy search and beam search.
"""

import functools

import numpy as np
import pytest

from helpers import oracle
from helpers.parity import check_loads, flat, need_transformers, random_model
from helpers.translating import (
    B,
    check_outputs,
    check_tokens,
    generated,
    searching,
    some_ids,
)
from transformer_jax.decoding import DecodingConfig
from transformer_jax.interop import huggingface
from transformer_jax.models.kernels import platforms

transformers, torch = need_transformers()

PAD, EOS, V, OTHER_V = 30, 0, 31, 29
K = 3
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


def test_logits_hidden_states_loss_and_gradients(pair):
    theirs, found, params = pair
    layers = {"encoder": 2, "decoder": 3}
    # softmax is invariant to the keys' biases
    check_outputs(torch, theirs, found, params, layers, zero=("k_proj.bias",))


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


END = {"forced_eos_token_id": EOS}
RULES = {"never": "hf_never", False: "hf_false", True: "hf_true"}
SEARCHES = [(1, 1.0, False)] + [
    (K, alpha, stopping) for alpha, stopping in zip((1.3, 0.7, 1.0), RULES, strict=True)
]


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
    ours = searching(found.model, options, begin, EOS)(params, source)
    more = {"length_penalty": alpha, "early_stopping": stopping} if beams > 1 else {}
    output, expected = generated(torch, theirs, source, beams, **END | more)
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
    ours = searching(found.model, options, begin, EOS)(params, source)
    output, expected = generated(torch, theirs, source, beams, **END | asked)
    check_tokens(ours.tokens, expected, begin)
    without, plain = generated(torch, theirs, source, beams, **END)
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
