"""Pre-training of ELECTRA: both losses in plain NumPy, where gradients flow, metrics,
predictions, and what is refused.
"""

import dataclasses

import jax
import numpy as np
import pytest

from helpers import oracle
from helpers.corpus import write_corpus
from helpers.runs import parameters, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.models.electra import sample
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

STEP = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a task without dropout, random parameters and the first batch."""
    folder = tmp_path_factory.mktemp("electra")
    write_corpus(folder / "corpus")
    config = small("electra_pretraining", folder / "corpus")
    config.model.embedding_dim = 8
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    config.evaluation.batch_size = 4
    task = make_task(parse(config), folder / "run")
    batches = task.batches("train", 1)
    batch = batches.load(batches.plan.batch(0))
    # a filler row
    batch = {name: array[:12].copy() for name, array in batch.items()}
    for name, filler in {"index": -1, "text_length": 0, "masked": 0}.items():
        batch[name][-1] = filler
    return task, parameters(task), batch


@pytest.fixture(scope="module")
def terms(trained):
    """Return the terms, and the gradient of each term of the objective."""
    task, params, batch = trained

    @jax.jit
    def run(params, weights):
        def total(params):
            means = task.loss(params, batch, jax.random.key(3), STEP)
            two = [means[name] for name in ("masked_lm", "replaced_tokens")]
            terms = [mean.sum / mean.weight for mean in two]
            return weights[0] * terms[0] + weights[1] * terms[1], means

        return jax.grad(total, has_aux=True)(params)

    of_generator, means = run(params, np.array([1.0, 0.0], np.float32))
    of_discriminator, _ = run(params, np.array([0.0, 1.0], np.float32))
    return means, (of_generator, of_discriminator)


def generated(task, params, batch):
    """Return the generator's logits (B, P, V) by the equations."""
    config = task.model.generator_config
    encoder = {**params["bert"], **params["generator"]}
    valid = np.arange(batch["text"].shape[1]) < batch["text_length"][:, None]
    segments = np.arange(valid.shape[1]) >= batch["second"][:, None]
    x = oracle.bert_layers(encoder, config, batch["text"], valid, 1 * segments)[-1]
    at = np.take_along_axis(x, batch["positions"][..., None], axis=1)
    both = {"bert": params["bert"], "masked_lm": params["generator"]["masked_lm"]}
    return oracle.masked_lm(both, config, at)


def detected(task, params, batch, text):
    """Return the discriminator's logits (B, T) for `text` by the equations."""
    config = task.config.model
    valid = np.arange(text.shape[1]) < batch["text_length"][:, None]
    segments = np.arange(text.shape[1]) >= batch["second"][:, None]
    x = oracle.bert_layers(params["bert"], config, text, valid, 1 * segments)[-1]
    head = oracle.float64(params["replaced_tokens"])
    h = oracle.ACTIVATIONS["gelu"](oracle.linear(head["transform"], x))
    return oracle.linear(head["output"], h)[..., 0]


def expected(task, params, batch, draws):
    """Loop over rows and tokens. The draws are those of `sample`."""
    logits = generated(task, params, batch)
    generate = jax.jit(lambda p, b: task._generated(p, b))
    vectors, head = generate(params, batch)
    ids = np.asarray(sample(head, vectors, draws, task.corpus.size("text")))
    text = batch["text"].copy()
    replaced = np.zeros(text.shape, bool)
    masked = []
    for b, count in enumerate(batch["masked"]):
        for p in range(count):
            position, label = batch["positions"][b, p], batch["label"][b, p]
            probabilities = oracle.softmax(logits[b, p])
            masked.append(-np.log(probabilities[label]))
            text[b, position] = ids[b, p]
            replaced[b, position] = ids[b, p] != label
    scores = detected(task, params, batch, text)
    found = []
    for b, length in enumerate(batch["text_length"]):
        for t in range(length):
            sign = 1 if replaced[b, t] else -1
            noticed = scores[b, t] > 0
            found.append(
                (
                    np.log1p(np.exp(-sign * scores[b, t])),
                    noticed == replaced[b, t],
                    replaced[b, t],
                    replaced[b, t] and noticed,
                )
            )
    names = (
        "replaced_tokens",
        "replaced_accuracy",
        "replaced_share",
        "replaced_and_noticed",
    )
    sums = dict(zip(names, np.sum(found, axis=0, dtype=float), strict=True))
    return {"masked_lm": (np.sum(masked), len(masked))} | {
        name: (total, len(found)) for name, total in sums.items()
    }


def test_the_objective_is_that_of_loops(trained, terms):
    task, params, batch = trained
    means, _ = terms
    right = expected(task, params, batch, task._draws(batch, STEP))
    assert means.keys() == right.keys()
    for name, mean in means.items():
        assert (float(mean.sum), float(mean.weight)) == pytest.approx(
            right[name], rel=1e-4
        ), name
    scales = {name: float(mean.scale) for name, mean in means.items() if mean.scale}
    assert scales == {"masked_lm": 1.0, "replaced_tokens": 50.0}
    # the samples are random tokens here, so that nearly all of them are replaced
    assert 0 < means["replaced_share"].sum <= means["masked_lm"].weight


