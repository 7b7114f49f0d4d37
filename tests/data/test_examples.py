"""Records to predict from, labels as numbers, and the layout of texts and pairs."""

import numpy as np
import pytest

from transformer_jax.data.examples import (
    Frame,
    Labels,
    as_object,
    columns_of,
    encode_numbers,
    laid_out,
    longest_first,
    parse_record,
)
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.sources import DataError

COLUMNS = ("en", "de")


def test_a_line_is_the_first_column():
    assert columns_of(["a", {"en": "b"}, ""], COLUMNS) == [["a", "b", ""], None]
    assert columns_of(["a"], ("text",)) == [["a"]]


def test_a_column_is_there_if_every_record_has_it():
    both = [{"en": "a", "de": "x"}, {"de": "", "en": "b"}]
    assert columns_of(both, COLUMNS) == [["a", "b"], ["x", ""]]
    assert columns_of([*both, "c"], COLUMNS) == [["a", "b", "c"], None]


@pytest.mark.parametrize(
    ("record", "columns", "message"),
    [
        (
            {"de": "x"},
            COLUMNS,
            "record 2 has the fields de: it must have en, and may have de",
        ),
        ({}, COLUMNS, r"record 2 has the fields \(none\): it must have en"),
        (
            {"en": "a", "fr": "x"},
            COLUMNS,
            "record 2 has the fields en, fr: it must have en, and may have de",
        ),
        ({"en": "a", "fr": "x"}, ("en",), "may have no other"),
        ({"en": "a", "de": 3}, COLUMNS, "record 2 has de = 3: it must be text"),
        ({"en": None}, COLUMNS, "record 2 has en = None: it must be text"),
    ],
)
def test_what_is_not_a_record_is_named(record, columns, message):
    with pytest.raises(DataError, match=message):
        columns_of(["a", record], columns)


def test_labels_are_numbered_in_the_order_of_the_config():
    labels = Labels(("odd", "even"))
    found = labels.encode(["even", "odd", "even"], "here")
    np.testing.assert_array_equal(found, [1, 0, 1])
    assert found.dtype == np.int32
    assert [labels.names[i] for i in found] == ["even", "odd", "even"]


def test_an_unknown_label_is_named():
    message = (
        r"val, row 3: the label 'none' is not one of odd, even: correct the file, or"
        r" change data\.labels"
    )
    with pytest.raises(DataError, match=message):
        Labels(("odd", "even")).encode(["even", "odd", "none"], "val")


PAIR = ("premise", "hypothesis", "label")


@pytest.mark.parametrize(
    ("line", "columns", "inputs", "most", "record"),
    [
        ("a\tb", ("text",), 1, 1, "a\tb"),
        ('{"text": "a"}', ("text",), 1, 1, '{"text": "a"}'),
        ("{a", COLUMNS, 1, 2, {"en": "{a"}),
        ("a", COLUMNS, 1, 2, {"en": "a"}),
        ("a\tb", COLUMNS, 1, 2, {"en": "a", "de": "b"}),
        ("a\tb", PAIR, 2, 2, {"premise": "a", "hypothesis": "b"}),
        ("\tb ", PAIR, 2, 2, {"premise": "", "hypothesis": "b "}),
        ("a\tb\tyes", PAIR, 2, 3, {"premise": "a", "hypothesis": "b", "label": "yes"}),
        (
            ' {"hypothesis": "b\\t", "premise": "ä"}',
            PAIR,
            2,
            2,
            {"premise": "ä", "hypothesis": "b\t"},
        ),
        (
            '{"premise": "a", "hypothesis": "b", "label": "c"}',
            PAIR,
            2,
            2,
            dict(zip(PAIR, "abc", strict=True)),
        ),
    ],
)
def test_a_line_is_a_record(line, columns, inputs, most, record):
    assert parse_record(line, "here", columns, inputs, most) == record


EXAMPLE = r'\{"premise": "…", "hypothesis": "…"\}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "",
            "input, line 3 is '', 1 column: "
            "separate premise, hypothesis by single tabs, or write .*" + EXAMPLE,
        ),
        ("a b", "input, line 3 is 'a b', 1 column: "),
        (
            "a\tb\tc",
            r"input, line 3 is 'a\\tb\\tc', 3 columns: separate premise, hypothesis by",
        ),
        (
            '["a", "b"]',
            r"input, line 3 is '\[\"a\", \"b\"\]', 1 column: .* or write a JSON object",
        ),
        (
            '{"premise": "a", ',
            r"input, line 3 is '\{.*', which is not JSON \(Expecting .*\): write it as "
            + EXAMPLE,
        ),
        (
            '{"premise": "a"} b',
            r"input, line 3 is .* which is not JSON \(Extra data.*\): write it as "
            + EXAMPLE,
        ),
        ('{"premise":' * 100_000, "input, line 3 is .*…', which is not JSON"),
        (
            '{"premise": "a"}',
            "input, line 3 has the fields premise: it must have premise and hypothesis",
        ),
        (
            '{"premise": "a", "hypothesis": "b", "x": ""}',
            "input, line 3 has the fields premise, hypothesis, x: it",
        ),
        (
            '{"premise": "a", "hypothesis": ["b"]}',
            r"input, line 3 has hypothesis = \['b'\]: it must be text",
        ),
        ("{}", r"input, line 3 has the fields \(none\)"),
    ],
)
def test_what_is_not_a_record_of_two_inputs_is_named(line, message):
    with pytest.raises(DataError, match=message):
        parse_record(line, "input, line 3", PAIR, 2, 2)


