"""Answers and entities: examples by hand, all short sequences of tags, and every
threshold by brute force.
"""

import itertools

import numpy as np
import pytest

from transformer_jax.spans import (
    answer_exact_match,
    answer_f1,
    best_threshold,
    entities,
    entity_f1,
    malformed,
    normalize_answer,
    squad,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Broncos'\tquarterback!", "broncos quarterback"),
        ("an apple, a day", "apple day"),
        ("Another theory, Anna", "another theory anna"),  # articles are whole words
        ("$1.5-2 (U.S.)", "152 us"),  # punctuation leaves no space
        ("a.", ""),
        ("“the” café–bar", "“ ” café–bar"),  # only ASCII punctuation is removed
    ],
)
def test_normalize_answer(text, normal):
    assert normalize_answer(text) == normal


def test_answers_are_compared_after_normalization():
    assert (
        answer_exact_match("The gravity.", ["gravity"])
        == answer_f1("The gravity.", ["gravity"])
        == 1
    )
    assert (
        answer_exact_match("within a cloud", ["in clouds"])
        == answer_f1("graupel", ["hail"])
        == 0
    )


def test_answer_f1_counts_words():
    """2 of the 4 predicted words are among the 3 gold words, because one "new" can
    match only one.
    """
    assert answer_f1("new new York City", ["New York State"]) == pytest.approx(
        2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)
    )


def test_the_best_gold_answer_counts():
    golds = ["Denver Broncos", "Broncos", "the Denver football team"]
    assert answer_exact_match("Broncos", golds) == 1
    assert answer_f1("Denver", golds) == pytest.approx(2 / 3)
    assert answer_f1("Denver", golds[1:]) == pytest.approx(1 / 2)


@pytest.mark.parametrize("golds", [[], [""], ["the"]])
@pytest.mark.parametrize(
    ("prediction", "score"), [("", 1), ("The", 1), ("Normandy", 0)]
)
def test_a_question_without_an_answer_is_answered_by_nothing(golds, prediction, score):
    assert (
        answer_exact_match(prediction, golds) == answer_f1(prediction, golds) == score
    )


def test_nothing_is_no_answer_to_a_question_that_has_one():
    assert (
        answer_exact_match("", ["Normandy", "the"])
        == answer_f1("", ["Normandy", "the"])
        == 0
    )


def test_squad_is_the_mean_over_the_questions():
    scores = squad(
        ["the gravity", "Denver", "", "France"],
        [["gravity"], ["Denver Broncos"], [], []],
    )
    assert scores == pytest.approx(
        {"exact_match": 2 / 4, "f1": (1 + 2 / 3 + 1 + 0) / 4}
    )


def test_best_threshold_by_hand():
    """To keep an answer adds 2/3 (F1) or 0 (exact match) for the first question, 1
    for the second, -1 for the third.
    """
    predictions, references = (
        ["Denver", "gravity", "France"],
        [["Denver Broncos"], ["gravity"], []],
    )
    assert best_threshold(predictions, [3.0, -5.0, -2.0], references) == pytest.approx(
        {
            "best_exact_match": 2 / 3,
            "best_exact_match_threshold": -5.0,
            "best_f1": 2 / 3,
            "best_f1_threshold": -5.0,
        }
    )
    assert best_threshold(predictions, [-3.0, -5.0, -2.0], references) == pytest.approx(
        {
            "best_exact_match": 2 / 3,
            "best_exact_match_threshold": -5.0,
            "best_f1": (1 + 2 / 3 + 1) / 3,
            "best_f1_threshold": -3.0,
        }
    )


@pytest.mark.parametrize("score", [-7.0, 0.0, 1e300, np.inf])
def test_the_threshold_is_less_than_all_scores_if_no_answer_helps(score):
    best = best_threshold(["x", "y"], [score, score], [["z"], []])
    assert best["best_f1"] == best["best_exact_match"] == 1 / 2
    assert best["best_f1_threshold"] < score
    assert best["best_exact_match_threshold"] < score


