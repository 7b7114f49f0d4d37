"""Multiple choice: probabilities and loss by hand, one scorer for all choices, and
rows that cannot be read.
"""

import functools

import jax
import numpy as np
import pytest

import transformer_jax
from helpers.runs import parameters, rows, run, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

COLUMNS = ("text", "start", "one", "two", "three")
EXAMPLES = [
    (
        "Ein Hund sieht die Katze.",
        "Er",
        "bellt laut.",
        "liest ein Buch und lacht.",
        "ist",
        "0",
    ),
    (
        "Die Katze schläft.",
        "Der Hund",
        "redet.",
        "sieht sie an.",
        "fliegt davon und singt.",
        "1",
    ),
    ("Buch", "", "auf", "", "zu und auf", "2"),
    ("Ein Hund liest.", "Die Katze", "lacht.", "bellt.", "redet laut.", "0"),
    ("Er singt.", "Er", "fliegt.", "schläft", "sieht", "1"),
]


def write(corpus, examples):
    lines = ["\t".join(example) + "\n" for example in [(*COLUMNS, "right"), *examples]]
    for split in ("train", "val", "test"):
        (corpus / f"{split}.tsv").write_text("".join(lines))


@pytest.fixture
def config(corpus):
    write(corpus, EXAMPLES)
    config = small("multiple_choice", corpus)
    config.data.tokenizer = "bert"
    config.data.update(
        text_column="text",
        second_column="start",
        choice_columns=COLUMNS[2:],
        label_column="right",
    )
    config.model.num_layers = 1
    config.evaluation.batch_size = 3
    return config


@pytest.fixture
def task(config, tmp_path):
    return make_task(parse(config), tmp_path / "run")


@pytest.fixture
def params(task):
    """Return parameters that give the choices clearly different scores."""
    initial = parameters(task, 1)
    return jax.tree.map(lambda x: 10 * x, initial)


def records(examples):
    return [dict(zip(COLUMNS, example[:-1], strict=True)) for example in examples]


@functools.cache
def compiled(task):
    return jax.jit(task.network.model.apply)


def by_hand(task, params, example):
    """Return the probability of each choice. Each is encoded and scored alone."""
    text, start, *choices, _ = example
    tokenizer, scores = task.corpus.tokenizers["text"], []
    for choice in choices:
        first, second = tokenizer.encode_batch([text, f"{start} {choice}"])
        ids, place = (
            [tokenizer.bos_id, *first, tokenizer.eos_id, *second, tokenizer.eos_id],
            np.arange(29)[None],
        )
        padded = np.array([ids + [0] * (29 - len(ids))])
        segments = (place >= len(first) + 2).astype(int)
        scores.append(
            float(
                compiled(task)({"params": params}, padded, place < len(ids), segments)[
                    0, 0
                ]
            )
        )
    powers = np.exp(scores)
    return powers / powers.sum()


def test_probabilities_and_loss_by_hand(task, params):
    expected = [by_hand(task, params, example) for example in EXAMPLES]
    assert min(np.ptp(row) for row in expected) > 0.01
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    found = evaluator.predict(params, records(EXAMPLES))
    for prediction, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(prediction["probabilities"], row, rtol=1e-4)
        assert prediction["choice"] == row.argmax()
    scores, right = (
        evaluator.evaluate(params, "val", greedy=True),
        [int(example[-1]) for example in EXAMPLES],
    )
    assert scores == {
        "loss": pytest.approx(
            -np.mean([np.log(row[i]) for row, i in zip(expected, right, strict=True)]),
            rel=1e-4,
        ),
        "accuracy": np.mean(
            [row.argmax() == i for row, i in zip(expected, right, strict=True)]
        ),
        "examples": 5,
    }


def test_the_training_loss_is_that_of_evaluation_without_dropout(
    config, tmp_path, params
):
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    task = make_task(parse(config), tmp_path / "run")
    batches = task.batches("val", None)
    batch = batches.load(batches.plan.batch(1))
    means = jax.jit(task.loss)(params, batch, jax.random.key(0), 0)
    evaluated, _ = jax.jit(task.evaluate, static_argnums=2)(params, batch, True)
    assert (
        float(means["cross_entropy"].weight)
        == float(evaluated["cross_entropy"].weight)
        > 0
    )
    assert float(means["cross_entropy"].sum) == pytest.approx(
        float(evaluated["cross_entropy"].sum), rel=1e-5
    )


def test_another_order_of_the_choices_is_another_order_of_the_probabilities(
    task, params
):
    evaluator, order = Evaluator(task, make_mesh(task.config.mesh)), [2, 0, 1]
    permuted = [
        (*example[:2], *(example[2 + i] for i in order), "") for example in EXAMPLES
    ]
    for one, other in zip(
        evaluator.predict(params, records(EXAMPLES)),
        evaluator.predict(params, records(permuted)),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.array(one["probabilities"])[order], other["probabilities"], rtol=1e-5
        )


def test_the_choices_of_a_row_have_one_width(task):
    batches = task.batches("val", None)
    arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]
    assert sorted(i for a in arrays for i in a["index"].tolist() if i >= 0) == [
        0,
        1,
        2,
        3,
        4,
    ]
    for a in arrays:
        assert (
            a["text"].shape[:2] == a["text_length"].shape == a["second"].shape == (3, 3)
        )
        real = a["index"] >= 0
        assert not a["text_length"][~real].any()
        assert a["text_length"][real].min() >= 3
        assert a["text_length"].max() <= a["text"].shape[2]
        for row in np.flatnonzero(real):
            example, tokenizer = (
                EXAMPLES[a["index"][row]],
                task.corpus.tokenizers["text"],
            )
            assert a["label"][row] == int(example[-1])
            for c, choice in enumerate(example[2:-1]):
                ids = a["text"][row, c]
                (expected,) = tokenizer.encode_batch([f"{example[1]} {choice}"])
                assert ids[a["second"][row, c] : a["text_length"][row, c]].tolist() == [
                    *expected,
                    tokenizer.eos_id,
                ]


