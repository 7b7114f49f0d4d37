"""ROUGE and GLEU: small cases by hand, the package rouge-score, and published figures
of JFLEG.
"""

import itertools
import random
import sys

import numpy as np
import pytest

from helpers.corpus import real_data
from transformer_jax import text_scores
from transformer_jax.text_scores import gleu, has_rouge, rouge

INSTALL = "pip install -c constraints.txt -e '.[rouge]'"
needs_rouge = pytest.mark.skipif(not has_rouge(), reason=f"no rouge-score: {INSTALL}")

SOURCE = "a b c d e f g h"
REFERENCE = "a b c d e f g x"


@pytest.mark.parametrize(
    ("hypothesis", "reference", "source", "expected"),
    [
        (REFERENCE, REFERENCE, SOURCE, 1),
        # all n-grams of the reference but the last one of each length
        ("a b c d e f g y", REFERENCE, SOURCE, (7 / 8 * 6 / 7 * 5 / 6 * 4 / 5) ** 0.25),
        # the same, and the wrong ones are the source's: each is subtracted
        (SOURCE, REFERENCE, SOURCE, (6 / 8 * 5 / 7 * 4 / 6 * 3 / 5) ** 0.25),
        # case matters
        ("a b c d e f g X", REFERENCE, SOURCE, (7 / 8 * 6 / 7 * 5 / 6 * 4 / 5) ** 0.25),
        # brevity
        ("a b c d", "a b c d e", "a b c d f", np.exp(1 - 5 / 4)),
        # no reward for length
        ("a b c d e", "a b c d", "x", (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        # the second "a" of the source is in the reference, so nothing is subtracted
        (
            "a a b c d e",
            "a b c d e f",
            "a a b c d e",
            (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25,
        ),
        # subtracted as often as both source and hypothesis have it
        (
            "a b c d e y y",
            "a b c d e f g",
            "y a b",
            (4 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25,
        ),
        # no 4-gram, no text
        ("a b c", "a b c", "x", 0),
        ("", "a b c d", "x", 0),
    ],
)
def test_gleu_by_hand(hypothesis, reference, source, expected):
    scores = gleu([hypothesis], [[reference]], [source])
    assert scores == {"gleu": pytest.approx(100 * expected)}


def test_gleu_sums_over_sentences_and_none_counts_below_zero():
    """In the second sentence, more n-grams are subtracted than match."""
    wrong = "p q r s t"
    found = gleu([SOURCE, wrong], [[REFERENCE], ["u v w x y"]], [SOURCE, wrong])
    precisions = 6 / 13 * 5 / 11 * 4 / 9 * 3 / 7
    assert found["gleu"] == pytest.approx(100 * precisions**0.25)
    longer = gleu([SOURCE, wrong], [[REFERENCE], ["u v w x y z"]], [SOURCE, wrong])
    assert longer["gleu"] == pytest.approx(found["gleu"] * np.exp(1 - 14 / 13))


def test_gleu_of_several_references_is_the_mean_over_draws():
    """The draws are those of `random.randint` of Python 2 with the seeds 101 j."""
    draw = np.random.default_rng(3)

    def texts():
        return [" ".join(draw.choice(list("abc"), 9)) for _ in range(5)]

    hypotheses, sources = texts(), texts()
    references = [list(entry) for entry in zip(texts(), texts(), texts(), strict=True)]
    expected = []
    before = random.getstate()
    for number in range(500):
        random.seed(101 * number)
        one = [[entry[int(random.random() * 3)]] for entry in references]
        expected.append(gleu(hypotheses, one, sources)["gleu"])
    random.setstate(before)
    assert np.ptp(expected) > 1
    found = gleu(hypotheses, references, sources)["gleu"]
    assert found == pytest.approx(np.mean(expected))
    assert gleu(hypotheses, references, sources)["gleu"] == found
    assert random.getstate() == before


def jfleg(split):
    """Return the sources and the four references of each sentence."""
    folder = real_data("jfleg")
    names = ["src", *(f"ref{number}" for number in range(4))]
    sources, *references = (
        (folder / f"{split}.{name}").read_text().splitlines() for name in names
    )
    return sources, [list(entry) for entry in zip(*references, strict=True)]


@pytest.mark.parametrize(("split", "published"), [("dev", 38.21), ("test", 40.54)])
def test_gleu_of_unchanged_sources_of_jfleg(split, published):
    """The figures of the data set's README, by the authors' program."""
    sources, references = jfleg(split)
    assert round(gleu(sources, references, sources)["gleu"], 2) == published


@pytest.mark.slow
@pytest.mark.parametrize(("split", "published"), [("dev", 55.26), ("test", 62.37)])
def test_gleu_of_a_reference_of_jfleg(split, published):
    """The README says only that references are averaged.

    The mean over the four, each against the other three, is 55.27 and 62.38.
    """
    sources, references = jfleg(split)
    scores = []
    for number in range(4):
        lines = [entry[number] for entry in references]
        others = [entry[:number] + entry[number + 1 :] for entry in references]
        scores.append(gleu(lines, others, sources)["gleu"])
    assert np.mean(scores) == pytest.approx(published, abs=0.02)


@needs_rouge
def test_rouge_by_hand():
    """The stem of "cats" is "cat". Of the 3 and 6 words, 3 match, and 2 in a row."""
    found = rouge(["The cats sat!"], [["a cat sat on the mat"]])
    assert found == {
        "rouge_1": pytest.approx(100 * 2 / (3 / 3 + 6 / 3)),
        "rouge_2": pytest.approx(100 * 2 / (2 / 1 + 5 / 1)),
        "rouge_l": pytest.approx(100 * 2 / (3 / 2 + 6 / 2)),
        "rouge_lsum": pytest.approx(100 * 2 / (3 / 2 + 6 / 2)),
    }


@needs_rouge
@pytest.mark.parametrize("mark", [". ", "! ", "?  "])
def test_the_longest_common_subsequence_of_texts_and_of_their_sentences(mark):
    """Of the whole texts, it is "b d" or "a d". Of the sentence "b c d", one sentence
    has b and the other d, and of the sentence "a", one has a.
    """
    found = rouge([f"x b{mark}a d"], [[f"a{mark}b c d"]])
    assert found["rouge_1"] == pytest.approx(75)
    assert found["rouge_2"] == 0
    assert found["rouge_l"] == pytest.approx(50)
    assert found["rouge_lsum"] == pytest.approx(75)
    one_sentence = rouge(["x b.a d"], [["a.b c d"]])
    assert one_sentence["rouge_lsum"] == pytest.approx(50)


@needs_rouge
def test_rouge_is_the_mean_over_texts_and_takes_the_best_reference_for_each_score():
    """The first reference has more words of the hypothesis, the second more pairs."""
    first, second = "d c b a", "a b x y"
    alone = [rouge(["a b c d"], [[text]]) for text in (first, second)]
    assert alone[0]["rouge_1"] > alone[1]["rouge_1"]
    assert alone[0]["rouge_2"] < alone[1]["rouge_2"]
    both = rouge(["a b c d"], [[first, second]])
    assert both == {name: max(one[name] for one in alone) for name in both}
    mean = rouge(["a b c d", "", "p q"], [[first, second], ["x"], ["p q"]])
    assert mean == pytest.approx({name: (both[name] + 100) / 3 for name in both})


@needs_rouge
def test_rouge_is_that_of_the_package():
    from rouge_score.rouge_scorer import RougeScorer

    words = ["running", "runs", "Ran", "the", "cats", "cat", "well-known", "1,000", "ü"]
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, n)) for n in draw.integers(1, 12, 20)]
    hypotheses, references = texts[:10], texts[10:]
    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    theirs = RougeScorer(names, use_stemmer=True)
    rows = map(theirs.score, references, hypotheses)
    columns = zip(*(row.values() for row in rows), strict=True)
    expected = [100 * np.mean([x.fmeasure for x in column]) for column in columns]
    found = rouge(hypotheses, [[text] for text in references])
    assert [*found.values()] == pytest.approx(expected)
    assert len({*expected}) >= 3


def test_rouge_without_its_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    for name in ("rouge_score.rouge_scorer", "rouge_score.tokenizers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not text_scores.has_rouge()
    with pytest.raises(ValueError, match=r"ROUGE needs the package rouge-score: pip"):
        rouge(["a"], [["a"]])
    assert INSTALL in text_scores.INSTALL_ROUGE


@pytest.mark.parametrize(
    ("hypotheses", "references", "sources", "message"),
    [
        ([], [], [], "0 predictions for 0 references: a metric needs one for each"),
        (["a"], [["a"], ["b"]], ["a"], "1 predictions for 2 references"),
        (["a", "b"], [["a"], ["b"]], ["a"], "1 sources for 2 predictions: GLEU needs"),
        (["a", "b"], [["a"], []], ["a", "b"], r"text 2 has the references \[\]: it"),
        (["a"], ["abc"], ["a"], "text 1 has the references 'abc': it needs a list"),
    ],
)
def test_texts_that_cannot_be_scored(hypotheses, references, sources, message):
    with pytest.raises(ValueError, match=message):
        gleu(hypotheses, references, sources)
    if len(sources) == len(hypotheses):
        with pytest.raises(ValueError, match=message):
            rouge(hypotheses, references)


def test_the_draws_of_sentences_with_other_numbers_of_references():
    """Each reference is drawn, and no other sentence's."""
    sizes = [1, 3, 2]
    draws = list(text_scores._draws(sizes))
    assert len(draws) == 500
    for column, size in zip(zip(*draws, strict=True), sizes, strict=True):
        assert set(column) == set(range(size))
    assert any(a != b for a, b in itertools.pairwise(draws))
    hypothesis = "a b c d"
    texts = [["x"], [hypothesis] * 3]
    found = gleu(["y", hypothesis], texts, ["z", "z"])["gleu"]
    assert found == pytest.approx(100 * 0.8**0.25)
    counts = [len(list(text_scores._draws(sizes))) for sizes in ([1, 1], [1, 2])]
    assert counts == [1, 500]