@pytest.mark.parametrize("seed", range(11))
def test_best_threshold_is_the_best_of_all(seed):
    """The scores are small integers, so many are equal."""
    draw = np.random.default_rng(seed)
    words = np.array(["red", "green", "blue"])
    predictions = [" ".join(draw.choice(words, 2)) for _ in range(13)]
    references = [
        [" ".join(draw.choice(words, 2)) for _ in range(draw.integers(0, 3))]
        for _ in range(13)
    ]
    scores = draw.integers(-3, 4, 13)

    def at(threshold):
        return squad(
            [
                p if s <= threshold else ""
                for p, s in zip(predictions, scores, strict=True)
            ],
            references,
        )

    best = best_threshold(predictions, scores, references)
    for name in ("exact_match", "f1"):
        found = {threshold: at(threshold)[name] for threshold in range(-4, 4)}
        assert best[f"best_{name}"] == pytest.approx(max(found.values()))
        assert at(best[f"best_{name}_threshold"])[name] == pytest.approx(
            max(found.values())
        )


def test_answers_need_references():
    with pytest.raises(ValueError, match=r"^0 predictions for 0 references"):
        squad([], [])
    with pytest.raises(ValueError, match=r"^1 predictions for 2 references"):
        best_threshold(["x"], [1.0, 2.0], [[], []])
    with pytest.raises(ValueError, match=r"^1 predictions for 2 references"):
        best_threshold(["x", "y"], [1.0], [[], []])