def test_a_text_that_is_too_long_is_cut(config, tmp_path, caplog):
    """The first example has choices with 13 and 16 tokens, and the second one has
    some with 13 and 14.
    """
    config.data.max_length = 12
    task = make_task(parse(config), tmp_path / "run")
    assert task.batches("train", 3).plan.shapes[0][1] == 12
    message = (
        "train.tsv, split train, 3 choices per row: "
        "4 of 15 examples are cut to data.max_length = 12 tokens;"
    )
    assert f"{message} the first is row 1" in caplog.text


def test_without_text_before_the_choices(config, tmp_path):
    config.data.second_column = ""
    task = make_task(parse(config), tmp_path / "run")
    assert task.config.columns == (("text", "one", "two", "three", "right"), 4)
    batches = task.batches("val", None)
    arrays = batches.load(batches.plan.batch(0))
    row = arrays["index"].tolist().index(2)
    assert task.network.shown(arrays["text"][row, 2][: arrays["text_length"][row, 2]])[
        0
    ][-4:] == [
        "zu",
        "und",
        "auf",
        "[SEP]",
    ]


def test_every_choice_has_its_attention_map(task, params):
    (maps,) = Evaluator(task, make_mesh(task.config.mesh)).attention(
        params, records(EXAMPLES[:1])
    )
    assert [found.name for found in maps] == [
        f"self-attention, choice {i}" for i in range(3)
    ]
    tokenizer = task.corpus.tokenizers["text"]
    for choice, found in zip(EXAMPLES[0][2:], maps, strict=False):
        (ids,) = tokenizer.encode_batch([f"Er {choice}"])
        assert found.keys[-1 - len(ids) :] == [*tokenizer.shown(ids), "[SEP]"]
        np.testing.assert_allclose(found.weights.sum(axis=-1), 1, rtol=1e-4)


@pytest.mark.slow
def test_a_model_learns_a_dozen_choices(config, corpus, tmp_path):
    """What is right depends on the text, and its place does not."""
    colours = ("Rot", "Blau", "Grün", "Rot", "Blau")
    names = (
        "Ada",
        "Bea",
        "Cem",
        "Dia",
        "Eva",
        "Fee",
        "Gül",
        "Hao",
        "Ida",
        "Jan",
        "Kai",
        "Lea",
    )
    write(
        corpus,
        [
            (f"{name} malt.", "Es ist", *colours[i % 3 :][:3], "012"[i // 3 % 3])
            for i, name in enumerate(names)
        ],
    )
    (
        config.model.num_layers,
        config.model.dropout_rate,
        config.model.attention_dropout_rate,
    ) = (
        2,
        0.0,
        0.0,
    )
    (
        config.optimizer.schedule,
        config.optimizer.learning_rate,
        config.optimizer.warmup_steps,
    ) = (
        "constant",
        3e-3,
        10,
    )
    config.training.steps = config.training.evaluate_every = (
        config.training.log_every
    ) = config.checkpoint.every = 100
    run(config, tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["accuracy"] == 1
    predictor = transformer_jax.load(tmp_path / "run")
    assert predictor.evaluate()["accuracy"] == 1
    one, other = predictor.predict(
        records(
            [
                ("Bea malt.", "Es ist", "Blau", "Grün", "Rot", ""),
                ("Bea malt.", "Es ist", "Rot", "Grün", "Blau", ""),
            ]
        )
    )
    assert (one["choice"], other["choice"]) == (0, 2)
    assert sum(one["probabilities"]) == pytest.approx(1)


def test_a_preview_shows_all_choices(task):
    batches = task.batches("val", None)
    lines = task.preview(batches.load(batches.plan.batch(0)))
    assert [line.split(":")[0] for line in lines[1:]] in (
        ["  0 (right)", "  1", "  2"],
        ["  0", "  1 (right)", "  2"],
        ["  0", "  1", "  2 (right)"],
    )


@pytest.mark.parametrize("label", ["3", "-1", "one", ""])
def test_a_label_that_is_no_choice(task, corpus, label):
    write(corpus, [*EXAMPLES[:2], (*EXAMPLES[2][:-1], label)])
    message = (
        f"val, row 3: the label '{label}' is not one of 0, 1, 2: "
        "correct the file, or change data.choice_columns"
    )
    with pytest.raises(DataError, match=message):
        task.batches("val", None)


def test_a_missing_column(config, corpus, tmp_path):
    config.data.choice_columns = ("one", "four")
    with pytest.raises(
        DataError, match=r"train\.tsv:1 must name these columns once each: four"
    ):
        make_task(parse(config), tmp_path / "run").batches("train", 0)


def test_a_record_without_a_choice(task):
    with pytest.raises(
        DataError,
        match=(
            r"record 1 has the fields text, start, one, two: it must have .* and three"
        ),
    ):
        task.batches_of([dict(zip(COLUMNS[:4], EXAMPLES[0], strict=False))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data.choice_columns": ("one",)},
            r"config\.data\.choice_columns = \('one',\): must be two or more different",
        ),
        (
            {"data.choice_columns": ("one", "one")},
            r"config\.data\.choice_columns = .*: must be two or more different",
        ),
        (
            {"data.choice_columns": ("one", "text")},
            "none of them text_column or second_column",
        ),
        ({"data.max_length": 4}, r"config\.data\.max_length = 4: must be at least 5"),
    ],
)
def test_invalid_configs(config, change, message):
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)
