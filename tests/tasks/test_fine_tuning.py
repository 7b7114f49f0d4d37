"""GPT fine-tuned: its input, the objective L3 against NumPy, both orders of pairs,
frozen parts, and learning.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import oracle
from helpers.runs import parameters, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.models import counting
from transformer_jax.training.engine import Engine, make_train_step
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.initialization import init_state
from transformer_jax.training.sharding import make_mesh

HEADER = ("one", "two", "gold")

PAIRS = [
    ("ka ke", "mo", "yes"),
    ("su", "", "no"),
    ("ta ta ta", "ke ka", "yes"),
    ("mo", "su ta", "no"),
]

NO_DROPOUT = {"model.dropout_rate": 0.0, "model.attention_dropout_rate": 0.0}


def table(path, rows, header=HEADER):
    path.write_text("".join("\t".join(row) + "\n" for row in (header, *rows)))


@pytest.fixture
def make(corpus, tmp_path):
    """Return a function that makes a task of GPT on `PAIRS`, with some keys changed."""
    for split in ("train", "val", "test"):
        table(corpus / f"{split}.tsv", PAIRS)

    def make(changes=(), name="classification"):
        config = small(name, corpus, "gpt")
        config.data.update(text_column="one", second_column="two", label_column="gold")
        if name == "classification":
            config.data.labels = ("no", "yes")
        config.update_from_flattened_dict(
            NO_DROPOUT | {"fine_tuning.auxiliary_weight": 0.5} | dict(changes)
        )
        return make_task(parse(config), tmp_path / "run")

    return make


def whole(task, split="val"):
    batches = task.batches(split, None)
    return batches.load(batches.plan.batch(0))


def tokens_of(task, arrays, row):
    return task.network.shown(arrays["text"][row, : arrays["text_length"][row]])


def test_the_input_has_special_tokens_beyond_the_vocabulary(make):
    task = make()
    arrays, v = whole(task), task.config.model.vocab_size
    tokens, text = tokens_of(task, arrays, 0)
    assert [token for token in tokens if token.startswith("[")] == [
        "[START]",
        "[DELIM]",
        "[EXTRACT]",
    ]
    assert (tokens[0], tokens[-1], text) == ("[START]", "[EXTRACT]", "ka ke mo")
    assert arrays["text"][0, 0] == v
    assert arrays["text"][0, arrays["second"][0] - 1] == v + 1
    assert arrays["text"][1, arrays["text_length"][1] - 1] == v + 2
    assert parameters(task)["gpt"]["embedding"]["table"].shape == (v + 3, 16)
    alone = make({"data.second_column": ""})
    tokens, text = tokens_of(alone, whole(alone), 0)
    assert (tokens[0], tokens[-1], text) == ("[START]", "[EXTRACT]", "ka ke")
    assert "second" not in whole(alone)
    assert task.preview(arrays)[1].startswith("  yes: [START] ka")


def test_plain_text(make):
    """There are no special tokens, the texts of a pair follow each other, and the
    last token's vector is mapped.
    """
    task = make({"fine_tuning.plain_text": True})
    arrays, v, params = (
        whole(task),
        task.config.model.vocab_size,
        jax.tree.map(lambda x: 3 * x, parameters(task)),
    )
    one, two = task.corpus.tokenizers["text"].encode_batch(PAIRS[2][:2])
    assert arrays["text"][2, : arrays["text_length"][2]].tolist() == [*one, *two]
    assert arrays["second"][2] == len(one)
    assert tokens_of(task, arrays, 2)[1] == "ta ta take ka"
    assert params["gpt"]["embedding"]["table"].shape == (v, 16)
    assert params["head"].keys() == {"kernel"}
    as_output = params["gpt"] | {"output": {"table": params["head"]["kernel"].T}}
    config = dataclasses.replace(task.config.model, tie_embeddings=False, vocab_size=2)
    expected = oracle.gpt(as_output, config, np.array([[*one, *two]]))[0, -1]
    found = task.network.output(params, jax.tree.map(jnp.asarray, arrays))[2]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert task.config.inherited.rows == {}


def test_the_end_id_stands_for_an_empty_text(make):
    task = make({"fine_tuning.plain_text": True, "data.second_column": ""})
    task.fingerprint(training=False)
    end, batches = task.corpus.tokenizers["text"].eos_id, task.batches_of(["ka", ""])
    arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]
    rows = [
        row[:n].tolist()
        for each in arrays
        for row, n in zip(each["text"], each["text_length"], strict=True)
        if n
    ]
    assert rows == [*task.corpus.tokenizers["text"].encode_batch(["ka"]), [end]]


def test_a_tokenizer_without_special_ids_will_do(make):
    """GPT's special tokens are the model's, not the tokenizer's."""
    task = make()
    task.fingerprint(training=False)
    for name in ("bos_id", "eos_id"):
        setattr(task.corpus.tokenizers["text"], name, None)
    assert tokens_of(task, whole(task), 0)[0][0] == "[START]"


