"""Classification: pairs, scores, invalid data, and the scripts on lines of pairs."""

import json

import numpy as np
import pytest

import transformer_jax
from helpers.forked import script
from helpers.runs import parameters, run, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

LABELS = ("contradiction", "neutral", "entailment")


def table(path, header, *rows):
    path.write_text("".join("\t".join(row) + "\n" for row in (header, *rows)))


@pytest.fixture
def config(corpus):
    """Return a config of pairs.

    Whether the second text has the first one's word is the label.
    """
    config = small("classification", corpus)
    draw = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "kmst" for b in "aeiou"]
    for split, count in (("train", 64), ("val", 11), ("test", 7)):
        rows = []
        for _ in range(count):
            first, second = draw.choice(words, 2, replace=False)
            kind = LABELS[draw.integers(3)]
            rows.append(
                (
                    first,
                    {"contradiction": "no", "neutral": second, "entailment": first}[
                        kind
                    ],
                    kind,
                )
            )
        table(corpus / f"{split}.tsv", ("premise", "hypothesis", "gold"), *rows)
    config.data.update(
        text_column="premise",
        second_column="hypothesis",
        label_column="gold",
        labels=LABELS,
    )
    config.data.tokenizer = "bert"
    return config


def task_of(config, workdir):
    return make_task(parse(config), workdir)


def evaluated(task, split):
    params = parameters(task)
    return params, Evaluator(task, make_mesh(task.config.mesh)).evaluate(
        params, split, greedy=True
    )


def test_a_pair_has_two_segments(config, corpus, tmp_path):
    table(
        corpus / "val.tsv",
        ("premise", "hypothesis", "gold"),
        ("ka ke", "mo", "neutral"),
        ("su", "", "entailment"),
    )
    task = task_of(config, tmp_path / "run")
    assert task.config.columns == (("premise", "hypothesis", "gold"), 2)
    batches = task.batches("val", None)
    arrays = batches.load(batches.plan.batch(0))
    tokenizer = task.corpus.tokenizers["text"]
    tokens = [
        tokenizer.tokens(arrays["text"][i, : arrays["text_length"][i]]) for i in (0, 1)
    ]
    assert tokens == [
        ["[CLS]", "ka", "ke", "[SEP]", "mo", "[SEP]"],
        ["[CLS]", "su", "[SEP]", "[SEP]"],
    ]
    assert arrays["second"][:2].tolist() == [4, 3]
    assert arrays["label"][:2].tolist() == [1, 2]
    _, _, segments = task.network.arguments(arrays)
    assert np.array(segments)[0, :6].tolist() == [0, 0, 0, 0, 1, 1]
    assert batches.records == [
        {"premise": "ka ke", "hypothesis": "mo"},
        {"premise": "su", "hypothesis": ""},
    ]
    assert list(batches.references) == ["neutral", "entailment"]


def test_long_pairs_are_cut_to_the_same_length_for_training_and_evaluation(
    config, corpus, tmp_path, caplog
):
    config.data.max_length, config.model.max_length = 8, 32
    long = ("ka " * 9, "mo " * 4, "neutral")
    table(
        corpus / "train.tsv",
        ("premise", "hypothesis", "gold"),
        *[long] * 8,
        ("ka", "mo", "neutral"),
    )
    task = task_of(config, tmp_path / "run")
    batches = task.batches("train", 1)
    arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]
    assert max(a["text_length"].max() for a in arrays) == 8
    assert (
        "train.tsv, split train: 8 of 9 examples "
        "are cut to data.max_length = 8 tokens; the first is row 1" in caplog.text
    )
    batches = task.batches("train", None)
    assert (
        batches.load(batches.plan.batch(len(batches.plan) - 1))["text_length"].max()
        == 8
    )


def test_the_scores_are_those_of_the_predictions(config, tmp_path):
    """Compare with loops over the predictions."""
    task = task_of(config, tmp_path / "run")
    params, scores = evaluated(task, "val")
    source = task.corpus.open("val")
    records = [
        dict(zip(HEADER, row, strict=True))
        for row in zip(*map(source.column, HEADER), strict=True)
    ]
    found = Evaluator(task, make_mesh(task.config.mesh)).predict(params, records)
    probability = [
        prediction["probabilities"][r["gold"]]
        for prediction, r in zip(found, records, strict=True)
    ]
    assert scores["loss"] == pytest.approx(-np.log(probability).mean(), rel=1e-4)
    right = [
        prediction["label"] == r["gold"]
        for prediction, r in zip(found, records, strict=True)
    ]
    assert scores["accuracy"] == pytest.approx(np.mean(right))
    assert [max(p["probabilities"], key=p["probabilities"].get) for p in found] == [
        p["label"] for p in found
    ]
    assert all(sum(p["probabilities"].values()) == pytest.approx(1) for p in found)
    assert scores["examples"] == 11