def test_too_many_columns_are_named():
    with pytest.raises(
        DataError,
        match=r"here is 'a\\tb\\tc', 3 columns: separate en, up to de by single tabs$",
    ):
        parse_record("a\tb\tc", "here", COLUMNS, 1, 2)


def test_numbers():
    np.testing.assert_array_equal(
        encode_numbers(["3.8", "-1e2", " 5 "], "here"), np.float32([3.8, -100, 5])
    )
    np.testing.assert_array_equal(
        encode_numbers([".5", "+7.", "1E-3"], "here"), np.float32([0.5, 7, 1e-3])
    )
    for text in ("four", "", "nan", "inf", "1,5", "1_000", "٣", "1e39", "."):
        with pytest.raises(
            DataError,
            match=(
                f"val, row 2: the label '{text}' is not a finite number: "
                "correct the file"
            ),
        ):
            encode_numbers(["1", text], "val")


def truncated(first, second, limit):
    """BERT's rule: while a pair is too long, the longer one loses a token, the
    second one if both are as long.
    """
    while first + second > limit:
        if first > second:
            first -= 1
        else:
            second -= 1
    return [first, second]


def test_the_longer_one_loses_first():
    pairs = np.array([(a, b) for a in range(14) for b in range(14)])
    for limit in (2, 3, 7, 10, 26):
        np.testing.assert_array_equal(
            longest_first(pairs, limit), [truncated(a, b, limit) for a, b in pairs]
        )


FIRST, SECOND = (
    Ragged.of([[11, 12, 13, 14, 15], [], [16], [17, 18]]),
    Ragged.of([[21, 22], [23], [], [24] * 7]),
)
LAYOUT = {"frame": Frame(2, 4, 3), "source": "val", "key": "data.max_length"}


def test_layout_of_texts(caplog):
    rows, place = laid_out(FIRST, None, limit=6, **LAYOUT)
    expected = [[2, 11, 12, 13, 14, 3], [2, 3], [2, 16, 3], [2, 17, 18, 3]]
    assert [rows[i].tolist() for i in range(4)] == expected
    assert place.tolist() == [len(row) for row in expected]
    assert caplog.messages == [
        (
            "val: 1 of 4 examples are cut to data.max_length = 6 tokens; "
            "the first is row 1"
        ),
        "val: 1 of 4 examples have an empty text; the first is row 2",
    ]


def test_layout_of_pairs(caplog):
    rows, place = laid_out(FIRST, SECOND, limit=8, **LAYOUT)
    expected = [
        [2, 11, 12, 13, 4, 21, 22, 3],
        [2, 4, 23, 3],
        [2, 16, 4, 3],
        [2, 17, 18, 4, 24, 24, 24, 3],
    ]
    assert [rows[i].tolist() for i in range(4)] == expected
    assert place.tolist() == [5, 2, 3, 4]
    assert caplog.messages == [
        (
            "val: 2 of 4 examples are cut to data.max_length = 8 tokens; "
            "the first is row 1"
        ),
        "val: 2 of 4 examples have an empty text; the first is row 2",
    ]
    caplog.clear()
    laid_out(FIRST.take(np.array([0])), SECOND.take(np.array([0])), limit=10, **LAYOUT)
    assert not caplog.messages


def test_several_separators():
    frame = Frame(2, 3, 3, separators=2)
    rows, place = laid_out(FIRST, SECOND, limit=9, **LAYOUT | {"frame": frame})
    assert rows[0].tolist() == [2, 11, 12, 13, 3, 3, 21, 22, 3]
    assert rows[1].tolist() == [2, 3, 3, 23, 3]
    assert place.tolist()[:2] == [6, 3]


def test_a_row_without_any_id():
    """An id stands for it, or it is an error. A pair with one text is not such a
    row.
    """
    nothing, options = (
        Frame(None, None, None, empty=9),
        {"source": "val.tsv", "key": "data.max_length"},
    )
    rows, place = laid_out(FIRST, None, limit=6, frame=nothing, **options)
    assert [rows[i].tolist() for i in range(4)] == [
        [11, 12, 13, 14, 15],
        [9],
        [16],
        [17, 18],
    ]
    assert place.tolist() == [5, 0, 1, 2]
    rows, _ = laid_out(
        FIRST, SECOND, limit=6, frame=nothing._replace(empty=None), **options
    )
    assert [rows[i].tolist() for i in (1, 2)] == [[23], [16]]
    with pytest.raises(
        DataError,
        match=r"val.tsv: row 2 has no text, and the tokenizer has no end id that could",
    ):
        laid_out(FIRST, None, limit=6, frame=nothing._replace(empty=None), **options)


@pytest.mark.parametrize(
    "record", ['{"text": "\\ud83c?"}', {"text": "\ud83c?"}, {"turns": ["a", "\ud83c"]}]
)
def test_half_a_surrogate_pair_in_a_prompt(record):
    with pytest.raises(
        DataError, match=r"record 7 has half of a surrogate pair .* in its t"
    ):
        as_object(record, ("text", "turns"), 7)


def test_half_a_surrogate_pair_in_a_field():
    with pytest.raises(
        DataError,
        match=r"input, line 3 has half of a surrogate pair .* in its de: correct it",
    ):
        parse_record('{"en": "a", "de": "\\udfff"}', "input, line 3", COLUMNS, 2, 2)


@pytest.mark.parametrize("record", [5, ["a"], None])
def test_a_record_of_another_type_is_left_to_the_caller(record):
    assert as_object(record, ("text",), 1) is record
