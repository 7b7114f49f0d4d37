"""Question answering: best spans, the loss, answers of several windows, and
questions without an answer.
"""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers.runs import parameters, rows, run, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.data.sources import DataError
from transformer_jax.tasks.question_answering import best_spans
from transformer_jax.training.evaluation import Evaluator, _joined
from transformer_jax.training.sharding import make_mesh

FILLING = "Amaka hat rote Äpfel, und Bükra hat zwölf Kühe. "
LONG = (
    FILLING * 3
    + "Die ÉCOLE von Çelik 🌲 steht in Zürich, und Émile wohnt dort. "
    + FILLING
)
ANSWERS = ("ÉCOLE von Çelik", "🌲", "Zürich", "Émile")
SHORT = "Émile wohnt in Zürich."


def written(corpus, questions):
    """Write all splits: questions are (question, context, its answers), each answer
    where it first occurs.
    """
    paragraphs = []
    for i, (question, context, answers) in enumerate(questions):
        found = [
            {"text": text, "answer_start": context.index(text)} for text in answers
        ]
        paragraphs.append(
            {
                "context": context,
                "qas": [{"id": str(i), "question": question, "answers": found}],
            }
        )
    for split in ("train", "val", "test"):
        (corpus / f"{split}.json").write_text(
            json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]})
        )


@pytest.fixture
def config(corpus):
    written(
        corpus,
        [("Wo wohnt Émile?", LONG, [answer]) for answer in ANSWERS]
        + [("Wer?", SHORT, ["Émile", "Zür"])],
    )
    config = small("question_answering", corpus)
    config.data.tokenizer, config.data.lowercase = "bert", True
    config.model.num_layers = 1
    return config


@pytest.fixture
def task(config, tmp_path):
    return make_task(parse(config), tmp_path / "run")


def answered(task, batches, outputs):
    """Return the answers, given the outputs of all rows in order."""
    predictions = task.decode({name: np.array(x) for name, x in outputs.items()}, {})
    return _joined(predictions, batches)


def perfect(task, batches):
    """Return outputs that are right: the best score in windows with an answer, and
    low scores elsewhere.
    """
    plan = batches.plan
    arrays = [batches.load(plan.batch(i)) for i in range(len(plan))]
    index, start, end, second = (
        np.concatenate([a[name] for a in arrays])
        for name in ("index", "start", "end", "second")
    )
    order = np.argsort(index)[(index < 0).sum() :]
    start, end, second = start[order], end[order], second[order]
    score = np.where(start > 0, 5.0, -7.0)
    return {
        "score": score,
        "start": np.where(start, start, second),
        "end": np.where(start, end, second),
        "null": -score,
    }


@pytest.mark.parametrize("width", [1, 3, 7, 50])
def test_the_best_span_is_that_of_a_search_over_all_spans(width):
    draw, (many, length) = np.random.default_rng(width), (29, 23)
    start, end = draw.normal(size=(2, many, length)).astype(np.float32)
    first, last = np.sort(draw.integers(0, length + 1, (2, many)), axis=0)
    inside = (np.arange(length) >= first[:, None]) & (np.arange(length) < last[:, None])
    inside[3] = False
    found = [np.asarray(x) for x in best_spans(start, end, inside, width)]
    for b in range(many):
        spans = [
            (start[b, i] + end[b, j], i, j)
            for i in range(length)
            for j in range(i, min(i + width, length))
            if inside[b, i] and inside[b, j]
        ]
        assert tuple(x[b] for x in found) == (
            max(spans) if spans else (-np.inf, *(x[b] for x in found[1:]))
        )
    assert (found[0] == -np.inf).sum() == (~inside.any(axis=1)).sum() > 0