@pytest.mark.parametrize(
    "changes",
    [{}, {"model.tie_embeddings": False, "fine_tuning.both_orders": True}],
    ids=str,
)
def test_the_objective_is_the_equations(make, changes):
    """L3 = L2 + λ · L1 (eq. 5), from the language model's logits and the
    classifier's, in NumPy.
    """
    task = make(
        {"fine_tuning.auxiliary_weight": 0.25, "model.vocab_multiple": 16, **changes}
    )
    params, arrays = jax.tree.map(lambda x: 3 * x, parameters(task)), whole(task)
    means = jax.jit(lambda p: task.loss(p, arrays, jax.random.key(0), 0))(params)
    assert {name: float(mean.scale) for name, mean in means.items()} == {
        "cross_entropy": 1,
        "accuracy": 0,
        "language_modeling": 0.25,
    }

    config = dataclasses.replace(
        task.config.model, vocab_size=task.config.model.vocab_size + 3
    )
    frame, total = task.config.backbone.frame(task.corpus), []
    for row, (one, two, _) in enumerate(PAIRS):
        texts = task.corpus.tokenizers["text"].encode_batch([one, two])
        for first, second in (texts, texts[::-1]) if changes else (texts,):
            ids = np.array([frame.begin, *first, frame.separator, *second, frame.end])
            if (first, second) == tuple(texts):
                assert arrays["text"][row, : len(ids)].tolist() == ids.tolist()
            logits = oracle.gpt(params["gpt"], config, ids[None])[0]
            total.append(
                oracle.cross_entropy(logits[:-1], ids[1:], np.ones(len(ids) - 1))[0]
                / (len(ids) - 1)
            )
    np.testing.assert_allclose(
        means["language_modeling"].sum / means["language_modeling"].weight,
        np.mean(total),
        1e-5,
    )
    evaluated, _ = jax.jit(lambda p: task.evaluate(p, arrays, greedy=True))(params)
    assert set(evaluated) == {"cross_entropy", "accuracy"}
    np.testing.assert_allclose(
        means["cross_entropy"].sum, evaluated["cross_entropy"].sum, rtol=1e-5
    )


def stepped(task, arrays):
    """Return the parameters after a step with weight decay, and its metrics."""
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    step = make_train_step(
        task, optimizer, seed=0, microbatches=1, frozen=task.config.frozen
    )
    state, metrics = jax.jit(step)(init_state(parameters(task), optimizer), arrays)
    return jax.tree.map(np.asarray, state.params), metrics


