"""The descendants of Llama against transformers: scaled rotary positions, the biases
and norms of Qwen, and the window of Mistral. Hidden states, logits, losses, gradients
and greedy continuations.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.language_models import (
    PADDED,
    TOKENS,
    VALID,
    B,
    L,
    V,
    continued,
    generated,
    run,
    states,
)
from helpers.oracle import relative
from helpers.parity import (
    check_gradients,
    check_loads,
    flat,
    need_transformers,
    random_model,
    write_back,
)
from transformer_jax import losses
from transformer_jax.interop import huggingface

transformers, torch = need_transformers()

SIZES = {
    "vocab_size": V,
    "hidden_size": 30,
    "intermediate_size": 23,
    "num_hidden_layers": L,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 29,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
LENGTH = {"original_max_position_embeddings": 7}


def scaled(kind, **more):
    """Return a Llama with positions of another `kind`."""
    rotary = {"rope_type": kind, "rope_theta": 50.0, "factor": 3.0, **more}
    return "LlamaForCausalLM", {"rope_parameters": rotary}


CASES = {
    "linear": scaled("linear"),
    "dynamic": scaled("dynamic"),
    "llama3": scaled("llama3", low_freq_factor=0.4, high_freq_factor=1.1, **LENGTH),
    "yarn": scaled("yarn", beta_fast=2.0, beta_slow=0.1, **LENGTH),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
}


def made(case, seed, folder):
    """Return a random model of theirs, and ours that was read from its folder."""
    name, settings = CASES[case]
    sizes = SIZES | settings
    if case == "dynamic":  # the batch is longer
        sizes["max_position_embeddings"] = 7
    config = getattr(transformers, name).config_class(**sizes)
    theirs = random_model(transformers, torch, name, config, seed, folder)
    return theirs, huggingface.read(folder, PADDED)


@functools.cache
def compiled(module):
    """Return a function from parameters to the loss, the hidden states and logits, and
    the gradients.
    """

    def loss(params):
        variables = {"params": params}
        logits = module.apply(variables, TOKENS, VALID)
        total, count = losses.cross_entropy(
            logits[:, :-1],
            jnp.asarray(TOKENS[:, 1:]),
            jnp.asarray(VALID[:, 1:]),
            vocab_size=V,
        )
        hidden = module.apply(variables, method=states)
        return total / count, [*hidden, logits[..., :V]]

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_logits_loss_and_gradients(tmp_path, case, seed):
    theirs, found = made(case, seed, tmp_path)
    labels = torch.tensor(np.where(VALID, TOKENS, -100).astype(np.int64))
    result = run(torch, theirs.train(), labels=labels)
    (loss, outputs), gradients = compiled(found.module)(found.params())
    expected = [*result.hidden_states, result.logits]
    assert len(outputs) == len(expected) == L + 2
    for one, other in zip(outputs, expected, strict=True):
        assert relative(one[VALID], other.detach().numpy()[VALID]) < 1e-5
    assert relative(loss, result.loss.item()) < 1e-5
    result.loss.backward()
    # softmax is invariant to the keys' biases, but not where they are rotated
    check_gradients(found, gradients, theirs)


@pytest.mark.parametrize("case", ["llama3", "yarn", "qwen2", "qwen3", "mistral"])
def test_greedy_continuations(tmp_path, case):
    """The end id is a token that their model writes."""
    theirs, found = made(case, 0, tmp_path)
    eos = int(generated(torch, theirs, 1, V - 1)[4])
    expected = np.stack([generated(torch, theirs, row, eos) for row in range(B)])
    np.testing.assert_array_equal(continued(found, eos), expected)


@pytest.mark.parametrize("case", CASES)
def test_what_we_write_loads_there(tmp_path, case):
    theirs, found = made(case, 5, tmp_path / "theirs")
    params = found.params()
    write_back(found, params, tmp_path / "ours")
    again = check_loads(transformers, CASES[case][0], tmp_path / "ours")
    loaded = again.state_dict()
    for key, value in theirs.state_dict().items():
        np.testing.assert_array_equal(loaded[key].numpy(), value.numpy(), err_msg=key)
    new, old = again.config.to_dict(), theirs.config.to_dict()
    for key in ("rope_parameters", "sliding_window", "num_key_value_heads"):
        assert new.get(key) == old.get(key), key
    ours = flat(huggingface.read(tmp_path / "ours", PADDED).params())
    for path, value in flat(params).items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)
