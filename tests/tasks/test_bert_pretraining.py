"""Pre-training: the two losses and accuracies against loops, the causal model,
blanks, and a corpus learnt by heart.
"""

import json
import re

import jax
import numpy as np
import pytest

import transformer_jax
from helpers.forked import script
from helpers.runs import parameters, rows, run, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.tasks.text import segmented, valid
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


@pytest.fixture
def config(corpus):
    return small("bert_pretraining", corpus)


def task_and_params(config, workdir):
    task = make_task(parse(config), workdir)
    return task, parameters(task)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


def expected(task, params, batch, next_sentence):
    """Loop over rows and predictions.

    The logits of all positions come from the model without `positions`.
    """
    vectors, head, follows = jax.jit(task.model.apply)(
        {"params": params}, *segmented(batch, valid(batch))
    )
    vocabulary = task.config.model.vocab_size
    logits = log_softmax(head(vectors)[..., :vocabulary])
    masked, pairs = [], []
    for b in np.flatnonzero(batch["index"] >= 0):
        for position, label in list(
            zip(batch["positions"][b], batch["label"][b], strict=True)
        )[: batch["masked"][b]]:
            masked.append(
                (-logits[b, position, label], logits[b, position].argmax() == label)
            )
        if batch["paired"][b]:
            row, label = log_softmax(follows[b]), batch["follows"][b]
            pairs.append((-row[label], row.argmax() == label))
    found = {
        "masked_lm": [x for x, _ in masked],
        "masked_accuracy": [x for _, x in masked],
    }
    if next_sentence:
        found |= {
            "next_sentence": [x for x, _ in pairs],
            "next_sentence_accuracy": [x for _, x in pairs],
        }
    return {name: (np.sum(x, dtype=float), len(x)) for name, x in found.items()}


@pytest.mark.parametrize("causal", [False, True])
def test_losses_and_accuracies_are_those_of_a_loop(config, corpus, tmp_path, causal):
    """The batch has pairs, a single segment, and filler rows."""
    with (corpus / "train.txt").open("a") as file:
        file.write("\nek at\n")
    config.model.causal, config.masking.next_sentence = causal, not causal
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0
    task, params = task_and_params(config, tmp_path / "run")
    batches = task.batches("train", 1)
    batch = batches.load(batches.plan.batch(0))
    there = batch["index"] >= 0
    assert not there.all()
    assert set(batch["paired"][there]) == ({0} if causal else {0, 1})
    if causal:  # every next token is a label
        assert batch["label"][there].tolist() == batch["text"][there, 1:].tolist()
        assert (
            batch["masked"][there].tolist()
            == (batch["text_length"][there] - 1).tolist()
        )
    right = expected(task, params, batch, next_sentence=not causal)
    means, outputs = jax.jit(task.evaluate, static_argnums=2)(params, batch, True)
    assert outputs == {}
    assert means.keys() == right.keys()
    for name, mean in means.items():
        assert (float(mean.sum), float(mean.weight)) == pytest.approx(
            right[name], rel=1e-4
        ), name
        assert mean.scale == (0 if "accuracy" in name else 1)
    terms = jax.jit(task.loss)(params, batch, jax.random.key(0), 0)
    assert terms.keys() == means.keys() - {"masked_accuracy"}
    for name, mean in terms.items():
        assert float(mean.sum) == pytest.approx(right[name][0], rel=1e-4)


def test_scores_by_hand(config, tmp_path):
    task = make_task(parse(config), tmp_path)
    accuracies = {"masked_accuracy": 0.25, "next_sentence_accuracy": 0.75}
    scores = task.score({"masked_lm": 2.0, "next_sentence": 0.5, **accuracies}, [], [])
    assert scores == pytest.approx(
        {"loss": 2.5, "perplexity": np.exp(2.0), **accuracies}
    )
    assert task.score(
        {"masked_lm": 2.0, "masked_accuracy": 0.25}, [], []
    ) == pytest.approx(
        {"loss": 2.0, "perplexity": np.exp(2.0), "masked_accuracy": 0.25}
    )
    assert task.score({}, [], []) == {}


