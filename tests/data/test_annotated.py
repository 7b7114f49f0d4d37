"""Readers of annotated text: SQuAD questions, CoNLL sentences, and documents."""

import copy
import gzip
import json
import re

import pytest

from helpers.corpus import real_data
from transformer_jax.data.annotated import conll_file, documents_file, squad_file
from transformer_jax.data.sources import DataError

CONTEXT = "Das 🌲 ist grün.\nDas Haus ist grün, das Haus ist alt."
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Häuser",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "q1",
                            "question": "Was ist grün?",
                            "answers": [
                                {"text": "Das 🌲", "answer_start": 0},
                                {"text": "Haus", "answer_start": 39},
                            ],
                        },
                        {
                            "id": "q2",
                            "question": "Was ist rot?",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                },
                {"context": "A b", "qas": []},
            ],
        },
        {
            "title": "",
            "paragraphs": [
                {
                    "context": "C d",
                    "qas": [{"id": "q3", "question": "C?", "answers": []}],
                }
            ],
        },
    ],
}


def written(path, **changes):
    """Write SQUAD as dev.json, with changed keys of its first question.

    None removes a key.
    """
    content = copy.deepcopy(SQUAD)
    question = content["data"][0]["paragraphs"][0]["qas"][0] | changes
    content["data"][0]["paragraphs"][0]["qas"][0] = {
        key: value for key, value in question.items() if value is not None
    }
    (path / "dev.json").write_text(json.dumps(content, indent=1))
    return path


def test_squad(tmp_path, caplog):
    source = squad_file(written(tmp_path), "dev")
    assert len(source) == 3
    first = source[0]
    answers = json.loads(first.pop("answers"))
    assert answers == [{"text": "Das 🌲", "start": 0}, {"text": "Haus", "start": 39}]
    assert all(
        CONTEXT[answer["start"] :].startswith(answer["text"]) for answer in answers
    )
    assert first == {
        "id": "q1",
        "title": "Häuser",
        "question": "Was ist grün?",
        "context": CONTEXT,
    }
    assert source.column("answers")[1:] == ["[]", "[]"]
    assert source[2]["context"] == "C d"
    assert source.where == f"{tmp_path}/dev.json"
    assert not caplog.records


