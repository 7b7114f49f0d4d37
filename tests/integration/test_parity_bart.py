"""BART and mBART of transformers against ours: logits, hidden states, loss, gradients,
greedy search and beam search.
"""

import functools

import numpy as np
import pytest

import transformer_jax
from helpers import oracle
from helpers.bart_folders import LETTERS, PIECES, save_tokenizer
from helpers.parity import check_loads, flat, need_transformers, random_model
from helpers.translating import (
    B,
    check_outputs,
    check_tokens,
    generated,
    searching,
    some_ids,
)
from transformer_jax import conversion, transfer
from transformer_jax.data import tokenizer_files
from transformer_jax.decoding import DecodingConfig
from transformer_jax.interop import huggingface
from transformer_jax.models.kernels import platforms
from transformer_jax.workdir import read

transformers, torch = need_transformers()

BOS, EOS, LANGUAGE, PAD, V, K = 0, 2, 5, 30, 31, 3
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
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "forced_eos_token_id": None,
}
KINDS = {
    "Bart": {"decoder_start_token_id": EOS},
    "MBart": {
        "decoder_start_token_id": LANGUAGE,
        "activation_function": "relu",
        "scale_embedding": True,
    },
}


@functools.cache
def models(kind, seed, folder):
    """Return a model of theirs in `folder`, and ours with its parameters."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
    name = f"{kind}ForConditionalGeneration"
    theirs = random_model(transformers, torch, name, config, seed, folder)
    found = huggingface.read(folder)
    return theirs, found, found.params()


@pytest.fixture(
    params=[(kind, seed) for kind in KINDS for seed in range(3)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def pair(request, tmp_path_factory):
    kind, seed = request.param
    return models(kind, seed, tmp_path_factory.getbasetemp() / f"{kind}-{seed}")


def test_logits_hidden_states_loss_and_gradients(pair):
    theirs, found, params = pair
    assert bool(theirs.final_logits_bias.any())
    check_outputs(
        torch,
        theirs,
        found,
        params,
        {"encoder": 2, "decoder": 3},
        # softmax is invariant to the keys' biases
        zero=("k_proj.bias",),
        wraps=found.model.norm == "pre",
    )


def test_back_and_forth(pair, tmp_path):
    theirs, found, params = pair
    name = type(theirs).__name__
    begin = theirs.config.decoder_start_token_id
    huggingface.write(
        tmp_path / "again",
        "sequence_to_sequence",
        found.model,
        params,
        found.outputs.settings,
        special_ids={"pad_id": PAD, "bos_id": begin, "eos_id": EOS},
    )
    loaded = check_loads(transformers, name, tmp_path / "again")
    assert loaded.config.decoder_start_token_id == begin
    state = loaded.state_dict()
    for name, tensor in theirs.state_dict().items():
        # no position reads the first two rows
        rows = slice(2 if "embed_positions" in name else 0, None)
        np.testing.assert_array_equal(
            state[name][rows].numpy(), tensor[rows].numpy(), err_msg=name
        )
    again = huggingface.read(tmp_path / "again")
    assert (again.model, again.outputs) == (found.model, found.outputs)
    for path, leaf in flat(again.params()).items():
        np.testing.assert_array_equal(leaf, flat(params)[path], err_msg=path)


@pytest.mark.parametrize(("beams", "alpha"), [(1, 1.0), (K, 1.3)])
def test_searches_are_those_of_generate(pair, beams, alpha, monkeypatch):
    # whose cache of a beam has less to do with theirs
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    theirs, found, params = pair
    source, _ = some_ids(found.model)
    begin = theirs.config.decoder_start_token_id
    forced = {"forced_eos_token_id": EOS}
    if begin == EOS:
        forced["forced_bos_token_id"] = BOS
        rules = {"first_id": BOS}
    else:  # it would repeat one token
        forced["no_repeat_ngram_size"] = 2
        rules = {"no_repeat_ngram": 2}
    options = DecodingConfig(
        beam_size=beams,
        n_best=beams,
        length_penalty=alpha,
        length_penalty_form="power",
        stopping_rule="hf_false",
        at_limit="end",
        **rules,
    )
    ours = searching(found.model, options, begin, EOS, PAD)(params, source)
    if beams > 1:
        forced["length_penalty"] = alpha
    never = [[i] for i in {begin, PAD} - {EOS}]
    output, expected = generated(
        torch, theirs, source, beams, bad_words_ids=never, **forced
    )
    check_tokens(ours.tokens, expected, PAD)
    assert len(np.unique(expected)) > 3
    if beams > 1:
        scores = output.sequences_scores.numpy().reshape(B, beams)
        assert oracle.relative(ours.scores, scores) <= 1e-5


LINES = ["eak dak", "a bad cab", "deed", "b"]


def with_tokenizer(kind, folder):
    """Write a folder with a tokenizer of theirs, and a random model for it."""
    family = kind.removesuffix("50")
    config = {"forced_eos_token_id": EOS, "pad_token_id": 1}
    folder.mkdir()
    if kind == "Bart":
        save_tokenizer(kind, folder)
        size = V
    else:
        pieces = [*PIECES[:5], *(f"▁{letter}" for letter in LETTERS[:5]), *LETTERS]
        languages = transformers.models.mbart.tokenization_mbart.FAIRSEQ_LANGUAGE_CODES
        vocabulary = [(piece, -2.0) for piece in [*pieces, *languages, "<mask>"]]
        theirs = getattr(transformers, f"{kind}Tokenizer")(
            vocab=vocabulary, src_lang="de_DE", tgt_lang="fr_XX"
        )
        theirs.save_pretrained(folder)
        size = len(theirs)
        language = theirs.convert_tokens_to_ids("ro_RO")
        key = "decoder_start" if kind == "MBart" else "forced_bos"
        config |= {"decoder_start_token_id": EOS, f"{key}_token_id": language}
    made = getattr(transformers, f"{family}Config")(
        **SIZES | KINDS[family] | {"vocab_size": size} | config
    )
    name = f"{family}ForConditionalGeneration"
    model = random_model(transformers, torch, name, made, 0, folder)
    # what our search never writes
    never = [[i] for i in {1, made.decoder_start_token_id} - {EOS}]
    model.generation_config.update(
        bad_words_ids=never, max_length=9, no_repeat_ngram_size=2, num_beams=2
    )
    if kind == "MBart50":
        model.generation_config.update(forced_bos_token_id=language)
    model.generation_config.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["Bart", "MBart", "MBart50"])
def test_texts_are_read_and_written_as_in_transformers(kind, tmp_path):
    theirs, back = tmp_path / "theirs", str(tmp_path / "back")
    model = with_tokenizer(kind, theirs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    conversion.to_workdir(conversion.config_for(str(theirs)), tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    corpus = predictor.task.corpus
    source = tokenizer(LINES)["input_ids"]
    assert [corpus.encode("source", LINES)[i].tolist() for i in range(4)] == source
    if kind != "Bart":  # the model, not tgt_lang, says with what the decoder begins
        tokenizer.tgt_lang = "ro_RO"
    target = tokenizer(text_target=LINES)["input_ids"]
    assert [corpus.encode("target", LINES)[i].tolist() for i in range(4)] == target
    conversion.to_folder(tmp_path / "run", read(tmp_path / "run"), back)
    again = transformers.AutoTokenizer.from_pretrained(back)
    assert again(LINES)["input_ids"] == source
    keys = [transfer.keys_for(folder) for folder in (str(theirs), back)]
    for key in ("data.source_frame", "data.target_frame"):
        assert keys[0][key] == keys[1][key]
    if kind == "MBart50":  # whose model is that of mBART
        return
    output = model.generate(**tokenizer(LINES, padding=True, return_tensors="pt"))
    ours = tokenizer_files.from_folder(theirs)
    special = {BOS, 1, EOS, model.config.decoder_start_token_id}
    expected = [
        ours.decode([i for i in row if i not in special]) for row in output.tolist()
    ]
    assert predictor.predict(LINES) == expected
    assert len(set(expected)) > 1