@pytest.mark.parametrize("causal", [False, True])
def test_masks_are_filled_with_the_most_probable_tokens(
    config, tmp_path, causal, caplog
):
    """Compare with the logits at every position.

    A causal model predicts a token at the place before it.
    """
    config.model.causal, config.masking.next_sentence = causal, not causal
    config.model.max_length = config.data.max_length
    task, params = task_and_params(config, tmp_path / "run")
    tokenizer = task.corpus.tokenizers["text"]
    lines = ["ek [MASK] at", "[MASK] ek[MASK]", "ek at", "ek " * 60 + "[MASK]"]
    found = Evaluator(task, make_mesh(task.config.mesh)).predict(params, lines)
    assert [len(prediction["masks"]) for prediction in found] == [1, 2, 0, 0]
    assert "input, line 4: " in caplog.text
    for line, prediction in zip(lines[:2], found, strict=False):
        parts = re.split(r"(\[MASK\])", line)
        ids = [tokenizer.bos_id]
        for part in parts:
            ids += (
                [tokenizer.mask_id]
                if part == "[MASK]"
                else tokenizer.encode_batch([part])[0]
            )
        ids = np.array([[*ids, tokenizer.eos_id]])
        vectors, head, _ = jax.jit(task.model.apply)({"params": params}, ids, ids >= 0)
        logits = log_softmax(head(vectors)[0])
        for place, mask in zip(
            np.flatnonzero(ids[0] == tokenizer.mask_id) - causal,
            prediction["masks"],
            strict=True,
        ):
            # the model has more ids than the tokenizer
            known = log_softmax(logits[place, : tokenizer.size])
            best = np.argsort(-known)[:5]
            assert list(mask) == tokenizer.shown(best)
            assert list(mask.values()) == pytest.approx(np.exp(known[best]), rel=1e-4)


def test_a_tokenizer_without_masks_is_refused_with_the_remedy(config, tmp_path):
    config.data.tokenizer = "wordpiece"
    task = make_task(parse(config), tmp_path / "run")
    for open_batches in (
        lambda: task.batches("train", 1),
        lambda: task.batches_of(["ek"]),
    ):
        with pytest.raises(
            ValueError,
            match=r"the tokenizer has no \[MASK\].* set data\.tokenizer = 'bert'",
        ):
            open_batches()


def test_documents_without_blank_lines_have_no_pairs(config, corpus, tmp_path):
    (corpus / "train.txt").write_text("ek at\nit ok\nut\n")
    task = make_task(parse(config), tmp_path / "run")
    message = (
        r"1 of 1 documents have two consecutive sentences .* separate documents by"
        r" blank"
    )
    with pytest.raises(ValueError, match=message):
        task.batches("train", 1)
    config.masking.next_sentence = False
    assert make_task(parse(config), tmp_path / "run").batches("train", 1).plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.max_length": 4}, r"data\.max_length = 4: must be at least 5"),
        (
            {"data.source": "tfds", "data.name": "x"},
            r"data\.source = 'tfds': must be 'files'",
        ),
        (
            {"model.causal": True},
            r"masking\.next_sentence = True: must be False with model\.causal",
        ),
        ({"masking.rate": 1.5}, r"masking\.rate = 1\.5: must be in \(0, 1\)"),
    ],
)
def test_what_does_not_go_together(config, change, message):
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)


@pytest.mark.slow
def test_a_regular_corpus_is_learnt(config, corpus, tmp_path):
    """A word's place and the other words of its sentence tell what it is."""
    sentences = ["ant bee cat dog", "eel fox gnu hen", "owl pig ram yak"]
    for split in ("train", "val"):
        documents = [
            f"{sentences[i % 3]}\n{sentences[(i + 1) % 3]}\n" for i in range(60)
        ]
        (corpus / f"{split}.txt").write_text("\n".join(documents))
    config.model.dropout_rate = config.model.attention_dropout_rate = (
        config.masking.short_rate
    ) = 0.0
    config.optimizer.update(learning_rate=1e-2, warmup_steps=10, schedule="linear")
    run(
        config,
        tmp_path / "run",
        training__steps=400,
        training__evaluate_every=400,
        checkpoint__every=400,
    )
    (scores,) = (row for row in rows(tmp_path / "run") if row["split"] == "val")
    assert scores["masked_accuracy"] > 0.9
    line = "eel fox [MASK] hen"
    done = script("predict", f"--workdir={tmp_path / 'run'}", stdin=line.encode())
    assert done.returncode == 0, done.stderr.decode()
    ((mask,),) = (json.loads(line)["masks"] for line in done.stdout.splitlines())
    assert next(iter(mask)) == "gnu"
    assert len(mask) == 5
    assert transformer_jax.load(tmp_path / "run").predict([line])[0]["masks"][0][
        "gnu"
    ] == pytest.approx(mask["gnu"])
