"""GPT, GPT-2 and Llama against transformers: hidden states, logits, losses,
gradients and greedy continuations.
"""

import functools
import itertools
import json
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import transformer_jax
from helpers.language_models import (
    NEW,
    PADDED,
    TOKENS,
    VALID,
    B,
    L,
    V,
    continued,
    generated,
    run,
)
from helpers.language_models import states as states_of
from helpers.oracle import relative
from helpers.parity import (
    check_gradients,
    check_loads,
    flat,
    need_transformers,
    random_model,
    write_back,
)
from transformer_jax import conversion, losses
from transformer_jax.interop import huggingface
from transformer_jax.workdir import read

transformers, torch = need_transformers()

SIZES = {"n_positions": 29, "n_embd": 21, "n_head": 3, "n_layer": L}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"max_position_embeddings": 29, "num_hidden_layers": L, "intermediate_size": 23}
NONE = {
    "bos_token_id": None,
    "eos_token_id": None,
    "vocab_size": V,
    "attn_implementation": "eager",
}
CASES = {
    "openai-gpt": ("OpenAIGPTLMHeadModel", SIZES | DROPOUT),
    "openai-gpt relu": ("OpenAIGPTLMHeadModel", SIZES | DROPOUT | {"afn": "relu"}),
    "gpt2": ("GPT2LMHeadModel", SIZES | DROPOUT | {"n_inner": 31}),
    "gpt2 untied": (
        "GPT2LMHeadModel",
        SIZES | DROPOUT | {"activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "llama": (
        "LlamaForCausalLM",
        LLAMA | {"hidden_size": 30, "num_attention_heads": 5},
    ),
    "llama grouped": (
        "LlamaForCausalLM",
        LLAMA
        | {
            "hidden_size": 30,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
}


def made(case, seed, folder):
    """Return a random model of theirs, and ours that was read from its folder."""
    name, settings = CASES[case]
    config = getattr(transformers, name).config_class(**NONE, **settings)
    return random_model(
        transformers, torch, name, config, seed, folder
    ), huggingface.read(folder, PADDED)


@functools.lru_cache
def compiled(module):
    """Return the function from parameters to the hidden states and the logits."""

    def both(params):
        variables = {"params": params}
        return module.apply(variables, method=states_of), module.apply(
            variables, TOKENS, VALID
        )

    return jax.jit(both)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits(tmp_path, case, seed):
    theirs, found = made(case, seed, tmp_path)
    result, (states, logits) = (
        run(torch, theirs),
        compiled(found.module)(found.params()),
    )
    assert len(states) == len(result.hidden_states) == L + 1
    for ours, expected in zip(
        [*states, logits[..., :V]], [*result.hidden_states, result.logits], strict=True
    ):
        assert relative(ours[VALID], expected.detach().numpy()[VALID]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(tmp_path, case):
    theirs, found = made(case, 4, tmp_path)
    result = run(
        torch,
        theirs.train(),
        labels=torch.tensor(np.where(VALID, TOKENS, -100).astype(np.int64)),
    )
    result.loss.backward()

    def loss(params):
        logits = found.module.apply({"params": params}, TOKENS, VALID)[:, :-1]
        total, count = losses.cross_entropy(
            logits, jnp.asarray(TOKENS[:, 1:]), jnp.asarray(VALID[:, 1:]), vocab_size=V
        )
        return total / count

    value, gradients = jax.jit(jax.value_and_grad(loss))(found.params())
    assert relative(value, result.loss.item()) < 1e-5
    check_gradients(found, gradients, theirs)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case != "openai-gpt relu"])
def test_greedy_continuations(tmp_path, case, seed):
    """The end id is a token that their model writes."""
    theirs, found = made(case, seed, tmp_path)
    eos = int(generated(torch, theirs, 1, V - 1)[4])
    expected = np.stack([generated(torch, theirs, row, eos) for row in range(B)])
    assert (expected == eos).any()
    np.testing.assert_array_equal(continued(found, eos), expected)


def test_rules_of_continuations(tmp_path):
    """All rules of `generate` that language models have, at once, and each of two
    ends.
    """
    theirs, found = made("gpt2", 0, tmp_path)
    plain = [generated(torch, theirs, row, V - 1) for row in range(B)]
    eos, other, barred = int(plain[1][4]), int(plain[0][2]), int(plain[0][0])
    asked = {
        "eos_token_id": [eos, other],
        "min_new_tokens": 2,
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.2,
        "suppress_tokens": [barred],
    }
    expected = np.stack(
        [generated(torch, theirs, row, eos, **asked) for row in range(B)]
    )
    rules = {
        "end_ids": (other,),
        "min_tokens": 3,
        "no_repeat_ngram": 2,
        "repetition_penalty": 1.2,
    }
    np.testing.assert_array_equal(
        continued(found, eos, **rules, forbidden_ids=(barred,)), expected
    )
    assert (
        expected != np.stack([generated(torch, theirs, row, eos) for row in range(B)])
    ).any()


@pytest.mark.parametrize("case", CASES)
def test_what_we_write_loads_there(tmp_path, case):
    theirs, found = made(case, 5, tmp_path / "theirs")
    params = found.params()
    write_back(found, params, tmp_path / "ours")
    again = check_loads(transformers, CASES[case][0], tmp_path / "ours")
    loaded, states = again.state_dict(), theirs.state_dict()
    assert loaded.keys() == states.keys()
    for key, value in states.items():
        np.testing.assert_array_equal(loaded[key].numpy(), value.numpy(), err_msg=key)
    same = {
        "_name_or_path",
        "transformers_version",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "rope_theta",
    }
    new, old = (
        again.config.to_dict(),
        theirs.config.to_dict() | {"n_inner": found.model.d_ff},
    )
    assert {key: new.get(key) for key in old.keys() - same} == {
        key: value
        for key, value in old.items()
        if key not in same and (key != "n_inner" or key in new)
    } | ({} if "n_inner" in new else {"n_inner": None})
    ours = flat(huggingface.read(tmp_path / "ours", PADDED).params())
    for path, value in flat(params).items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


@pytest.mark.parametrize("labels", [5, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_classification(tmp_path, labels, seed):
    """The head reads the last token before the padding, which does not occur in texts.

    One label is a regression.
    """
    config = transformers.GPT2Config(
        **NONE | {"vocab_size": V + 2}, **SIZES, **DROPOUT, num_labels=labels
    )
    config.pad_token_id = V + 1
    name = "GPT2ForSequenceClassification"
    theirs = random_model(transformers, torch, name, config, seed, tmp_path / "theirs")
    found = huggingface.read(tmp_path / "theirs")
    assert found.architecture.task == (
        "regression" if labels == 1 else "classification"
    )
    assert found.outputs.settings["fine_tuning.plain_text"]
    tokens = np.where(VALID, TOKENS, V + 1)
    gold = np.array([4, 0, 3]) if labels > 1 else np.array([0.3, -1.0, 2.0], np.float32)
    tensors = {
        "input_ids": torch.tensor(tokens.astype(np.int64)),
        "attention_mask": torch.tensor(VALID * 1),
    }
    result = theirs.train()(**tensors, labels=torch.tensor(gold))
    result.loss.backward()

    def loss(params):
        logits = found.module.apply({"params": params}, tokens, jnp.asarray(VALID))
        if labels == 1:
            return jnp.square(logits[:, 0] - gold).mean(), logits
        total, count = losses.cross_entropy(
            logits[:, None], gold[:, None], gold[:, None] >= 0, vocab_size=labels
        )
        return total / count, logits

    params = found.params()
    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert relative(logits, result.logits.detach().numpy()) < 1e-5
    assert relative(value, result.loss.item()) < 1e-5
    check_gradients(found, gradients, theirs)
    settings = {"data.labels": ("a", "b", "c", "d", "e"), **found.outputs.settings}
    huggingface.write(
        tmp_path / "ours", found.architecture.task, found.model, params, settings
    )
    loaded = check_loads(transformers, name, tmp_path / "ours").state_dict()
    for key, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(loaded[key].numpy(), tensor.numpy(), err_msg=key)


@pytest.mark.parametrize("name", ["OpenAIGPTModel", "GPT2Model"])
def test_models_without_a_head(tmp_path, name):
    """Their names have no prefix. The output layer is the embedding."""
    config = getattr(transformers, name).config_class(**NONE, **SIZES, **DROPOUT)
    theirs = random_model(transformers, torch, name, config, 6, tmp_path / "theirs")
    found = huggingface.read(tmp_path / "theirs")
    states, _ = compiled(found.module)(params := found.params())
    assert (
        relative(
            states[-1][VALID],
            run(torch, theirs).last_hidden_state.detach().numpy()[VALID],
        )
        < 1e-5
    )
    write_back(found, params, tmp_path / "ours")
    check_loads(transformers, name, tmp_path / "ours")


def save_tokenizer(folder):
    """Write a tokenizer of letters, in the files of GPT-2."""
    tokens = ["!", "Ġ", *string.ascii_lowercase, "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(tokens)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )


def test_the_workdir_of_a_classifier_predicts_the_same(tmp_path):
    """So does the folder that is written from it. The end id pads."""
    name, texts = "GPT2ForSequenceClassification", ["ek at", "it", "is em is ek at"]
    config = transformers.GPT2Config(
        **NONE | {"vocab_size": V}, **SIZES, **DROPOUT, num_labels=3
    )
    random_model(transformers, torch, name, config, 7, tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    conversion.to_workdir(
        conversion.config_for(str(tmp_path / "theirs")), tmp_path / "run"
    )
    found = transformer_jax.load(str(tmp_path / "run")).predict(texts)
    conversion.to_folder(
        tmp_path / "run", read(tmp_path / "run"), str(tmp_path / "back")
    )
    again = check_loads(transformers, name, tmp_path / "back")
    assert again.config.pad_token_id == 28
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.pad_token_id == 28
    with torch.no_grad():
        expected = (
            again(**tokenizer(texts, padding=True, return_tensors="pt"))
            .logits.softmax(-1)
            .numpy()
        )
    assert (
        relative([list(row["probabilities"].values()) for row in found], expected)
        < 1e-5
    )


@pytest.mark.parametrize(
    ("case", "begin"),
    [("openai-gpt", False), ("llama grouped", False), ("llama grouped", True)],
)
def test_the_workdir_of_a_language_model_continues_the_same(tmp_path, case, begin):
    """The tokenizer has no end id unless config.json names one.

    It may put the begin id before a prompt.
    """
    name, settings = CASES[case]
    eos = None if case == "openai-gpt" else 5
    config = getattr(transformers, name).config_class(
        **NONE | {"vocab_size": 28, "eos_token_id": eos}, **settings
    )
    theirs = random_model(transformers, torch, name, config, 8, tmp_path / "theirs")
    letters = {
        letter: i for i, letter in enumerate(["?", " ", *string.ascii_lowercase])
    }
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    if begin:
        template, specials = ["z:0", "$A:0"], [("z", letters["z"])]
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=specials
        )
    library.save(str(tmp_path / "theirs" / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"bos_token": "z"} if begin else {}
    )
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(named))
    settings = conversion.config_for(str(tmp_path / "theirs"))
    settings.decoding.max_extra = NEW
    conversion.to_workdir(settings, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    tokenizer = predictor.task.corpus.tokenizers["text"]
    assert tokenizer.eos_id == eos
    conversion.to_folder(
        tmp_path / "run", read(tmp_path / "run"), str(tmp_path / "back")
    )
    for prompt, folder in itertools.product(("cab", "zebra"), ("theirs", "back")):
        ids = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)(
            prompt, return_tensors="pt"
        )["input_ids"]
        assert ids.shape[1] == len(prompt) + begin
        output = theirs.generate(
            ids, do_sample=False, max_new_tokens=NEW, pad_token_id=eos
        )
        before = tokenizer.decode(ids[0].tolist())
        expected = tokenizer.decode(output[0].tolist()).removeprefix(before)
        assert predictor.predict([prompt]) == [{"continuation": expected}]
