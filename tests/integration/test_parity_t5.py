"""T5 of transformers against ours: logits, hidden states, loss, gradients, greedy
search and beam search; the sizes of both versions.
"""

import functools

import numpy as np
import pytest

from helpers import oracle
from helpers.parity import check_loads, flat, need_transformers, random_model
from helpers.t5_folders import IDS
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
from transformer_jax.interop.t5 import CONFIG
from transformer_jax.models.kernels import platforms
from transformer_jax.models.positions import relative_buckets
from transformer_jax.models.t5 import SIZES
from transformer_jax.models.transformer import TransformerConfig

transformers, torch = need_transformers()
modeling = pytest.importorskip("transformers.models.t5.modeling_t5")

PAD, EOS, V, K = 0, 1, 31, 3
# no head is as wide as d_model / num_heads, and sequences are longer than the buckets
COMMON = {
    "vocab_size": V,
    "d_model": 21,
    "d_kv": 5,
    "d_ff": 23,
    # their `generate` fails if the decoder has more layers (transformers 5.24)
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 7,
    "decoder_start_token_id": PAD,
}
KINDS = {
    "v1_0": {},
    "v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "v1_1, tied": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gelu": {"feed_forward_proj": "gelu"},
}


@functools.cache
def models(kind, seed, folder):
    """Return a model of theirs in `folder`, and ours with its parameters."""
    config = transformers.T5Config(**COMMON | KINDS[kind])
    name = "T5ForConditionalGeneration"
    theirs = random_model(transformers, torch, name, config, seed, folder)
    if kind == "v1_1":  # transformers 5 ties the output layer of every new model
        draw = torch.Generator().manual_seed(seed)
        table = 0.2 * torch.randn(V, config.d_model, generator=draw)
        theirs.lm_head.weight = torch.nn.Parameter(table)
        theirs.save_pretrained(folder)
    found = huggingface.read(folder)
    return theirs, found, found.params()


@pytest.fixture(
    params=[(kind, seed) for kind in KINDS for seed in range(2)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def pair(request, tmp_path_factory):
    kind, seed = request.param
    folder = tmp_path_factory.getbasetemp() / f"t5-{kind}-{seed}"
    return models(kind, seed, folder)


def is_copied(theirs, found):
    """Return True if our output layer has the values of the embedding, but is not tied
    to it.
    """
    return found.model.has_output_layer and (
        theirs.lm_head.weight is theirs.shared.weight
    )


def test_logits_hidden_states_loss_and_gradients(pair):
    theirs, found, params = pair
    if is_copied(theirs, found):
        theirs.lm_head.weight = torch.nn.Parameter(theirs.shared.weight.detach())
    check_outputs(torch, theirs, found, params, {"encoder": 3, "decoder": 2})


def test_back_and_forth(pair, tmp_path):
    theirs, found, params = pair
    huggingface.write(
        tmp_path / "again",
        "sequence_to_sequence",
        found.model,
        params,
        found.outputs.settings,
        special_ids=IDS,
    )
    name = "T5ForConditionalGeneration"
    loaded = check_loads(transformers, name, tmp_path / "again")
    assert loaded.config.scale_decoder_outputs == theirs.config.scale_decoder_outputs
    state = loaded.state_dict()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(state[name].numpy(), tensor.numpy(), err_msg=name)
    again = huggingface.read(tmp_path / "again")
    assert (again.model, again.outputs) == (found.model, found.outputs)
    for path, leaf in flat(again.params()).items():
        np.testing.assert_array_equal(leaf, flat(params)[path], err_msg=path)


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
    options = DecodingConfig(
        beam_size=beams,
        n_best=beams,
        length_penalty=alpha,
        length_penalty_form="power",
        stopping_rule=RULES[stopping],
        at_limit="rank",
    )
    ours = searching(found.model, options, PAD, EOS)(params, source)
    more = {"length_penalty": alpha, "early_stopping": stopping} if beams > 1 else {}
    output, expected = generated(torch, theirs, source, beams, **more)
    # their beam search fills outputs with the end id if the id of padding is 0
    is_end = expected == EOS
    expected = np.where(is_end.cumsum(axis=2) > is_end, PAD, expected)
    check_tokens(ours.tokens, expected, PAD)
    assert len(np.unique(expected)) > 3
    if beams > 1:
        scores = output.sequences_scores.numpy().reshape(B, beams)
        assert oracle.relative(ours.scores, scores) <= 1e-5


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 64), (16, 128), (64, 300), (6, 7)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_theirs(num_buckets, max_distance, causal):
    places = np.arange(400)
    expected = modeling.T5Attention._relative_position_bucket(
        torch.tensor(places[None] - places[:, None]),
        bidirectional=not causal,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    found = relative_buckets(
        places,
        places,
        num_buckets=num_buckets,
        max_distance=max_distance,
        causal=causal,
    )
    np.testing.assert_array_equal(found, expected.numpy())


# Their models of these sizes, as config.json describes them.
LARGE = {"d_model": 1024, "num_layers": 24}
CONFIGS = {
    "small": {},
    "base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "large": {**LARGE, "d_ff": 4096, "num_heads": 16},
    "3b": {**LARGE, "d_ff": 16384, "num_heads": 32, "d_kv": 128},
    "11b": {**LARGE, "d_ff": 65536, "num_heads": 128, "d_kv": 128},
    "v1_1-small": {"d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "v1_1-base": {"d_model": 768, "num_layers": 12, "num_heads": 12},
    "v1_1-large": {**LARGE, "d_ff": 2816, "num_heads": 16},
    "v1_1-xl": {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32},
    "v1_1-xxl": {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
}


@pytest.mark.parametrize("size", CONFIGS)
def test_sizes_are_theirs(size):
    theirs = dict(CONFIGS[size])
    if size.startswith("v1_1"):
        theirs |= KINDS["v1_1"] | {"dropout_rate": 0.0}
    ours = SIZES[size]
    inits = {key: ours[key] for key in ("init", "embedding_init")}
    assert TransformerConfig(**CONFIG.read(theirs) | inits) == TransformerConfig(**ours)
