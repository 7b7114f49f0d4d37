"""Scores that a config adds: ROUGE, and GLEU with the sources of a split."""

import math
import sys

import pytest

from helpers.runs import get_config, rows, run
from transformer_jax.config import ConfigError, make_task, override, parse
from transformer_jax.data.batching import Batches
from transformer_jax.data.columns import Sourced
from transformer_jax.data.text import ParallelData
from transformer_jax.tasks.chosen_scores import chosen_scores, with_sources
from transformer_jax.text_scores import gleu, has_rouge, rouge

needs_rouge = pytest.mark.skipif(
    not has_rouge(),
    reason="no rouge-score: pip install -c constraints.txt -e '.[rouge]'",
)

RECORDS = ["<2de> a b c d", "<2de> e f g h"]
REFERENCES = [["a b c x", "a b"], ["e f g h", "h"]]
LINES = ["a b c d", "e f g h"]
ONE_LANGUAGE = ParallelData()


def test_sources_are_beside_references_only_if_a_score_needs_them():
    batches = Batches(None, None, RECORDS, REFERENCES)
    for scores in ((), ("rouge",)):
        assert with_sources(batches, scores, ONE_LANGUAGE) is batches
    found = with_sources(batches, ("rouge", "gleu"), ONE_LANGUAGE)
    assert [*found.references] == [
        Sourced(texts, record)
        for texts, record in zip(REFERENCES, RECORDS, strict=True)
    ]
    assert found.records == RECORDS
    without = Batches(None, None, RECORDS)
    assert with_sources(without, ("gleu",), ONE_LANGUAGE) is without


def test_the_token_of_a_language_is_no_part_of_the_source():
    data = ParallelData(directions=("en-de",))
    batches = with_sources(Batches(None, None, RECORDS, REFERENCES), ("gleu",), data)
    assert [entry.source for entry in batches.references] == LINES


def test_no_score_is_added_unless_it_is_chosen():
    assert chosen_scores((), LINES, REFERENCES, REFERENCES) == {}


def test_gleu_takes_the_sources_of_the_entries():
    entries = [
        Sourced(texts, source)
        for texts, source in zip(REFERENCES, ["a b c d", "x"], strict=True)
    ]
    found = chosen_scores(("gleu",), LINES, REFERENCES, entries)
    assert found == gleu(LINES, REFERENCES, ["a b c d", "x"])
    assert found != gleu(LINES, REFERENCES, ["x", "x"])


@needs_rouge
def test_rouge_needs_no_sources():
    found = chosen_scores(("rouge",), LINES, REFERENCES, REFERENCES)
    assert found == rouge(LINES, REFERENCES)
    assert found.keys() == {"rouge_1", "rouge_2", "rouge_l", "rouge_lsum"}


def test_gleu_without_sources_is_refused():
    entries = [Sourced(REFERENCES[0], "a"), REFERENCES[1]]
    message = "1 of 2 references have a source: GLEU needs all"
    with pytest.raises(ValueError, match=message):
        chosen_scores(("gleu",), LINES, REFERENCES, entries)


SOURCES = [
    "He go to the old school in the town every day .",
    "She have not seen the new film that he liked .",
]
CORRECTED = [
    "He goes to the old school in the town every day .",
    "She has not seen the new film that he liked .",
]
OTHERS = [
    "He goes to the old school in town every day .",
    "She has yet to see the new film that he liked .",
]


@pytest.mark.parametrize("references", [1, 2])
def test_the_sources_of_a_split_reach_the_score(tiny, corpus, tmp_path, references):
    for name, lines in (("en", SOURCES), ("de", CORRECTED)):
        (corpus / f"val.{name}").write_text("\n".join([*lines, ""]))
    expected = [[text] for text in CORRECTED]
    if references == 2:
        for path in corpus.glob("*.de"):
            path.with_name(f"{path.name}0").write_text(path.read_text())
            path.with_name(f"{path.name}1").write_text(path.read_text())
        (corpus / "val.de1").write_text("\n".join([*OTHERS, ""]))
        expected = [list(entry) for entry in zip(CORRECTED, OTHERS, strict=True)]
        tiny.data.references = 2
    plain = make_task(parse(tiny), tmp_path / "run").batches("val", None)
    override(tiny, ["--config.evaluation.text_scores=('gleu',)"])
    task = make_task(parse(tiny), tmp_path / "run")
    batches = task.batches("val", None)
    assert batches.sha256() == plain.sha256()
    predictions = [{"text": line} for line in SOURCES]
    scores = task.score({}, predictions, batches.references)
    assert scores["gleu"] == gleu(SOURCES, expected, SOURCES)["gleu"] > 0
    assert scores["gleu"] < gleu(SOURCES, expected, CORRECTED)["gleu"]
    corrected = [{"text": line} for line in CORRECTED]
    assert task.score({}, corrected, batches.references)["exact_match"] == 1
    assert not len(task.batches_of(SOURCES).references)


def test_a_run_chooses_its_best_step_by_gleu(tiny, tmp_path):
    run(
        tiny,
        tmp_path / "run",
        evaluation__text_scores=("gleu",),
        checkpoint__best_metric="gleu",
        decoding__beam_size=1,
        training__steps=2,
    )
    found = [row["gleu"] for row in rows(tmp_path / "run") if row["split"] == "val"]
    assert len(found) == 1
    assert math.isfinite(found[0])


@pytest.mark.parametrize(
    ("recipe_of", "keys", "message"),
    [
        (
            "own_files",
            {"evaluation.text_scores": ("gleu", "bleu")},
            "evaluation.text_scores = ('gleu', 'bleu'): may hold 'rouge' and 'gleu', "
            "but not 'bleu'; () adds no score",
        ),
        (
            "own_files",
            {"checkpoint.best_metric": "gleu"},
            "checkpoint.best_metric = 'gleu': needs evaluation.text_scores = "
            "('gleu',): set it, or choose bleu or loss",
        ),
        (
            "own_files",
            {"checkpoint.best_metric": "rouge_l", "evaluation.text_scores": ("gleu",)},
            "checkpoint.best_metric = 'rouge_l': needs evaluation.text_scores = "
            "('rouge',): set it",
        ),
        (
            "captions",
            {"evaluation.text_scores": ("gleu",)},
            "evaluation.text_scores = ('gleu',): 'gleu' needs a source that is text, "
            "and input.modality = 'grid'",
        ),
    ],
)
def test_scores_that_cannot_be(recipe_of, keys, message):
    config = get_config(recipe_of, "en-de" if recipe_of == "own_files" else "")
    config.data.directory = "somewhere"
    parse(config)
    config.update_from_flattened_dict(keys)
    with pytest.raises(ConfigError) as error:
        parse(config)
    assert f"config.{message}" in str(error.value)


def test_rouge_that_is_not_installed(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    tiny.evaluation.text_scores = ("gleu",)
    parse(tiny)
    tiny.evaluation.text_scores = ("rouge",)
    with pytest.raises(ConfigError) as error:
        parse(tiny)
    assert str(error.value) == (
        "config.evaluation.text_scores = ('rouge',): 'rouge' needs the package "
        "rouge-score: pip install -c constraints.txt -e '.[rouge]' in the folder of "
        "transformer_jax, or leave it out"
    )
