"""Windows of contexts, and answers as spans of tokens, compared with plain Python."""

import json
import re

import numpy as np
import pytest

from helpers.corpus import real_data
from transformer_jax.data.annotated import squad_file
from transformer_jax.data.sources import DataError
from transformer_jax.data.streams import SpecialIds
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.windows import (
    Answer,
    QuestionAnsweringData,
    QuestionWindows,
    read_answers,
    whole_letters,
)

ODD = (
    "Die ÉCOLE von Zürich 🌲🌲 kostet 3,50 €\u00a0– "
    "«Naïve» Straße\tund\u200b e\u0301te."
)


def windows_of(tokenizer, questions, contexts, what="here", **sizes):
    data = QuestionAnsweringData(directory="none", **sizes)
    assert not list(data.problems())
    return QuestionWindows(
        tokenizer.encode(questions),
        contexts,
        tokenizer,
        data,
        SpecialIds(1, 2, 0),
        what,
    )


def characters(questions, contexts, what="here", **sizes):
    """Return windows in which every character is a token, and the text of each row,
    with "-" for special tokens.
    """
    tokenizer = train_tokenizer("characters", [*questions, *contexts], 304)
    found = windows_of(tokenizer, questions, contexts, what, **sizes)
    rows = (tokenizer.tokens(found.rows[i]) for i in range(len(found.rows)))
    return found, [
        "".join(token if len(token) == 1 else "-" for token in row) for row in rows
    ]


def test_a_row_is_the_question_and_a_window():
    """A shorter question leaves more room.

    Room for "ab" is 11 - 3 - 2 = 6, and for the cut "abc" it is 5.
    """
    contexts, sizes = (
        ["0123456789", "0123456789", "xy"],
        {"max_length": 11, "max_question": 3, "stride": 3},
    )
    found, rows = characters(["ab", "abcd", "a"], contexts, **sizes)
    assert rows == [
        "-ab-012345-",
        "-ab-345678-",
        "-ab-6789-",
        "-abc-01234-",
        "-abc-34567-",
        "-abc-6789-",
        "-a-xy-",
    ]
    assert found.owners.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert found.second.tolist() == [4, 4, 4, 5, 5, 5, 3]
    assert [row[place] for row, place in zip(rows, found.second, strict=True)] == list(
        "036036x"
    )