def test_the_entropy_of_masked_tokens_is_no_baseline_of_the_objective(trained):
    task, *_ = trained
    assert task.batches("train", 1).baseline is None


def test_draws_depend_on_the_step_and_the_example(trained):
    task, _, batch = trained
    keys = jax.random.key_data(task._draws(batch, STEP))
    assert len({tuple(key) for key in keys.tolist()}) == len(keys)
    swapped = {"index": batch["index"][::-1]}
    other = jax.random.key_data(task._draws(swapped, STEP))
    np.testing.assert_array_equal(other, keys[::-1])
    later = jax.random.key_data(task._draws(batch, STEP + 1))
    assert (later != keys).any(axis=-1).all()


def test_no_gradient_flows_through_the_samples(terms):
    _, gradients = terms
    of_generator, of_discriminator = gradients

    def largest(tree):
        return max(float(abs(leaf).max()) for leaf in jax.tree.leaves(tree))

    assert largest(of_discriminator["generator"]) == 0
    assert largest(of_generator["replaced_tokens"]) == 0
    assert largest(of_generator["bert"]["encoder"]) == 0
    assert largest(of_generator["generator"]) > 0
    assert largest(of_discriminator["replaced_tokens"]) > 0
    for gradient in (of_generator, of_discriminator):  # both train the embeddings
        assert largest(gradient["bert"]["embedding"]) > 0


def test_evaluation_does_not_depend_on_the_batch(trained):
    """Each row of a batch of four is evaluated alone."""
    task, params, batch = trained
    evaluate = jax.jit(task.evaluate, static_argnums=2)
    four = {name: array[:4] for name, array in batch.items()}
    whole, outputs = evaluate(params, four, True)
    assert outputs == {}
    sums = dict.fromkeys(whole, 0.0)
    for row in range(4):
        order = np.array([row, 4, 5, 6])
        one = {name: array[order].copy() for name, array in batch.items()}
        one["text_length"][1:] = one["masked"][1:] = 0
        for name, mean in evaluate(params, one, True)[0].items():
            sums[name] += float(mean.sum)
    assert sums == pytest.approx(
        {name: float(mean.sum) for name, mean in whole.items()}, rel=1e-4
    )
    logits = generated(task, params, four)
    counted = np.arange(logits.shape[1]) < four["masked"][:, None]
    right = (logits.argmax(axis=-1) == four["label"]) & counted
    assert float(whole["masked_accuracy"].sum) == right.sum()


def test_scores_by_hand(trained):
    task, *_ = trained
    means = {
        "masked_lm": 2.0,
        "replaced_tokens": 0.5,
        "masked_accuracy": 0.25,
        "replaced_accuracy": 0.75,
        "replaced_share": 0.1,
        "replaced_and_noticed": 0.04,
    }
    assert task.score(means, [], []) == pytest.approx(
        {
            "loss": 27.0,
            "perplexity": np.exp(2.0),
            "masked_accuracy": 0.25,
            "replaced_loss": 0.5,
            "replaced_accuracy": 0.75,
            "replaced_recall": 0.4,
        }
    )
    nothing = means | {"replaced_share": 0.0, "replaced_and_noticed": 0.0}
    assert task.score(nothing, [], [])["replaced_recall"] == 0
    assert task.score({}, [], []) == {}


def test_a_prediction_has_the_probability_of_each_token(trained):
    task, params, _ = trained
    lines = ["ek at", ""]
    read = task.batches_of(lines)
    arrays = read.load(read.plan.batch(0))
    assert arrays.keys() == task.dummy_batch(2, 4, references=False).keys()
    found = Evaluator(task, make_mesh(task.config.mesh)).predict(params, lines)
    tokenizer = task.corpus.tokenizers["text"]
    (ids,) = tokenizer.encode_batch(["ek at"])
    ids = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id])
    length = np.array([len(ids)])
    batch = {"text_length": length, "second": length}
    scores = detected(task, params, batch, ids[None])[0]
    assert found[0]["tokens"] == tokenizer.shown(ids)
    assert found[0]["replaced"] == pytest.approx(1 / (1 + np.exp(-scores)), rel=1e-4)
    assert found[1]["tokens"] == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masking.next_sentence": True}, r"masking\.next_sentence = True: must be F"),
        ({"model.causal": True}, r"model\.causal = True: must be False: ELECTRA"),
        ({"generator.d_model": 13}, r"generator\.d_model = 13: must be a multiple of"),
        ({"generator.num_layers": 0}, r"generator\.num_layers = 0: must be at least 1"),
        ({"training.discriminator_weight": 0.0}, "discriminator_weight = 0.0: must be"),
        ({"model.embedding_dim": 16}, r"model\.embedding_dim = 16: must not be d_mod"),
    ],
)
def test_what_does_not_go_together(tmp_path, change, message):
    config = small("electra_pretraining", tmp_path)
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)


def test_the_generator_has_the_embeddings_of_the_discriminator(trained):
    task, *_ = trained
    model = task.config.model
    options = dataclasses.replace(task.config.generator, d_model=8, head_dim=4)
    found = options.model(model)
    assert (found.d_model, found.num_heads, found.embedding_dim) == (8, 2, 0)
    wide = dataclasses.replace(model, embedding_dim=0)
    assert options.model(wide).embedding_dim == wide.d_model