@pytest.mark.parametrize(
    ("scheme", "tags", "expected"),
    [
        ("iob2", "B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("iob2", "B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("iob2", "B-per-son I-per-son", [("per-son", 0, 2)]),
        ("iob2", "B I O B", [("", 0, 2), ("", 3, 4)]),
        ("iob2", "O I-PER I-PER", [("PER", 1, 3)]),
        ("iob2", "B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),
        ("bioes", "B-PER I-PER E-PER S-LOC", [("PER", 0, 3), ("LOC", 3, 4)]),
        ("bioes", "B-PER I-PER O", [("PER", 0, 2)]),
        ("bioes", "B-PER B-PER E-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("bioes", "E-PER E-PER I-PER", [("PER", 0, 1), ("PER", 1, 2), ("PER", 2, 3)]),
        ("bioes", "S-PER I-PER E-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("bioes", "B-PER E-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),
        ("bioes", "", []),
    ],
)
def test_entities(scheme, tags, expected):
    assert entities(tags.split(), scheme) == expected


@pytest.mark.parametrize(
    ("scheme", "tags", "positions"),
    [
        ("iob2", "B-PER I-PER B-PER O B-LOC", []),
        ("iob2", "I-PER O I-PER I-PER", [0, 2]),
        ("iob2", "B-PER I-LOC", [1]),
        ("iob2", "B-PER E-PER I-PER S", [1, 2, 3]),
        ("iob2", "o X-PER B- O-PER PER", [0, 1, 2, 3, 4]),
        ("bioes", "S-PER B-PER I-PER E-PER O", []),
        ("bioes", "B-PER O", [0]),
        ("bioes", "O B-PER", [1]),
        ("bioes", "B-PER I-PER S-PER", [1]),
        ("bioes", "E-PER", [0]),
        ("bioes", "B-PER E-LOC", [0, 1]),
        ("bioes", "O I-PER O", [1]),
    ],
)
def test_malformed(scheme, tags, positions):
    assert malformed(tags.split(), scheme) == positions


def written(spans, length, scheme):
    """Return the tags of the spans, as the scheme is defined."""
    tags = ["O"] * length
    for kind, start, end in spans:
        prefixes = "B" + "I" * (end - start - 1)
        if scheme == "bioes":
            prefixes = "S" if end - start == 1 else prefixes[:-1] + "E"
        tags[start:end] = [f"{prefix}-{kind}" for prefix in prefixes]
    return tags


@pytest.mark.parametrize(("scheme", "prefixes"), [("iob2", "BI"), ("bioes", "BIES")])
def test_tags_are_well_formed_if_their_entities_are_written_like_them(scheme, prefixes):
    """All sequences of up to 4 tags with two types."""
    alphabet = [
        "O",
        *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("X", "Y")),
    ]
    well_formed = 0
    for length in range(5):
        for tags in itertools.product(alphabet, repeat=length):
            found = entities(tags, scheme)
            assert (written(found, length, scheme) == list(tags)) == (
                not malformed(tags, scheme)
            ), tags
            assert len(found) == len(set(found))
            well_formed += not malformed(tags, scheme)
    # Sentences of n tokens, by the length of their first entity: t(n) = t(n - 1) + 2
    # (t(n - 1) + ... + t(0)).
    assert well_formed == 1 + 3 + 11 + 41 + 153


def test_entity_f1_by_hand():
    """The example of seqeval's documentation: the person is right, the other entity
    begins too early.
    """
    references = ["O O O B-MISC I-MISC I-MISC O", "B-PER I-PER O"]
    predicted = ["O O B-MISC I-MISC I-MISC I-MISC O", "B-PER I-PER O"]
    scores = entity_f1(
        [p.split() for p in predicted], [r.split() for r in references], "iob2"
    )
    assert scores == {"precision": 1 / 2, "recall": 1 / 2, "f1": 1 / 2}


def test_entity_f1_of_the_example_of_conlleval():
    """459 phrases, 539 found, 371 of them correct: the totals in conlleval's
    documentation.
    """
    right, wrong, missed = (
        371 * [("B-NP", "B-NP")],
        (539 - 371) * [("B-NP", "O")],
        (459 - 371) * [("O", "B-NP")],
    )
    predicted, references = zip(*right, *wrong, *missed, strict=True)
    scores = entity_f1(
        [[tag] for tag in predicted], [[tag] for tag in references], "iob2"
    )
    assert {name: round(100 * score, 2) for name, score in scores.items()} == {
        "precision": 68.83,
        "recall": 80.83,
        "f1": 74.35,
    }


def test_an_entity_is_right_in_its_own_sentence_only():
    assert entity_f1([["B-X"], ["O"]], [["O"], ["B-X"]], "iob2")["f1"] == 0
    assert entity_f1([["B-X"], ["B-X"]], [["B-X"], ["B-Y"]], "iob2")["f1"] == 1 / 2


@pytest.mark.parametrize(
    ("predicted", "reference"), [("O", "O"), ("B-X", "O"), ("O", "B-X")]
)
def test_entity_scores_without_entities_are_0(predicted, reference):
    assert entity_f1([[predicted]], [[reference]], "iob2") == {
        "precision": 0,
        "recall": 0,
        "f1": 0,
    }


def test_entity_f1_needs_a_prediction_for_each_token():
    with pytest.raises(ValueError, match=r"^2 predictions for 1 references"):
        entity_f1([["O"], ["O"]], [["O"]], "iob2")
    with pytest.raises(
        ValueError,
        match=(
            r"^sentence 1 has 2 predicted tags for 3 tokens: .* one for each; predict O"
        ),
    ):
        entity_f1([["O"], ["O", "O"]], [["O"], ["O", "O", "O"]], "iob2")


def test_unknown_tags_and_schemes_are_named():
    with pytest.raises(
        ValueError,
        match=r"^tag 1 is 'E-PER': tags of iob2 match O\|\[BI\].*; correct the tag",
    ):
        entities(["O", "E-PER"], "iob2")
    for read in (entities, malformed):
        with pytest.raises(
            ValueError, match=r"^scheme='iob1': must be one of iob2, bioes; convert"
        ):
            read(["O"], "iob1")