def test_squad_parts_columns_and_gzip(tmp_path):
    content = (written(tmp_path) / "dev.json").read_bytes()
    (tmp_path / "dev.json").unlink()
    (tmp_path / "dev.json.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + content))
    part = squad_file(tmp_path, "dev[1:]", ["question", "id"])
    assert [part[i] for i in range(2)] == [
        {"question": "Was ist rot?", "id": "q2"},
        {"question": "C?", "id": "q3"},
    ]
    assert squad_file(tmp_path, "dev[:34%]", ["id"]).column("id") == ["q1"]
    with pytest.raises(
        DataError,
        match=(
            r"the part 0 to 0 of the 3 questions of .*dev\.json\.gz: it must not be"
            r" empty"
        ),
    ):
        squad_file(tmp_path, "dev[:33%]", ["id"])
    with pytest.raises(
        DataError,
        match=r"dev\.json\.gz has no column label: choose from id, title, question",
    ):
        squad_file(tmp_path, "dev", ["id", "label"])


def test_squad_without_answers_can_be_read_for_prediction(tmp_path):
    written(tmp_path, answers=None)
    assert (
        squad_file(tmp_path, "dev", ["question", "context"])[0]["question"]
        == "Was ist grün?"
    )
    with pytest.raises(
        DataError,
        match=r"dev\.json, question q1 must have 'answers', a list, but it is",
    ):
        squad_file(tmp_path, "dev", ["question", "answers"])


@pytest.mark.parametrize(
    ("given", "start"), [(36, 39), (34, 39), (28, 20), (0, 20), (-7, 20), (900, 39)]
)
def test_an_answer_moves_to_its_nearest_occurrence(tmp_path, given, start, caplog):
    written(tmp_path, answers=[{"text": "Haus", "answer_start": given}])
    assert [match.start() for match in re.finditer("Haus", CONTEXT)] == [20, 39]
    assert json.loads(squad_file(tmp_path, "dev")[0]["answers"]) == [
        {"text": "Haus", "start": start}
    ]
    assert caplog.messages == [
        f"{tmp_path}/dev.json: answers that are not at their answer_start, "
        "and the nearest occurrence is used: 1, e.g. 'Haus' of q1"
    ]


def test_an_answer_that_does_not_occur_is_dropped(tmp_path, caplog):
    answers = [
        {"text": text, "answer_start": 20} for text in ("Baum", "Haus", "haus", "a.c")
    ]
    assert json.loads(
        squad_file(written(tmp_path, answers=answers), "dev")[0]["answers"]
    ) == [{"text": "Haus", "start": 20}]
    assert caplog.messages == [
        f"{tmp_path}/dev.json: answers that do not occur in their contexts, "
        "and are left out: 3, e.g. 'Baum' of q1, 'haus' of q1, 'a.c' of q1"
    ]
    written(tmp_path, answers=answers[:1])
    with pytest.raises(
        DataError,
        match=(
            r"question q1: the answer 'Baum' does not occur in the context.*"
            r" Correct the"
        ),
    ):
        squad_file(tmp_path, "dev")


def test_an_answer_in_another_unicode_form_is_said_to_be_so(tmp_path):
    written(tmp_path, answers=[{"text": "gru\u0308n", "answer_start": 10}])
    with pytest.raises(
        DataError,
        match=(
            r"does not occur in the context.* It does in another Unicode form: write"
            r" both"
        ),
    ):
        squad_file(tmp_path, "dev")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"id": None},
            "dev.json, article 1, paragraph 1, question 1 must have 'id', a string",
        ),
        ({"id": 7}, "question 1 must have 'id', a string"),
        ({"id": "q3"}, "dev.json, question q3 occurs twice"),
        ({"question": None}, "dev.json, question q1 must have 'question', a string"),
        (
            {"question": " "},
            "dev.json, question q1 has a blank question: write the text",
        ),
        ({"answers": {"text": "Haus"}}, "question q1 must have 'answers', a list"),
        (
            {"answers": ["Haus"]},
            "question q1, answer 1 must have 'text', a string, but it is \"Haus\"",
        ),
        (
            {"answers": [{"text": "", "answer_start": 0}]},
            "question q1, answer 1 has a blank text",
        ),
        (
            {"answers": [{"text": "Haus", "answer_start": "3"}]},
            "answer 1 must have 'answer_start', an integer",
        ),
        ({"question": "\ud83c?"}, "question q1 has half of a surrogate pair"),
        (
            {"is_impossible": "false"},
            "question q1 has is_impossible = 'false': it must be true or false",
        ),
    ],
)
def test_invalid_questions(tmp_path, changes, message):
    with pytest.raises(DataError, match=re.escape(message)):
        squad_file(written(tmp_path, **changes), "dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"data": [\n  {"title": }]}',
            "dev.json:2, column 13 is not JSON: Expecting value. Copy the file again",
        ),
        (b'{"data":\n "\xff"}', "dev.json:2 is not UTF-8"),
        (
            b"[]",
            (
                "dev.json must have 'data', a list, but it is []. "
                "Write the file in the layout of SQuAD"
            ),
        ),
        (
            b'{"data": [{"title": "T"}]}',
            "dev.json, article 1 must have 'paragraphs', a list",
        ),
        (
            b'{"data": [{"title": "T", "paragraphs": [{"context": "C"}]}]}',
            "paragraph 1 must have 'qas', a list",
        ),
        (
            b'{"data": [{"title": "T", "paragraphs": [{"context": "", "qas": []}]}]}',
            "paragraph 1 has a blank context",
        ),
        (
            b"[" * 200_000,
            "dev.json cannot be read as JSON: maximum recursion depth exceeded",
        ),
        (b"1" * 5_000, "dev.json cannot be read as JSON: Exceeds the limit"),
        (b'{"data": []}', "dev.json has no questions: it needs at least one"),
    ],
)
def test_invalid_squad_files(tmp_path, content, message):
    (tmp_path / "dev.json").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)):
        squad_file(tmp_path, "dev")


CONLL = (
    "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\t\n\n"
    + "Käse\tO\n.\tO\r\n"
    + "-DOCSTART- O\nEnd O"
)