def test_scores_by_hand(config, tmp_path):
    """Of two labels, the second is the positive one: 2 true, 1 false positives, 1
    false negative, 2 true negatives.
    """
    config.data.labels = ("no", "yes")
    task = task_of(config, tmp_path)
    predictions = [
        {"label": label} for label in ("yes", "yes", "yes", "no", "no", "no")
    ]
    scores = task.score(
        {"cross_entropy": 0.5}, predictions, ["yes", "yes", "no", "yes", "no", "no"]
    )
    assert scores == pytest.approx(
        {"loss": 0.5, "accuracy": 4 / 6, "f1": 2 / 3, "matthews": (2 * 2 - 1) / 9}
    )
    assert "loss" not in task.score({}, predictions, ["yes"] * 6)


HEADER = ("premise", "hypothesis", "gold")


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (
            HEADER,
            [("a", "b", "neutral"), ("a", "b", "none")],
            r"test\.tsv, split test, row 2: the label 'none' is not one",
        ),
        (
            HEADER,
            [("a", "b", "")],
            (
                r"test\.tsv, split test, row 1: the label '' is not one of"
                r" contradiction, neutral,"
            ),
        ),
        (
            ("premise", "gold"),
            [("a", "neutral")],
            r"test\.tsv:1 must name .*: hypothesis",
        ),
        (HEADER, [("a", "neutral")], r"test\.tsv:2 has 2 fields"),
        (
            HEADER,
            [(" ", "b", "neutral"), ("", "b", "neutral")],
            r"test\.tsv: all 2 lines of premise .* are blank",
        ),
        (HEADER, [], r"test\.tsv"),
    ],
)
def test_invalid_splits(config, corpus, tmp_path, header, rows, message):
    """The other splits are unaffected: a label that only the test split has is named
    when that is opened.
    """
    table(corpus / "test.tsv", header, *rows)
    task = task_of(config, tmp_path / "run")
    task.batches("val", None)
    with pytest.raises(DataError, match=message):
        task.batches("test", None)


def test_the_message_for_a_part_of_a_file_says_where_it_starts(
    config, corpus, tmp_path
):
    table(corpus / "test.tsv", HEADER, *[("a", "b", "neutral")] * 3, ("a", "b", "none"))
    with pytest.raises(
        DataError,
        match=(
            r"test\.tsv, split test\[50%:\] \(row 1 is line 4\), row 2: the label"
            r" 'none'"
        ),
    ):
        task_of(config, tmp_path / "run").batches("test[50%:]", None)


def test_an_empty_file(config, corpus, tmp_path):
    (corpus / "val.tsv").write_bytes(b"")
    with pytest.raises(DataError, match=r"val\.tsv:1 must name"):
        task_of(config, tmp_path / "run").batches("val", None)