def test_every_answer_in_every_window():
    context = "0123456789abc"
    for start in range(len(context)):
        for end in range(start + 1, len(context) + 1):
            found, rows = characters(
                ["??"], [context], max_length=10, max_question=2, stride=3
            )
            answer = Answer(context[start:end], start)
            targets = found.targets([answer], "here")
            for row, text in enumerate(rows):
                first, last = targets["start"][row], targets["end"][row]
                if answer.text in text:
                    assert text[first : last + 1] == answer.text
                    assert found.answer(0, row, first, last) == (start, end)
                else:
                    assert (first, last) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "lowercase", "max_length"),
    [("bert", True, 16), ("bert", False, 16), ("bpe_bytes", False, 32)],
)
def test_words_go_to_tokens_and_back(kind, lowercase, max_length):
    """Letters keep their case and accents in the answer, whatever the tokenizer does
    with them.
    """
    tokenizer = train_tokenizer(kind, [ODD, "die der das"], 300, lowercase=lowercase)
    words = ODD.replace("\u200b", " ").split()
    golds = [
        Answer(word, ODD.index(word))
        for word in [*words, "ÉCOLE von Zürich", "🌲🌲 kostet 3,50 €", "Naïve"]
    ]
    questions, contexts = ["die der"] * len(golds), [ODD] * len(golds)
    found = windows_of(
        tokenizer, questions, contexts, max_length=max_length, max_question=5, stride=5
    )
    assert len(found.owners) > len(golds)
    targets, firsts = (
        found.targets(golds, "here"),
        np.searchsorted(found.owners, np.arange(len(golds))),
    )
    for row in np.flatnonzero(targets["start"]):
        owner = found.owners[row]
        text, start = golds[owner]
        places = targets["start"][row], targets["end"][row]
        assert found.answer(owner, row - firsts[owner], *places) == (
            start,
            start + len(text),
        )
    assert set(found.owners[targets["start"] > 0]) == set(range(len(golds)))


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "Cafe\u0301 Noir",
            "Tie\u0302\u0301ng Vie\u0323\u0302t",
            "हिन्दी की",
            "फ\u093c",
            "בְּרֵאשִׁית בָּרָא",
            "بِسْمِ اللَّهِ",
        ),
        *(
            "ที่นี่ น้ำ",
            "d\u0323\u0307 x",
            "\u1112\u1161\u11ab\u1100\u116e\u11a8 x",
            "👩\u200d👧 👍🏽 ❤\ufe0f",
            "İI\u0307 ß",
        ),
    ],
)
def test_an_answer_has_its_combining_characters(text, lowercase):
    """Its own tokens give each gold answer back: every word, and the whole text."""
    context = f"die {text} das {text}."
    tokenizer = train_tokenizer("bert", [context], 300, lowercase=lowercase)
    golds = [Answer(word, context.index(word)) for word in [*text.split(), text]]
    found = windows_of(tokenizer, ["die"] * len(golds), [context] * len(golds))
    targets = found.targets(golds, "here")
    for i, (word, start) in enumerate(golds):
        assert found.answer(i, 0, targets["start"][i], targets["end"][i]) == (
            start,
            start + len(word),
        )


def test_an_empty_part_stays_empty():
    assert whole_letters("e\u0301", 1, 1) == (1, 1)
    assert whole_letters("e\u0301\u0302", 1, 2) == (0, 3)
    assert whole_letters("\u0301x", 0, 1) == (0, 1)


def test_a_part_of_a_token_is_its_whole_token():
    context = "the successfully  red"
    found = windows_of(train_tokenizer("words", [context], 10), ["the"], [context])
    for answer, expected in (
        (Answer("success", 4), "successfully"),
        (Answer("e s", 2), "the successfully"),
        (Answer("y  r", 15), "successfully  red"),
    ):
        (first,), (last,) = found.targets([answer], "here").values()
        start, end = found.answer(0, 0, first, last)
        assert context[start:end] == expected


def test_an_answer_has_no_white_space_around_it():
    found, _ = characters(["?"], [" ab  c "], max_length=20, max_question=1, stride=5)
    place = found.second[0]
    assert found.answer(0, 0, place, place + 6) == (1, 6)
    assert found.answer(0, 0, place + 3, place + 3) == (4, 4)


def test_what_is_lost_is_said(caplog):
    contexts, sizes = (
        ["0123456789", "01", ""],
        {"max_length": 11, "max_question": 3, "stride": 5},
    )
    found, _ = characters(["ab", "abcd", ""], contexts, "train", **sizes)
    assert len(caplog.messages) == 3
    assert (
        "train: 1 of 3 examples have a question that is cut "
        "to data.max_question = 3 tokens; the first is row 2" in (caplog.text)
    )
    assert (
        "train: 1 of 3 examples have a question without tokens; the first is row 3"
        in caplog.text
    )
    assert (
        "train: 1 of 3 examples have a context without tokens, and are answered by ''; "
        "the first is row 3" in (caplog.text)
    )
    caplog.clear()
    targets = found.targets([Answer("2345678", 2), Answer("01", 0), None], "train")
    assert targets["start"].tolist() == [0, 0, 5, 0]
    assert (
        "train: 1 of 3 examples have an answer that no window contains; "
        "its target is [CLS]" in caplog.text
    )
    assert caplog.text.strip().endswith("the first is row 1")
    caplog.clear()
    found.targets([Answer("2345", 2), Answer("01", 0), None], "train")
    assert not caplog.messages