def test_the_loss_and_the_outputs_are_those_of_loops_over_rows(task, monkeypatch):
    """A span lies within the window, even if the question, [SEP] and padding have
    higher logits.

    Here, the parameters are the logits.
    """
    network = SimpleNamespace(output=lambda params, batch, key=None: params)
    monkeypatch.setattr(task, "network", network)
    batches = task.batches("val", None)
    batch = batches.load(batches.plan.batch(len(batches.plan) - 1))
    logits = np.random.default_rng(0).normal(size=(*batch["text"].shape, 2))
    for b, (second, length) in enumerate(
        zip(batch["second"], batch["text_length"], strict=True)
    ):
        logits[b, :second] += 5
        logits[b, max(length - 1, 0) :] += 5
        logits[b, [second, length - 2]] += 3 * (b % 2)  # the window's ends
    means, found = task.evaluate(jnp.float32(logits), batch, True)
    losses = []
    for b in np.flatnonzero(batch["index"] >= 0):
        length = batch["text_length"][b]
        for scores, name in zip(logits[b].T, ("start", "end"), strict=True):
            losses.append(
                np.log(np.exp(scores[:length]).sum()) - scores[batch[name][b]]
            )
        places = range(batch["second"][b], length - 1)
        best = max(
            (logits[b, i, 0] + logits[b, j, 1], i, j)
            for i in places
            for j in places
            if i <= j
        )
        assert found["score"][b] == pytest.approx(best[0], rel=1e-5)
        assert (found["start"][b], found["end"][b]) == best[1:]
        assert found["null"][b] == pytest.approx(logits[b, 0].sum(), rel=1e-5)
    assert 0 < len(losses) < 2 * len(logits)  # there are filler rows
    np.testing.assert_allclose(
        means["span"].sum / means["span"].weight, np.mean(losses), rtol=1e-5
    )
    gradient = jax.grad(
        lambda x: task.loss(x, batch, jax.random.key(1), 0)["span"].sum
    )(jnp.float32(logits))
    padding = np.arange(logits.shape[1]) >= batch["text_length"][:, None]
    assert (np.asarray(gradient).any(axis=-1) == ~padding).all()


def test_right_spans_give_the_answers_as_they_are_written(task):
    """Answers are in the second or third of several windows.

    The tokenizer has neither upper case nor accents.
    """
    batches = task.batches("val", None)
    assert np.bincount(batches.owners)[:4].min() > 2
    assert not perfect(task, batches)["score"][0] > 0
    found = answered(task, batches, perfect(task, batches))
    assert [prediction["answer"] for prediction in found] == [*ANSWERS, "Émile"]
    for prediction, context in zip(
        found, (record["context"] for record in batches.records), strict=True
    ):
        assert prediction["answer"] == context[prediction["start"] : prediction["end"]]
        assert prediction["score"] == 5
    assert [prediction["no_answer_score"] for prediction in found] == [-10] * 5
    assert batches.references == [[answer] for answer in ANSWERS] + [["Émile", "Zür"]]
    scores = task.score({"span": 0.5}, found, batches.references)
    assert scores == {"loss": 0.5, "exact_match": 1, "f1": 1}


@pytest.mark.parametrize(("threshold", "silent"), [(0.99, True), (1.0, False)])
def test_the_best_window_answers(config, tmp_path, threshold, silent):
    """By hand: the best score is that of the second window, 3, and the lowest score
    of "no answer" is 4.
    """
    config.data.unanswerable, config.answers.null_threshold = True, threshold
    task = make_task(parse(config), tmp_path / "run")
    batches = task.batches_of([{"question": "Wer wohnt?", "context": LONG}])
    more = len(batches.owners) - 3
    second = batches.load(batches.plan.batch(0))["second"][0]
    outputs = {
        "score": [1.0, 3.0, 2.0] + [0.0] * more,
        "null": [4.0, 6.0, 5.0] + [7.0] * more,
    }
    (found,) = answered(
        task,
        batches,
        outputs | {"start": [second] * (3 + more), "end": [second + 1] * (3 + more)},
    )
    assert (found["score"], found["no_answer_score"]) == (3, 1)
    assert found["best_answer"] == "zwölf Kühe"
    assert found["answer"] == ("" if silent else "zwölf Kühe")
    assert found["answer"] == LONG[found["start"] : found["end"]]


