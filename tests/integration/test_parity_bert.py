"""BERT against transformers: hidden states, logits, losses and gradients of random
models.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from transformer_jax.models.bert import Bert

transformers, torch = need_transformers()

B, T, V, L = 3, 13, 97, 2
DRAW = np.random.default_rng(0)
# in transformers, the row of id 0 has no gradient
TOKENS = DRAW.integers(1, V, (B, T)).astype(np.int32)
SEGMENTS = DRAW.integers(0, 3, (B, T)).astype(np.int32)
VALID = np.arange(T)[None] < np.array([[T], [7], [5]])
LABELS = {
    "BertForSequenceClassification": np.array([4, 0, 3]),
    "BertForTokenClassification": np.where(VALID, DRAW.integers(0, 5, (B, T)), -100),
    "BertForMaskedLM": np.where(VALID & (DRAW.random((B, T)) < 0.5), TOKENS, -100),
}
TAGS = ["I-LOC", "O", "B-PER", "B-LOC", "I-PER"]
NAMES = (
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
)


def config(activation):
    sizes = {
        "hidden_size": 21,
        "num_attention_heads": 3,
        "intermediate_size": 29,
        "num_hidden_layers": L,
    }
    labels = {str(i): tag for i, tag in enumerate(TAGS)}
    return transformers.BertConfig(
        vocab_size=V,
        max_position_embeddings=17,
        type_vocab_size=3,
        hidden_act=activation,
        id2label=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **sizes,
    )


def made(name, seed, folder, activation="gelu"):
    """Return a random model of theirs, and ours that was read from its folder."""
    settings = config(activation)
    if name == "BertForQuestionAnswering":
        settings.num_labels = 2
    theirs = random_model(transformers, torch, name, settings, seed, folder)
    return theirs, huggingface.read(folder)


def run(theirs, **more):
    """Return what their model computes for the batch."""
    arrays = {"input_ids": TOKENS, "attention_mask": VALID, "token_type_ids": SEGMENTS}
    tensors = {
        name: torch.tensor(array.astype(np.int64)) for name, array in arrays.items()
    }
    # all rows are choices of one example
    if type(theirs).__name__ == "BertForMultipleChoice":
        tensors = {name: tensor[None] for name, tensor in tensors.items()}
    return theirs(**tensors, output_hidden_states=True, **more)


@functools.lru_cache
def compiled(module):
    return jax.jit(
        lambda params: module.apply({"params": params}, TOKENS, VALID, SEGMENTS)
    )


@functools.lru_cache
def compiled_states(model):
    """Return the function from the parameters of the encoder to its L + 1 hidden
    states.
    """

    def states(params):
        variables = {"params": params}
        first = Bert(model).apply(
            variables, TOKENS, VALID, SEGMENTS, method=Bert._embed
        )
        rest = Bert(model).apply(
            variables, TOKENS, VALID, SEGMENTS, L, method=Bert.features
        )
        return [first, *jnp.split(rest, L, axis=-1)]

    return jax.jit(states)


def outputs_of(name, found, theirs):
    """Return pairs of our outputs and theirs, by name."""
    ours, number = compiled(found.module)(found.params()), lambda x: x.detach().numpy()
    if name == "BertForSequenceClassification":
        return {"logits": (ours, number(theirs.logits))}
    if name == "BertForMultipleChoice":
        return {"logits": (ours[:, 0], number(theirs.logits)[0])}
    if name == "BertForTokenClassification":
        order = list(found.outputs.order)
        assert [TAGS[i] for i in order] == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
        return {"logits": (ours, number(theirs.logits)[..., order])}
    if name == "BertForQuestionAnswering":
        return {
            "start": (ours[..., 0], number(theirs.start_logits)),
            "end": (ours[..., 1], number(theirs.end_logits)),
        }
    vectors, head, follows = ours
    if name == "BertModel":
        return {}
    tokens = head(vectors)
    if name == "BertForPreTraining":
        next_sentence = (follows[:, ::-1], number(theirs.seq_relationship_logits))
        return {
            "tokens": (tokens, number(theirs.prediction_logits)),
            "next sentence": next_sentence,
        }
    return {"tokens": (tokens, number(theirs.logits))}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_logits(tmp_path, name, seed):
    theirs, found = made(name, seed, tmp_path / "theirs")
    result, params = run(theirs), found.params()
    states = compiled_states(found.model)(params["bert"])
    assert len(states) == len(result.hidden_states) == L + 1
    for ours, expected in zip(states, result.hidden_states, strict=True):
        assert relative(ours[VALID], expected.detach().numpy()[VALID]) < 1e-5
    if name == "BertModel":
        _, pooled = Bert(found.model).apply(
            {"params": params["bert"]}, TOKENS, VALID, SEGMENTS
        )
        assert relative(pooled, result.pooler_output.detach().numpy()) < 1e-5
        return
    for what, (ours, expected) in outputs_of(name, found, result).items():
        rows = VALID if ours.shape[:2] == VALID.shape else slice(None)
        assert relative(ours[rows], expected[rows]) < 1e-5, what


@pytest.mark.parametrize(
    "activation", ["gelu_new", "gelu_pytorch_tanh", "relu", "silu"]
)
def test_activations(tmp_path, activation):
    theirs, found = made("BertForMaskedLM", 3, tmp_path / "theirs", activation)
    ours, expected = outputs_of("BertForMaskedLM", found, run(theirs))["tokens"]
    assert relative(ours[VALID], expected[VALID]) < 1e-5


@pytest.mark.parametrize("name", LABELS)
def test_loss_and_gradients(tmp_path, name):
    theirs, found = made(name, 4, tmp_path / "theirs")
    labels = LABELS[name]
    result = run(theirs.train(), labels=torch.tensor(labels.astype(np.int64)))
    result.loss.backward()
    order = np.argsort(found.outputs.order) if found.outputs.order else np.arange(V)
    classes, real = jnp.asarray(order[np.maximum(labels, 0)]), jnp.asarray(labels >= 0)

    def loss(params):
        logits = found.module.apply({"params": params}, TOKENS, VALID, SEGMENTS)
        if isinstance(logits, tuple):
            vectors, head, _ = logits
            logits = head(vectors)
        sizes = (
            (logits[:, None], classes[:, None], real[:, None])
            if labels.ndim == 1
            else (logits, classes, real)
        )
        total, count = losses.cross_entropy(*sizes, vocab_size=logits.shape[-1])
        return total / count

    value, gradients = jax.jit(jax.value_and_grad(loss))(found.params())
    assert relative(value, result.loss.item()) < 1e-5
    # it adds the same to all scores of a query
    check_gradients(found, gradients, theirs, zero=("key.bias",))


NEXT = np.array([1, 0, 1])  # theirs; ours are the other way round
SPANS = {"start_positions": np.array([2, 6, 0]), "end_positions": np.array([11, 3, 4])}
TARGETS = {
    "BertForPreTraining": {
        "labels": LABELS["BertForMaskedLM"],
        "next_sentence_label": NEXT,
    },
    "BertForQuestionAnswering": SPANS,
    "BertForMultipleChoice": {"labels": np.array([1])},
}
# Parameters that add the same to all logits of a softmax.
ZERO = {
    "BertForPreTraining": ("key.bias",),
    "BertForQuestionAnswering": (
        "key.bias",
        "qa_outputs.bias",
        f"layer.{L - 1}.output.LayerNorm.bias",
    ),
    "BertForMultipleChoice": ("key.bias", "classifier.bias"),
}


def mean_cross_entropy(logits, classes):
    """Return the mean over the classes ≥ 0, given logits (…, C) and classes (…)."""
    classes = jnp.asarray(classes)
    logits, classes = logits.reshape(1, -1, logits.shape[-1]), classes.reshape(1, -1)
    total, count = losses.cross_entropy(
        logits, jnp.maximum(classes, 0), classes >= 0, vocab_size=logits.shape[-1]
    )
    return total / count


def loss_of(name, output):
    """Return the loss for `TARGETS`, as in the tasks with these models."""
    if name == "BertForQuestionAnswering":
        pairs = zip((output[..., 0], output[..., 1]), SPANS.values(), strict=True)
        return sum(mean_cross_entropy(logits, places) for logits, places in pairs) / 2
    if name == "BertForMultipleChoice":
        return mean_cross_entropy(output[None, :, 0], TARGETS[name]["labels"])
    vectors, head, follows = output
    masked_lm = mean_cross_entropy(head(vectors), LABELS["BertForMaskedLM"])
    return masked_lm + mean_cross_entropy(follows, 1 - NEXT)


@pytest.mark.parametrize("name", TARGETS)
def test_loss_and_gradients_of_several_outputs(tmp_path, name):
    theirs, found = made(name, 4, tmp_path / "theirs")
    targets = {
        key: torch.tensor(value.astype(np.int64))
        for key, value in TARGETS[name].items()
    }
    result = run(theirs.train(), **targets)
    result.loss.backward()

    def loss(params):
        return loss_of(
            name, found.module.apply({"params": params}, TOKENS, VALID, SEGMENTS)
        )

    value, gradients = jax.jit(jax.value_and_grad(loss))(found.params())
    assert relative(value, result.loss.item()) < 1e-5
    check_gradients(found, gradients, theirs, ZERO[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_we_write_loads_there(tmp_path, name):
    theirs, found = made(name, 5, tmp_path / "theirs")
    params = found.params()
    write_back(found, params, tmp_path / "ours")
    again = check_loads(transformers, name, tmp_path / "ours")
    states = {key: value.numpy() for key, value in theirs.state_dict().items()}
    if found.outputs.order:  # our order of the tags
        for key in ("classifier.weight", "classifier.bias"):
            states[key] = states[key][list(found.outputs.order)]
    loaded = again.state_dict()
    assert loaded.keys() == states.keys()
    for key, value in states.items():
        np.testing.assert_array_equal(loaded[key].numpy(), value, err_msg=key)
    same = {
        "_name_or_path",
        "transformers_version",
        "id2label",
        "label2id",
        "problem_type",
        "dtype",
    }
    new, old = again.config.to_dict(), theirs.config.to_dict()
    assert {key: x for key, x in new.items() if key not in same} == {
        k: x for k, x in old.items() if k not in same
    }
    ours = flat(huggingface.read(tmp_path / "ours").params())
    for path, value in flat(params).items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)
