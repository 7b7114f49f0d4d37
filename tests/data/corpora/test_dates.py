import datetime
import hashlib
import itertools
import socket
import sys
from collections import defaultdict

import pytest

from transformer_jax.data.corpora import dates
from transformer_jax.data.corpora.dates import (
    FIGURES,
    FORMATS,
    LANGUAGES,
    Dates,
    examples,
    formats,
    write,
)

BY_HAND = {
    "English": [
        "March 1, 2024",
        "1 March 2024",
        "Mar 1, 2024",
        "01 MAR 2024",
        "01-Mar-24",
        "the 1st of March 2024",
        "Friday, March 1st, 2024",
    ],
    "German": [
        "1. März 2024",
        "1. März 2024",
        "1. März 24",
        "Freitag, den 1. März 2024",
    ],
    "French": [
        "1er mars 2024",
        "le 1er mars 2024",
        "1er mars 2024",
        "vendredi 1er mars 2024",
    ],
    "Spanish": [
        "1 de marzo de 2024",
        "1 mar 2024",
        "01 MAR 2024",
        "viernes, 1 de marzo de 2024",
    ],
    "Italian": ["1º marzo 2024", "1 mar 2024", "1 mar '24", "venerdì 1º marzo 2024"],
    "Dutch": ["1 maart 2024", "1 mrt. 2024", "1 mrt. '24", "vrijdag 1 maart 2024"],
    "Portuguese": [
        "1º de março de 2024",
        "1 de mar de 2024",
        "01/mar/2024",
        "sexta-feira, 1º de março de 2024",
    ],
}
FIGURES_BY_HAND = [
    "2024-03-01",
    "20240301",
    "2024/03/01",
    "2024年3月1日",
    "01-03-2024",
    "1-3-2024",
    "3/1/2024",
    "03/01/2024",
    "3/1/24",
    "1.3.2024",
    "01.03.2024",
    "01.03.24",
    "1.III.2024",
]


@pytest.fixture(scope="module")
def corpus():
    return {split: list(examples(split, size)) for split, size in dates.SIZES.items()}


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    builder = Dates(
        data_dir=tmp_path_factory.mktemp("dates"), file_format="array_record"
    )
    builder.download_and_prepare()
    return builder


@pytest.mark.parametrize("name", LANGUAGES)
def test_written_as_by_hand(name):
    language = LANGUAGES[name]
    assert [
        write(datetime.date(2024, 3, 1), language, p) for p in language.patterns
    ] == BY_HAND[name]


def test_figures_as_by_hand():
    assert [
        write(datetime.date(2024, 3, 1), FIGURES, p) for p in FIGURES.patterns
    ] == FIGURES_BY_HAND


@pytest.mark.parametrize(
    ("name", "iso", "pattern", "expected"),
    [
        (
            "English",
            "1999-12-31",
            "{weekday}, {month} {th}, {y}",
            "Friday, December 31st, 1999",
        ),
        (
            "English",
            "2024-02-11",
            "the {th} of {month} {y}",
            "the 11th of February 2024",
        ),
        (
            "English",
            "2024-02-22",
            "the {th} of {month} {y}",
            "the 22nd of February 2024",
        ),
        (
            "English",
            "2024-02-13",
            "the {th} of {month} {y}",
            "the 13th of February 2024",
        ),
        (
            "English",
            "2024-02-23",
            "the {th} of {month} {y}",
            "the 23rd of February 2024",
        ),
        (
            "German",
            "2000-02-29",
            "{weekday}, den {th} {month} {y}",
            "Dienstag, den 29. Februar 2000",
        ),
        ("French", "2024-08-11", "{weekday} {th} {month} {y}", "dimanche 11 août 2024"),
        ("Italian", "2024-05-11", "{th} {month} {y}", "11 maggio 2024"),
        ("Spanish", "2068-09-30", "{dd} {MON} {y}", "30 SEPT 2068"),
        ("Dutch", "1969-05-08", "{d} {mon} '{yy}", "8 mei '69"),
        ("Portuguese", "2024-10-21", "{dd}/{mon}/{y}", "21/out/2024"),
    ],
)
def test_written_examples(name, iso, pattern, expected):
    assert pattern in LANGUAGES[name].patterns
    assert write(datetime.date.fromisoformat(iso), LANGUAGES[name], pattern) == expected


def days_of(year):
    first = datetime.date(year, 1, 1)
    return [
        first + datetime.timedelta(i)
        for i in range(366)
        if (first + datetime.timedelta(i)).year == year
    ]


def test_every_string_has_one_answer():
    """Try all formats, on all days of the years at turning points.

    In all other years, try only the days that are easily mixed up.
    """
    whole_years = {
        1900,
        1904,
        1968,
        1969,
        1999,
        2000,
        2001,
        2024,
        2025,
        2068,
        2069,
        2099,
    }
    answers = defaultdict(set)
    for year in range(1900, 2100):
        for day in days_of(year):
            if (
                year in whole_years
                or day.day <= 2
                or (day.month, day.day) in {(2, 29), (12, 31), (11, 12)}
            ):
                for language, pattern in formats(day):
                    answers[write(day, language, pattern).casefold()].add(day)
    assert len(answers) > 300_000
    assert [written for written, days in answers.items() if len(days) > 1] == []