def test_scores_with_questions_without_an_answer(config, tmp_path):
    """By hand: "no answer" is right in the second and third of three questions.

    The best threshold is 1.
    """
    config.data.unanswerable = True
    task = make_task(parse(config), tmp_path / "run")
    predictions = [
        {"answer": "", "best_answer": "rote Kühe", "no_answer_score": 1.0},
        {"answer": "", "best_answer": "Kühe", "no_answer_score": 2.0},
        # a context without tokens
        {"answer": "", "best_answer": "", "no_answer_score": None},
    ]
    scores = task.score({"span": 0.5}, predictions, [["rote Kühe", "Kühe"], [], []])
    best = {
        f"best_{name}{key}": 1
        for name in ("exact_match", "f1")
        for key in ("", "_threshold")
    }
    assert (
        scores
        == {
            "loss": 0.5,
            "exact_match": pytest.approx(2 / 3),
            "f1": pytest.approx(2 / 3),
        }
        | best
    )
    assert set(task.score({}, predictions, [["Kühe"], [], []])) == set(scores) - {
        "loss"
    }


def test_questions_without_an_answer_are_noticed(config, tmp_path, corpus, caplog):
    written(
        corpus, [("Wo?", SHORT, ["Zürich"]), ("Wann?", SHORT, []), ("Wie?", SHORT, [])]
    )
    for unanswerable in (False, True):
        caplog.clear()
        config.data.unanswerable = unanswerable
        batches = make_task(parse(config), tmp_path / "run").batches("train", 0)
        message = (
            "train: 2 of 3 examples have no answer, "
            "which requires data.unanswerable = True; the first is row 2"
        )
        assert (message in caplog.text) != unanswerable
        assert batches.references == [["Zürich"], [], []]
        batch = batches.load(batches.plan.batch(0))
        places = {
            i: (batch["start"][b], batch["end"][b])
            for b, i in enumerate(batch["index"].tolist())
        }
        assert places[1] == places[2] == (0, 0)
        assert 0 < places[0][0] <= places[0][1]


@pytest.fixture
def predictor(task):
    """Predictions by random parameters."""
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    params = parameters(task)
    return lambda records: evaluator.predict(params, records)


def test_predictions_do_not_depend_on_the_batch(predictor):
    records = [
        {"question": "Wo wohnt Émile?", "context": text}
        for text in (LONG, SHORT, LONG + SHORT, SHORT)
    ]
    together = predictor(records)
    alone = [predictor([record])[0] for record in records]
    assert together == [
        {
            name: pytest.approx(x, rel=1e-4) if name != "answer" else x
            for name, x in p.items()
        }
        for p in alone
    ]
    assert together[1] == together[3]
    for record, prediction in zip(records, together, strict=True):
        assert (
            prediction["answer"]
            == record["context"][prediction["start"] : prediction["end"]]
            != ""
        )