def test_a_blank_text_is_kept_and_warned_of(config, corpus, tmp_path, caplog):
    table(
        corpus / "val.tsv",
        HEADER,
        ("ka", "mo", "neutral"),
        ("  ", "mo", "neutral"),
        ("ka", "", "entailment"),
    )
    assert len(task_of(config, tmp_path / "run").batches("val", None).records) == 3
    assert (
        "val.tsv, split val: 2 of 3 examples have an empty text; the first is row 2"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data.labels": ("a", "a")},
            r"data\.labels = \('a', 'a'\): must be two or more different labels",
        ),
        ({"data.labels": ("a",)}, r"data\.labels = \('a',\): must be two or more"),
        (
            {"data.second_column": "premise"},
            r"data\.second_column = 'premise': must be a column of its own",
        ),
        (
            {"data.second_column": "gold"},
            r"data\.second_column = 'gold': must be a column of its own",
        ),
        (
            {"data.label_column": "premise"},
            r"data\.label_column = 'premise': must differ from data\.text_column",
        ),
        ({"data.max_length": 4}, r"data\.max_length = 4: must be at least 5"),
        (
            {"data.max_length": 2, "data.second_column": ""},
            r"data\.max_length = 2: must be at least 3",
        ),
    ],
)
def test_what_does_not_go_together(config, change, message):
    config.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=message):
        parse(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on pairs of sentences like those of SICK."""
    folder = tmp_path_factory.mktemp("pairs")
    doings = [
        "running",
        "sleeping",
        "training",
        "listening to music",
        "eating",
        "reading",
    ]
    for split in ("train", "val", "test"):
        rows = [
            (
                f"I am {a}",
                f"I am {b}",
                (
                    "entailment"
                    if a == b
                    else (
                        "neutral"
                        if {a, b} == {"running", "training"}
                        else "contradiction"
                    )
                ),
            )
            for a in doings
            for b in doings
        ]
        table(folder / f"{split}.tsv", HEADER, *rows)
    config = small("classification", folder)
    config.data.update(
        text_column="premise",
        second_column="hypothesis",
        label_column="gold",
        labels=LABELS,
    )
    config.data.tokenizer = "bert"
    run(config, folder / "run")
    return folder


EXAMPLE = ["I am sleeping", "I am listening to music", "I am training"]


def test_a_premise_against_three_hypotheses(trained):
    """Lines with tabs, lines with JSON objects, and records in Python have the same
    predictions.
    """
    records = [
        {"premise": "I am running", "hypothesis": hypothesis} for hypothesis in EXAMPLE
    ]
    lines = [f"I am running\t{hypothesis}" for hypothesis in EXAMPLE] + [
        json.dumps(record) for record in records
    ]
    done = script(
        "predict", f"--workdir={trained / 'run'}", stdin="\n".join(lines).encode()
    )
    assert done.returncode == 0, done.stderr.decode()
    found = [json.loads(line) for line in done.stdout.decode().splitlines()]
    predictor = transformer_jax.load(trained / "run")
    for i, prediction in enumerate(predictor.predict(records)):
        assert prediction["probabilities"].keys() == set(LABELS)
        assert found[i] == found[i + len(EXAMPLE)]
        assert found[i]["label"] == prediction["label"]
        assert found[i]["probabilities"] == pytest.approx(
            prediction["probabilities"], rel=1e-4
        )
    message = (
        "record 1 is 'a', of type str: "
        "it must be an object with the fields premise and hypothesis"
    )
    with pytest.raises(ValueError, match=message):
        predictor.predict(["a"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "a\tb\n\na\tb\n",
            (
                "error: input, line 2 is '', 1 column: "
                "separate premise, hypothesis by single tabs, or"
            ),
        ),
        (
            "a\tb\na\tb\tneutral\n",
            "error: input, line 2 is 'a\\tb\\tneutral', 3 columns",
        ),
        (
            '{"premise": "a"}\n',
            (
                "error: input, line 1 has the fields premise: "
                "it must have premise and hypothesis"
            ),
        ),
        ('{"premise": "a"\n', "error: input, line 1 is"),
    ],
)
def test_lines_that_are_no_pairs(trained, lines, words):
    done = script("predict", f"--workdir={trained / 'run'}", stdin=lines.encode())
    assert done.returncode == 2
    assert done.stdout == b""
    assert words in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_the_attention_of_pairs(trained, tmp_path):
    """Blank lines are skipped, but counted in messages. A line may have the label,
    too.
    """
    report = (
        "attention_report",
        f"--workdir={trained / 'run'}",
        f"--output={tmp_path / 'report.html'}",
    )
    lines = "I am running\tI am sleeping\n\n" + json.dumps(
        dict(zip(HEADER, ("ä", "b", "neutral"), strict=True))
    )
    done = script(*report, stdin=lines.encode() + b"\nb\tc\tneutral\n")
    assert done.returncode == 0, done.stderr.decode()
    page = (tmp_path / "report.html").read_text()
    assert "I am running" in page
    assert "sleeping" in page
    done = script(*report, stdin=b"a\tb\n\na\n")
    assert done.returncode == 2
    assert (
        "input, line 3 is 'a', 1 column: separate premise, "
        "hypothesis, up to gold by single tabs" in done.stderr.decode()
    )