def test_conll(tmp_path):
    (tmp_path / "train.conll").write_text(CONLL, newline="")
    source = conll_file(tmp_path, "train")
    assert [source[i] for i in range(len(source))] == [
        {"words": "EU rejects", "tags": "B-ORG O", "line": "3"},
        {"words": "Käse .", "tags": "O O", "line": "7"},
        {"words": "End", "tags": "O", "line": "10"},
    ]
    assert source.where == f"{tmp_path}/train.conll"
    assert conll_file(tmp_path, "train[1:-1]")[0]["line"] == "7"
    assert conll_file(tmp_path, "train[:67%]", ["line"]).column("line") == ["3", "7"]
    with pytest.raises(
        DataError,
        match=r"train\.conll has no column tag: choose from words, tags, line",
    ):
        conll_file(tmp_path, "train", ["words", "tag"])


def test_conll_without_tags(tmp_path):
    (tmp_path / "test.conll.gz").write_bytes(gzip.compress(b"one\ntwo\n\nthree\n"))
    assert conll_file(tmp_path, "test", ["words"]).column("words") == [
        "one two",
        "three",
    ]
    with pytest.raises(
        DataError, match=r"test\.conll\.gz:1 has no tag after the word 'one': add it"
    ):
        conll_file(tmp_path, "test", ["words", "tags"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\nb O\n\nc\n", "train.conll:4 has no tag after the word 'c'"),
        ("a O\nc\t\n", "train.conll:2 has no tag after the word 'c'"),
        (
            "a O\nNew York\tB-LOC\n",
            "train.conll:2 has the word 'New York' and the tag 'B-LOC', of which one",
        ),
        (
            "a O\n10\u00a0000 O\n",
            "train.conll:2 has the word '10\\xa0000' and the tag 'O', of which one",
        ),
        (
            "a\tO\tB LOC\n",
            "train.conll:1 has the word 'a' and the tag 'B LOC', of which one",
        ),
        (
            "a\tO\n\tO\n",
            "train.conll:2 has the word '' and the tag 'O', of which one is empty or",
        ),
        ("\n-DOCSTART- O\n\n", "has no sentences: it needs at least one"),
    ],
)
def test_invalid_conll(tmp_path, content, message):
    (tmp_path / "train.conll").write_text(content)
    with pytest.raises(DataError, match=re.escape(message)):
        conll_file(tmp_path, "train")


def test_documents(tmp_path):
    (tmp_path / "train.txt").write_text(
        "\n \nA b.\n C d. \r\n\n\t\n\nÄ!\n\nE\nF\nG", newline=""
    )
    source = documents_file(tmp_path, "train")
    assert source.column("text") == ["A b.", "C d.", "Ä!", "E", "F", "G"]
    assert source.column("document") == ["1", "1", "2", "3", "3", "3"]
    part = documents_file(tmp_path, "train[1:]", ["document", "text"])
    assert part[0] == {"document": "2", "text": "Ä!"}
    assert len(part) == 4
    assert documents_file(tmp_path, "train[:67%]", ["text"]).column("text") == [
        "A b.",
        "C d.",
        "Ä!",
    ]
    with pytest.raises(
        DataError,
        match=r"train\[4:5\] is the part 4 to 5 of the 3 documents of .*train\.txt",
    ):
        documents_file(tmp_path, "train[4:5]")
    with pytest.raises(
        DataError,
        match=r"train\.txt has no column sentence: choose from text, document",
    ):
        documents_file(tmp_path, "train", ["sentence"])
    (tmp_path / "val.txt").write_text("\n\n")
    with pytest.raises(
        DataError, match=r"val\.txt has no documents: it needs at least one"
    ):
        documents_file(tmp_path, "val")


def test_real_questions(caplog):
    source = squad_file(real_data("squad"), "dev")
    assert len(source) == 2_968
    counts = [len(json.loads(answers)) for answers in source.column("answers")]
    assert (min(counts), sum(counts)) == (1, 9_661)
    assert not caplog.records


def test_real_tags():
    sizes = {
        split: conll_file(real_data("wnut17"), split)
        for split in ("train", "dev", "test")
    }
    assert {split: len(source) for split, source in sizes.items()} == {
        "train": 3_394,
        "dev": 1_009,
        "test": 1_287,
    }
    tags = [tag for line in sizes["train"].column("tags") for tag in line.split()]
    assert len(tags) == 62_730
    kinds = {"corporation", "creative-work", "group", "location", "person", "product"}
    assert set(tags) == {"O", *(f"{place}-{kind}" for place in "BI" for kind in kinds)}