def test_answers_are_read():
    answers = [[{"text": "b c", "start": 2}, {"start": 0, "text": "a"}], []]
    assert read_answers(map(json.dumps, answers), ["a b c", "x"], "here") == [
        [Answer("b c", 2), Answer("a", 0)],
        [],
    ]


@pytest.mark.parametrize(
    "wrong",
    ["", "b", "3", '"b"', '{"text": "b", "start": 1}', '["b"]', '[{"text": "b"}]'],
)
def test_what_is_no_list_of_answers(wrong):
    with pytest.raises(
        DataError,
        match=r"dev, row 2: the answers .* are not a JSON list of objects with",
    ):
        read_answers(["[]", wrong], ["abc", "abc"], "dev")


@pytest.mark.parametrize(
    ("text", "start", "message"),
    [
        (
            "b",
            0,
            (
                "the answer 'b' is not in the context at start = 0: "
                "correct it; start counts characters from 0"
            ),
        ),
        ("x", 1, "the answer 'x' is not in the context at start = 1"),
        ("c", -1, "the answer 'c' is not in the context at start = -1"),
        ("c", 7, "the answer 'c' is not in the context at start = 7"),
        (" ", 3, "the answer ' ' is not in the context at start = 3"),
        ("b", "1", "are not a JSON list"),
        ("b", 1.0, "are not a JSON list"),
        ("b", None, "are not a JSON list"),
        (1, 1, "are not a JSON list"),
    ],
)
def test_an_answer_must_be_at_its_start(text, start, message):
    column = json.dumps([{"text": "a", "start": 0}, {"text": text, "start": start}])
    with pytest.raises(DataError, match=f"dev, row 1: .*{message}"):
        read_answers([column], ["abc d"], "dev")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_question": 0}, "max_question: must be at least 1"),
        (
            {"max_question": 29},
            (
                "max_question: must leave room for the context in max_length = 32: "
                "set it to 28"
            ),
        ),
        (
            {"max_question": 28, "stride": 2},
            r"stride: must be in \[1, 1\], because windows have .* = 1 tokens",
        ),
        ({"stride": 0}, r"stride: must be in \[1, 21\]"),
        ({"stride": 22}, r"stride: must be in \[1, 21\]"),
    ],
)
def test_problems_of_the_data_section(change, message):
    good = {"directory": "none", "max_length": 32, "max_question": 8, "stride": 21}
    assert not list(QuestionAnsweringData(**good).problems())
    ((key, rule),) = QuestionAnsweringData(**(good | change)).problems()
    assert re.match(message, f"{key}: {rule}")


def test_real_answers_go_to_tokens_and_back():
    """Only annotations that begin or end within a word do not."""
    source = squad_file(real_data("squad"), "train", ("question", "context", "answers"))
    questions, contexts, column = (
        list(source.column(name)) for name in ("question", "context", "answers")
    )
    tokenizer = train_tokenizer("bert", contexts[::50], 3000, lowercase=True)
    found = windows_of(
        tokenizer, questions, contexts, "train", max_length=384, stride=128
    )
    golds = [answers[0] for answers in read_answers(column, contexts, "train")]
    targets, firsts = (
        found.targets(golds, "train"),
        np.searchsorted(found.owners, np.arange(len(golds))),
    )
    inexact = set()
    for row in np.flatnonzero(targets["start"]):
        owner = found.owners[row]
        (text, start), context = golds[owner], contexts[owner]
        end = start + len(text)
        if found.answer(
            owner, row - firsts[owner], targets["start"][row], targets["end"][row]
        ) != (start, end):
            inexact.add(owner)
            assert (
                context[start - 1 : start + 1].isalnum()
                or context[end - 1 : end + 1].isalnum()
            )
    assert set(found.owners[targets["start"] > 0]) == set(range(len(golds)))
    assert 0 < len(inexact) < 0.01 * len(golds)