def test_nothing_to_read(predictor, caplog):
    """A context without tokens has the answer "".

    A question without tokens is answered.
    """
    nothing = {
        "answer": "",
        "start": 0,
        "end": 0,
        "score": None,
        "no_answer_score": None,
    }
    found = predictor(
        [{"question": "Wer?", "context": ""}, {"question": "\u200b", "context": SHORT}]
    )
    assert found[0] == nothing
    assert found[1]["answer"]
    assert (
        "input: 1 of 2 examples have a context without tokens, and are answered by ''; "
        "the first is row 1" in caplog.text
    )
    assert (
        "input: 1 of 2 examples have a question without tokens; the first is row 2"
        in caplog.text
    )
    assert predictor([{"question": "", "context": " \n"}]) == [nothing]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            "Wer?",
            (
                "record 2 has the fields question: "
                "it must have question and context, and may have answers"
            ),
        ),
        (
            {"context": SHORT},
            "record 2 has the fields context: it must have question and context",
        ),
        (
            {"question": "Wer?", "context": SHORT, "id": "a"},
            "record 2 has the fields question, context, id",
        ),
        (
            {"question": "Wer?", "context": None},
            "record 2 has context = None: it must be text",
        ),
        (
            {"question": "Wer?", "context": SHORT, "answers": "Émile"},
            "input, row 2: the answers 'Émile' are not a JSON list",
        ),
        (
            {
                "question": "Wer?",
                "context": SHORT,
                "answers": '[{"text": "Émile", "start": 1}]',
            },
            (
                "input, row 2: "
                "the answer 'Émile' is not in the context at start = 1: correct it"
            ),
        ),
    ],
)
def test_what_is_not_a_question_is_named(task, record, message):
    good = {"question": "Wo?", "context": SHORT, "answers": "[]"}
    with pytest.raises(DataError, match=message):
        task.batches_of([good, record])


def test_an_answer_that_is_not_in_its_context_is_named(task, corpus):
    text = (corpus / "val.json").read_text()
    (corpus / "val.json").write_text(
        text.replace('"text": "Z\\u00fcrich"', '"text": "Zug"')
    )
    with pytest.raises(
        DataError,
        match=r"val\.json, question 2: the answer 'Zug' does not occur in the context",
    ):
        task.batches("val", None)


def test_a_long_question_is_cut(task, caplog):
    batches = task.batches_of([{"question": "Wo wohnt Émile? " * 9, "context": SHORT}])
    assert (
        batches.load(batches.plan.batch(0))["second"][0]
        == 2 + task.config.data.max_question
    )
    assert (
        "input: 1 of 1 examples have a question "
        "that is cut to data.max_question = 8 tokens" in caplog.text
    )


def test_every_window_has_its_maps(task):
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    params = parameters(task)
    records = [
        {"question": "Wo wohnt Émile?", "context": text}
        for text in (FILLING * 3, SHORT)
    ]
    several, one = evaluator.attention(params, records)
    assert len(several) == 2 * len(one)


def test_a_preview_shows_the_answer(task):
    batches = task.batches_of(
        [
            {
                "question": "Wo?",
                "context": SHORT,
                "answers": '[{"text": "Zürich", "start": 15}]',
            }
        ]
    )
    arrays = batches.load(batches.plan.batch(0))
    _, row, answer = task.preview(arrays)
    assert answer.startswith("  answer: z")
    assert answer.removeprefix("  answer: ") in row
    assert (
        task.preview(arrays | {"start": 0 * arrays["start"]})[2]
        == "  answer: not in this window"
    )


def test_answers_have_at_least_a_token(config):
    config.answers.max_answer = 0
    with pytest.raises(
        ConfigError,
        match=r"config\.answers\.max_answer = 0: must be at least 1, e\.g\. 30",
    ):
        parse(config)


def test_a_model_learns_a_dozen_questions(config, corpus, tmp_path):
    questions = []
    for i, name in enumerate(
        [
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
        ]
    ):
        context = FILLING * (i % 3) + f"{name} mag Rot, nicht Blau."
        questions.append(
            (f"Was mag {name}{' nicht' * (i % 2)}?", context, [("Rot", "Blau")[i % 2]])
        )
    written(corpus, questions)
    config.model.dropout_rate = 0.0
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
    ) = config.checkpoint.every = 60
    run(config, tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["exact_match"] == 1
    predictor = transformer_jax.load(tmp_path / "run")
    assert predictor.evaluate()["exact_match"] == 1
    (found,) = predictor.predict(
        [
            {
                "question": "Was mag Lea nicht?",
                "context": f"{FILLING * 2}Lea mag Rot, nicht Blau.",
            }
        ]
    )
    assert found["answer"] == "Blau"
    assert math.isfinite(found["score"])