def test_month_words_mean_the_same_in_all_languages():
    months = defaultdict(set)
    for language in (FIGURES, *LANGUAGES.values()):
        for words in (language.months.split(), language.short_months.split()):
            for month, word in enumerate(words, 1):
                months[word.casefold().strip(".")].add(month)
    assert {word: found for word, found in months.items() if len(found) > 1} == {}
    assert months["mar"] == {3}
    assert months["mai"] == {5}


def test_names_are_complete():
    for language in LANGUAGES.values():
        assert len(language.months.split()) == len(language.short_months.split()) == 12
        assert len(language.weekdays.split()) == 7


@pytest.mark.parametrize("week", [(1999, 52), (2004, 53), (2024, 1), (2026, 53)])
def test_weekdays_follow_the_calendar_over_new_year(week):
    for number, name in enumerate(
        ["Mon", "Tues", "Wednes", "Thurs", "Fri", "Satur", "Sun"], 1
    ):
        day = datetime.date.fromisocalendar(*week, number)
        assert write(day, LANGUAGES["English"], "{weekday}") == f"{name}day"


def test_two_digit_years_are_those_of_posix():
    for year in range(1900, 2100):
        short = {p for _, p in formats(datetime.date(year, 7, 4)) if "{yy}" in p}
        assert bool(short) == (
            datetime.datetime.strptime(f"{year % 100:02}", "%y").year == year
        )


def test_answers_are_right_in_every_format(corpus):
    """Each pair is a day and its text in one of the formats. No format is rare."""
    counts = dict.fromkeys(range(len(FORMATS)), 0)
    for written, iso in corpus["train"][:4000] + corpus["validation"] + corpus["test"]:
        day = datetime.date.fromisoformat(iso)
        allowed = formats(day)
        found = [
            i
            for i, f in enumerate(FORMATS)
            if f in allowed and written == write(day, *f)
        ]
        assert found
        for index in found:
            counts[index] += 1
    assert min(counts.values()) > 40


def test_strings_are_short(corpus):
    assert max(len(written) for written, _ in itertools.chain(*corpus.values())) <= 40


def test_splits_share_neither_days_nor_strings(corpus):
    for one, other in itertools.combinations(corpus.values(), 2):
        assert {iso for _, iso in one}.isdisjoint(iso for _, iso in other)
        assert {written for written, _ in one}.isdisjoint(
            written for written, _ in other
        )


def test_no_example_comes_twice(corpus):
    for pairs in corpus.values():
        assert len(set(pairs)) == len(pairs)


def test_the_corpus_is_the_stored_one(corpus):
    """The corpus must not change by accident.

    After a change, raise `Dates.VERSION` and store the new values here.
    """
    assert {split: pairs[0] for split, pairs in corpus.items()} == {
        "train": ("27 juillet 1927", "1927-07-27"),
        "validation": ("18 de setembro de 2040", "2040-09-18"),
        "test": ("04 NOV 2048", "2048-11-04"),
    }
    digest = hashlib.sha256(repr(corpus).encode()).hexdigest()
    assert digest == "76012bda2905e747484f7a86765c6750be56563d4da2f70c40790a9f93798ed2"


def test_seed_and_prefix():
    assert list(examples("test", 50)) == list(examples("test", 100))[:50]
    assert list(examples("test", 50)) != list(examples("test", 50, seed=1))
    more_than_days = list(examples("validation", dates.HELD_OUT_DAYS + 10))
    assert [iso for _, iso in more_than_days[-10:]] == [
        iso for _, iso in more_than_days[:10]
    ]


def test_unknown_split():
    with pytest.raises(ValueError, match=r"split='dev'.*train, validation, test"):
        next(examples("dev", 1))


@pytest.mark.parametrize("split", dates.SIZES)
def test_data_source_has_the_examples_in_order(builder, corpus, split):
    source = builder.as_data_source(split=split)
    assert len(source) == dates.SIZES[split]
    indices = [0, 1, len(source) // 2, len(source) - 1]
    expected = [corpus[split][i] for i in indices]
    found = source.__getitems__(indices)
    assert [(x["written"].decode(), x["iso"].decode()) for x in found] == expected


def test_prepared_twice_without_network_or_stdout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dates, "SIZES", dict.fromkeys(dates.SIZES, 500))

    def refuse(*args, **kwargs):
        raise AssertionError("the corpus asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    once, again = (
        Dates(data_dir=tmp_path / name, file_format="array_record")
        for name in ("once", "again")
    )
    once.download_and_prepare()
    again.download_and_prepare()
    assert capsys.readouterr().out == ""
    assert "tensorflow" not in sys.modules
    for split in dates.SIZES:
        (one,), (other,) = (b.info.splits[split].filepaths for b in (once, again))
        assert one.read_bytes() == other.read_bytes()
    reopened = Dates(data_dir=tmp_path / "again", file_format="array_record")
    assert reopened.is_prepared()
    assert reopened.info.splits["train"].num_examples == 500
