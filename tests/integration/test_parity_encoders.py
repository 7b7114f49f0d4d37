"""The descendants of BERT against transformers: RoBERTa, XLM-R, DistilBERT and ELECTRA
with random weights. Hidden states, logits, losses and gradients.
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
from transformer_jax.models.bert import Bert, Pretraining

transformers, torch = need_transformers()

B, T, V, L = 3, 13, 97, 2
DRAW = np.random.default_rng(0)
# 0 and 1 are the ids of padding
TOKENS = DRAW.integers(2, V, (B, T)).astype(np.int32)
VALID = np.arange(T)[None] < np.array([[T], [7], [5]])
TAGS = ["I-LOC", "O", "B-PER", "B-LOC", "I-PER"]
SIZES = {
    "hidden_size": 21,
    "num_attention_heads": 3,
    "intermediate_size": 29,
    "num_hidden_layers": L,
    "max_position_embeddings": 19,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILLED = {
    "dim": 21,
    "n_heads": 3,
    "hidden_dim": 29,
    "n_layers": L,
    "max_position_embeddings": 17,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
}
ELECTRA = SIZES | {"type_vocab_size": 2, "embedding_size": 11}
# start of the names of classes → their config, its sizes and the padding id
FAMILIES = {
    "Roberta": (transformers.RobertaConfig, SIZES, 1),
    "XLMRoberta": (transformers.XLMRobertaConfig, SIZES, 1),
    "DistilBert": (transformers.DistilBertConfig, DISTILLED, 0),
    "Electra": (transformers.ElectraConfig, ELECTRA | {"summary_last_dropout": 0.0}, 0),
}
HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
# XLM-R has the tables of RoBERTa, with other names of classes
CASES = [("Roberta", head) for head in HEADS]
CASES += [("DistilBert", head) for head in HEADS]
CASES += [("Electra", head) for head in ("Model", "ForMaskedLM", "ForPreTraining")]
CASES += [("Electra", "ForSequenceClassification")]
# they differ from those of BERT in names only
CASES += [
    pytest.param("Electra", head, marks=pytest.mark.slow)
    for head in ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
]
CASES += [("XLMRoberta", head) for head in ("ForMaskedLM", "ForSequenceClassification")]
MASKED = np.where(VALID & (DRAW.random((B, T)) < 0.5), TOKENS, -100)
LABELS = {
    "ForMaskedLM": {"labels": MASKED},
    "ForSequenceClassification": {"labels": np.array([4, 0, 3])},
    "ForTokenClassification": {
        "labels": np.where(VALID, DRAW.integers(0, 5, (B, T)), -100)
    },
    "ForQuestionAnswering": {
        "start_positions": np.array([2, 6, 0]),
        "end_positions": np.array([11, 3, 4]),
    },
    "ForMultipleChoice": {"labels": np.array([1])},
    "ForPreTraining": {"labels": DRAW.integers(0, 2, (B, T))},
}


def valid_of(head):
    """Return (B, T), True at tokens. Answers are looked for in padding, too, where
    the vectors differ.
    """
    return np.ones_like(VALID) if head == "ForQuestionAnswering" else VALID


def made(family, head, seed, folder):
    """Return a random model of theirs, and ours that was read from its folder."""
    kind, sizes, _ = FAMILIES[family]
    labels = {str(i): tag for i, tag in enumerate(TAGS)}
    config = kind(vocab_size=V, id2label=labels, attn_implementation="eager", **sizes)
    if head == "ForQuestionAnswering":
        config.num_labels = 2
    if (family, head) == ("Electra", "Model"):
        config.embedding_size = config.hidden_size
    name = f"{family}{head}"
    theirs = random_model(transformers, torch, name, config, seed, folder)
    return theirs, huggingface.read(folder)


def run(theirs, valid, pad, **labels):
    """Return what their model computes for the batch."""
    arrays = {"input_ids": np.where(valid, TOKENS, pad), "attention_mask": valid}
    tensors = {name: torch.tensor(x.astype(np.int64)) for name, x in arrays.items()}
    # all rows are choices of one example
    if type(theirs).__name__.endswith("MultipleChoice"):
        tensors = {name: tensor[None] for name, tensor in tensors.items()}
    targets = {name: torch.tensor(x.astype(np.int64)) for name, x in labels.items()}
    return theirs(**tensors, **targets, output_hidden_states=True)


def states(model, params, valid):
    """Return the L + 1 hidden states."""
    variables = {"params": params["bert"]}
    first = Bert(model).apply(variables, TOKENS, valid, None, method=Bert._embed)
    rest = Bert(model).apply(variables, TOKENS, valid, None, L, method=Bert.features)
    return [first, *jnp.split(rest, L, axis=-1)]


def logits_of(module, params, valid):
    """Return our logits."""
    output = module.apply({"params": params}, TOKENS, valid)
    if isinstance(module, Pretraining):
        vectors, head, _ = output
        return head(vectors)
    return output


@functools.cache
def compiled(module, model, head):
    """Return a function from parameters and labels to the loss, the logits and hidden
    states, and to the gradients.
    """

    valid = valid_of(head)

    def loss(params, labels):
        logits = logits_of(module, params, valid)
        return mean(head, logits, labels), (logits, states(model, params, valid))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def mean(head, logits, labels):
    """Return the loss of transformers for labels below 0 that do not count."""
    if head == "Model":
        return 0.0
    if head == "ForPreTraining":
        total, count = losses.binary_cross_entropy(logits, labels[0] == 1, VALID)
        return total / count
    if head == "ForQuestionAnswering":
        both = (cross_entropy(logits[..., i], x) for i, x in enumerate(labels))
        return sum(both) / 2
    (classes,) = labels
    return cross_entropy(
        logits[None, :, 0] if head == "ForMultipleChoice" else logits, classes
    )


def cross_entropy(logits, classes):
    logits, classes = logits.reshape(1, -1, logits.shape[-1]), classes.reshape(1, -1)
    total, count = losses.cross_entropy(
        logits, jnp.maximum(classes, 0), classes >= 0, vocab_size=logits.shape[-1]
    )
    return total / count


def their_logits(head, result):
    if head == "ForQuestionAnswering":
        return torch.stack([result.start_logits, result.end_logits], dim=-1)
    return result.logits[0][:, None] if head == "ForMultipleChoice" else result.logits


# They add the same to all scores or logits of a softmax.
KEYS = ("key.bias", "k_lin.bias")
LAST = f"layer.{L - 1}.output"
ZERO = {
    "ForQuestionAnswering": (
        "qa_outputs.bias",
        f"{LAST}.LayerNorm.bias",
        f"{LAST}_layer_norm.bias",
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("family", "head"), CASES)
def test_hidden_states_logits_loss_and_gradients(tmp_path, family, head, seed):
    theirs, found = made(family, head, seed, tmp_path / "theirs")
    labels = LABELS.get(head, {})
    valid = valid_of(head)
    result = run(theirs.train(), valid, FAMILIES[family][2], **labels)
    order = list(found.outputs.order)
    inverse = np.argsort(order) if order else np.arange(V)
    ours = [np.where(x >= 0, inverse[np.maximum(x, 0)], -1) for x in labels.values()]
    function = compiled(found.module, found.model, head)
    (loss, (logits, hidden)), gradients = function(found.params(), ours)
    assert len(hidden) == len(result.hidden_states) == L + 1
    for one, expected in zip(hidden, result.hidden_states, strict=True):
        assert relative(one[valid], expected.detach().numpy()[valid]) < 1e-5
    if head == "Model":
        return
    expected = their_logits(head, result).detach().numpy()
    expected = expected[..., order] if order else expected
    rows = valid if logits.shape[:2] == valid.shape else slice(None)
    assert relative(logits[rows], expected[rows]) < 1e-5
    assert relative(loss, result.loss.item()) < 1e-5
    result.loss.backward()
    if head == "ForMultipleChoice":  # it adds the same to all choices
        theirs.classifier.bias.grad = None
    check_gradients(found, gradients, theirs, (*KEYS, *ZERO.get(head, ())))


@pytest.mark.parametrize(("family", "head"), CASES)
def test_what_we_write_loads_there(tmp_path, family, head):
    theirs, found = made(family, head, 5, tmp_path / "theirs")
    params = found.params()
    write_back(found, params, tmp_path / "ours")
    again = check_loads(transformers, f"{family}{head}", tmp_path / "ours")
    states = {key: value.numpy() for key, value in theirs.state_dict().items()}
    for key, value in again.state_dict().items():
        if "position_embeddings" in key and family.endswith("Roberta"):
            assert not value[:2].any()  # of padding
            states[key][:2] = 0
        expected = states[key]
        if found.outputs.order and key.startswith("classifier."):
            expected = expected[list(found.outputs.order)]
        np.testing.assert_array_equal(value.numpy(), expected, err_msg=key)
    same = {
        "_name_or_path",
        "transformers_version",
        "id2label",
        "label2id",
        "problem_type",
        "dtype",
    }
    new, old = again.config.to_dict(), theirs.config.to_dict()
    # without effect here
    heads = {"qa_dropout", "seq_classif_dropout", "summary_last_dropout"}
    assert {key: x for key, x in new.items() if key not in same | heads} == {
        key: x for key, x in old.items() if key not in same | heads
    }
    ours = flat(huggingface.read(tmp_path / "ours").params())
    for path, value in flat(params).items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)