def test_without_lambda_the_step_is_that_of_the_classifier_alone(make, monkeypatch):
    """Its program has no logits of tokens: no product has the vocabulary's size."""
    task, with_lambda = make({"fine_tuning.auxiliary_weight": 0.0}), make()
    arrays = task.dummy_batch(8, 11, seed=1)
    params, metrics = stepped(task, arrays)
    both, shown = stepped(with_lambda, arrays)
    assert "language_modeling" not in metrics
    np.testing.assert_allclose(
        shown["loss"],
        shown["cross_entropy"] + 0.5 * shown["language_modeling"],
        rtol=1e-6,
    )
    np.testing.assert_allclose(metrics["loss"], shown["cross_entropy"], rtol=1e-6)
    assert (
        (both["gpt"]["embedding"]["table"] != params["gpt"]["embedding"]["table"])
        .any(axis=1)
        .all()
    )
    monkeypatch.setattr(
        task,
        "loss",
        lambda params, batch, key, step: task._means(
            task.network.output(params, batch, key), batch
        ),
    )
    plain, _ = stepped(task, arrays)
    for found, expected in zip(
        jax.tree.leaves(params), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_work_is_counted(make):
    """A step has three times the products of a forward pass. λ adds the logits."""
    off = {"fine_tuning.auxiliary_weight": 0.0}
    for changes, views in ({}, 1), ({"fine_tuning.both_orders": True}, 2):
        task, arrays = make(off | changes), make().dummy_batch(3, 11)
        tokens, flops = task.work(arrays)
        assert tokens == 3 * 11 * views
        forward = counting.flops(task.network.output, parameters(task), arrays)
        assert flops == 3 * forward
        assert (
            make(changes).work(arrays).flops - flops
            == 3 * views * 3 * 2 * 11 * 16 * 307
        )


def test_the_order_of_a_pair_means_nothing_with_both_orders(make):
    """The last pair is cut."""
    one = [*PAIRS, ("ka ke mo su ta ka", "mo ke ta su su su ka ka", "")]
    records = [
        [dict(zip(HEADER, row, strict=False)) for row in (pair[:2], pair[1::-1])]
        for pair in one
    ]

    def logits(task):
        task.fingerprint(training=False)
        run, params = (
            jax.jit(task.network.output),
            jax.tree.map(lambda x: 3 * x, parameters(task)),
        )
        found = np.zeros((2, len(one), 2))
        for order in (0, 1):
            batches = task.batches_of([pair[order] for pair in records])
            for i in range(len(batches.plan)):
                arrays = batches.load(batches.plan.batch(i))
                real = arrays["index"] >= 0
                found[order, arrays["index"][real]] = run(params, arrays)[real]
        return found

    both = logits(make({"fine_tuning.both_orders": True, "data.max_length": 10}))
    np.testing.assert_allclose(both[0], both[1], rtol=1e-6, atol=1e-6)
    assert np.ptp(both, axis=1).min() > 1e-2
    alone = logits(make({"data.max_length": 10}))
    assert np.abs(alone[0] - alone[1]).max(axis=1).min() > 1e-3


def test_attention_and_predictions_of_pairs_in_both_orders(make):
    task = make({"fine_tuning.both_orders": True})
    evaluator, records = (
        Evaluator(task, make_mesh(task.config.mesh)),
        [{"one": "ka ke", "two": "mo"}],
    )
    ((found,),) = evaluator.attention(parameters(task), records)
    assert [t for t in found.queries if t.startswith("[")] == [
        "[START]",
        "[DELIM]",
        "[EXTRACT]",
    ]
    assert found.queries[1].startswith("k")
    (prediction,) = evaluator.predict(parameters(task), records)
    assert sum(prediction["probabilities"].values()) == pytest.approx(1)


def test_what_is_frozen_does_not_include_the_new_embeddings(make):
    task = make({"fine_tuning.frozen_layers": 1})
    before = parameters(task)
    after, _ = stepped(task, task.dummy_batch(8, 11, seed=1))
    v = task.config.model.vocab_size
    counts = {
        "embedding/table": v,
        "positions/table": None,
        "decoder/layers/feed_forward/inner/kernel": 1,
    }
    for name, count in counts.items():
        old, new = before["gpt"], after["gpt"]
        for key in name.split("/"):
            old, new = old[key], new[key]
        np.testing.assert_array_equal(new[:count], old[:count])
        if count:
            assert (
                (new[count:] != old[count:]).all(axis=tuple(range(1, new.ndim))).all()
            )


ONE, TWO = (
    {"data.text_column": "one"},
    {"data.text_column": "one", "data.second_column": "two"},
)

LEARNED = {
    "text": ("classification", ONE | {"data.labels": ("no", "yes")}),
    "pair": ("classification", TWO | {"data.labels": ("no", "yes")}),
    "similarity": (
        "regression",
        TWO | {"data.label_column": "value", "fine_tuning.both_orders": True},
    ),
    "choice": (
        "multiple_choice",
        {
            "data.text_column": "text",
            "data.choice_columns": ("one", "two"),
            "data.label_column": "place",
        },
    ),
}


@pytest.mark.parametrize("kind", LEARNED)
def test_a_model_learns_a_dozen_examples(corpus, tmp_path, kind):
    """The first text has "ka" once or twice.

    If twice, the label is "yes", the value 5, and the right choice 0.
    """
    answers = (("ka ka", "ke", "yes", "5", "0"), ("ka", "ke", "no", "1", "1"))
    rows = [
        (word, *answer)
        for word in ("ke", "mo", "su", "ta", "ti", "ma")
        for answer in answers
    ]
    for split in ("train", "val"):
        table(
            corpus / f"{split}.tsv",
            rows,
            ("text", "one", "two", "gold", "value", "place"),
        )
    name, changes = LEARNED[kind]
    config = small(name, corpus, "gpt")
    config.data.update(label_column="gold", second_column="")
    config.model.num_layers = 1
    config.optimizer.update(schedule="constant", learning_rate=1e-2, warmup_steps=0)
    config.update_from_flattened_dict(
        NO_DROPOUT | {"fine_tuning.auxiliary_weight": 0.5} | changes
    )
    task = make_task(parse(config), tmp_path / kind)
    engine, arrays, read = Engine(task), whole(task, "train"), []
    state = engine.init(jax.random.key(0))
    for _ in range(60):
        state, metrics = engine.step(state, arrays)
        read.append(float(metrics["language_modeling"]))
    assert read[-1] < read[0] / 2
    scores = Evaluator(task, make_mesh(task.config.mesh)).evaluate(
        state.params, "val", greedy=True
    )
    assert scores["loss"] < 0.05
    assert scores.get("accuracy", scores.get("pearson")) > 0.99


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            None,
            {"auxiliary_weight": 0.5},
            "auxiliary_weight = 0.5: is for GPT only: set it to 0, or model.arch",
        ),
        (None, {"both_orders": True}, "both_orders = True: is for GPT only"),
        (None, {"plain_text": True}, "plain_text = True: is for GPT only"),
        (
            "gpt",
            {"plain_text": True, "both_orders": True},
            "plain_text = True: must be False with fine_tuning.both_or",
        ),
        (
            "gpt",
            {"both_orders": True},
            "both_orders = True: needs pairs: set data.second_column, or this to False",
        ),
        (
            "gpt",
            {"auxiliary_weight": -0.5},
            "auxiliary_weight = -0.5: must be at least 0, which switches the",
        ),
        (
            "gpt",
            {"feature_layers": 1},
            "feature_layers = 1: must be 0 with GPT, whose new tokens must be trained",
        ),
        (
            "gpt",
            {"transferred_layers": -2},
            "transferred_layers = -2: must be at least 0, or -1, which takes",
        ),
        (
            "gpt",
            {"transferred_layers": 3},
            "transferred_layers = 3: must not exceed model.num_layers = 2",
        ),
        (
            "gpt",
            {"transferred_layers": 0, "frozen_layers": 1},
            (
                "transferred_layers = 0: "
                "must be -1 or at least fine_tuning.frozen_layers = 1: what starts new"
            ),
        ),
        (
            None,
            {"transferred_layers": 1, "feature_layers": 1},
            (
                "transferred_layers = 1: must be -1 with fine_tuning.feature_layers, "
                "which freezes the whole encoder"
            ),
        ),
    ],
)
def test_what_does_not_go_together(corpus, architecture, changes, message):
    config = small("classification", corpus, architecture)
    config.fine_tuning.update(changes)
    with pytest.raises(ConfigError) as error:
        parse(config)
    assert str(error.value).startswith(f"config.fine_tuning.{message}")


def test_layers_to_transfer_need_a_source(corpus, caplog):
    config = small("classification", corpus, "gpt")
    config.fine_tuning.transferred_layers = 1
    for start, said in (("", True), ("runs/lm", False)):
        caplog.clear()
        config.init_from = start
        parse(config)
        assert (
            "config.fine_tuning.transferred_layers has no effect" in caplog.text
        ) == said
