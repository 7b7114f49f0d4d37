"""The built-in corpus: dates written in seven languages or in figures, and their ISO
form `YYYY-MM-DD`.

The corpus is generated from a seed, so nothing is downloaded. It is a tfds builder and
is read like any other tfds data set. Every string has exactly one correct answer, by
these conventions:

- The separator determines the order of figures: `/` is month/day/year (US), `.` is
  day.month.year, `-` is day-month-year. A four-digit year in front means year, month,
  day, with any separator or none.
- Two-digit years follow POSIX `%y`: 69–99 are 1969–1999, 00–68 are 2000–2068. Other
  years have four digits.
- The name of a month means the same month in all languages ("mai", "mar", "set"); a
  test checks this.
- Weekdays are written in full and agree with the date.

Week dates (2024-W01-1) and ordinal dates (2024-366) are left out, since they require
calendar arithmetic.

The splits have no *day* in common, and hence no string: no day of the test set is in
the training set in any format.
"""

import contextlib
import datetime
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow_datasets as tfds

from transformer_jax.errors import UserError

FIRST_DAY = datetime.date(1900, 1, 1)
LAST_DAY = datetime.date(2099, 12, 31)
TWO_DIGIT_YEARS = range(1969, 2069)
SIZES = {"train": 40_000, "validation": 1_000, "test": 1_000}
# number of days for validation, and the same for test; together a tenth of all days
HELD_OUT_DAYS = 3_650


@dataclass(frozen=True)
class Language:
    """The patterns of one language, and the words that fill their fields (see
    `write`), separated by spaces.
    """

    patterns: tuple[str, ...]
    months: str = ""
    short_months: str = ""
    weekdays: str = ""
    suffix: str = ""
    # for days with another suffix than `suffix`
    suffixes: Mapping[int, str] = field(default_factory=dict)


FIGURES = Language(
    patterns=(
        "{y}-{mm}-{dd}",
        "{y}{mm}{dd}",
        "{y}/{mm}/{dd}",
        "{y}年{m}月{d}日",
        "{dd}-{mm}-{y}",
        "{d}-{m}-{y}",
        "{m}/{d}/{y}",
        "{mm}/{dd}/{y}",
        "{m}/{d}/{yy}",
        "{d}.{m}.{y}",
        "{dd}.{mm}.{y}",
        "{dd}.{mm}.{yy}",
        "{d}.{month}.{y}",
    ),
    months="I II III IV V VI VII VIII IX X XI XII",
)

LANGUAGES = {
    "English": Language(
        patterns=(
            "{month} {d}, {y}",
            "{d} {month} {y}",
            "{mon} {d}, {y}",
            "{dd} {MON} {y}",
            "{dd}-{mon}-{yy}",
            "the {th} of {month} {y}",
            "{weekday}, {month} {th}, {y}",
        ),
        months=(
            "January February March April May June "
            "July August September October November December"
        ),
        short_months="Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec",
        weekdays="Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        suffix="th",
        suffixes={1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"},
    ),
    "German": Language(
        patterns=(
            "{th} {month} {y}",
            "{th} {mon} {y}",
            "{th} {month} {yy}",
            "{weekday}, den {th} {month} {y}",
        ),
        months=(
            "Januar Februar März April Mai Juni "
            "Juli August September Oktober November Dezember"
        ),
        short_months="Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez.",
        weekdays="Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
        suffix=".",
    ),
    "French": Language(
        patterns=(
            "{th} {month} {y}",
            "le {th} {month} {y}",
            "{th} {mon} {y}",
            "{weekday} {th} {month} {y}",
        ),
        months=(
            "janvier février mars avril mai juin "
            "juillet août septembre octobre novembre décembre"
        ),
        short_months="janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc.",
        weekdays="lundi mardi mercredi jeudi vendredi samedi dimanche",
        suffixes={1: "er"},
    ),
    "Spanish": Language(
        patterns=(
            "{d} de {month} de {y}",
            "{d} {mon} {y}",
            "{dd} {MON} {y}",
            "{weekday}, {d} de {month} de {y}",
        ),
        months=(
            "enero febrero marzo abril mayo junio "
            "julio agosto septiembre octubre noviembre diciembre"
        ),
        short_months="ene feb mar abr may jun jul ago sept oct nov dic",
        weekdays="lunes martes miércoles jueves viernes sábado domingo",
    ),
    "Italian": Language(
        patterns=(
            "{th} {month} {y}",
            "{d} {mon} {y}",
            "{d} {mon} '{yy}",
            "{weekday} {th} {month} {y}",
        ),
        months=(
            "gennaio febbraio marzo aprile maggio "
            "giugno luglio agosto settembre ottobre novembre dicembre"
        ),
        short_months="gen feb mar apr mag giu lug ago set ott nov dic",
        weekdays="lunedì martedì mercoledì giovedì venerdì sabato domenica",
        suffixes={1: "º"},
    ),
    "Dutch": Language(
        patterns=(
            "{d} {month} {y}",
            "{d} {mon} {y}",
            "{d} {mon} '{yy}",
            "{weekday} {d} {month} {y}",
        ),
        months=(
            "januari februari maart april mei juni "
            "juli augustus september oktober november december"
        ),
        short_months="jan. feb. mrt. apr. mei jun. jul. aug. sep. okt. nov. dec.",
        weekdays="maandag dinsdag woensdag donderdag vrijdag zaterdag zondag",
    ),
    "Portuguese": Language(
        patterns=(
            "{th} de {month} de {y}",
            "{d} de {mon} de {y}",
            "{dd}/{mon}/{y}",
            "{weekday}, {th} de {month} de {y}",
        ),
        months=(
            "janeiro fevereiro março abril maio "
            "junho julho agosto setembro outubro novembro dezembro"
        ),
        short_months="jan fev mar abr mai jun jul ago set out nov dez",
        weekdays=(
            "segunda-feira terça-feira quarta-feira "
            "quinta-feira sexta-feira sábado domingo"
        ),
        suffixes={1: "º"},
    ),
}

FORMATS = [
    (language, pattern)
    for language in (FIGURES, *LANGUAGES.values())
    for pattern in language.patterns
]
FOUR_DIGIT_FORMATS = [
    (language, pattern) for language, pattern in FORMATS if "{yy}" not in pattern
]


def formats(day: datetime.date) -> list[tuple[Language, str]]:
    """Return the formats in which `day` may be written."""
    return FORMATS if day.year in TWO_DIGIT_YEARS else FOUR_DIGIT_FORMATS


def write(day: datetime.date, language: Language, pattern: str) -> str:
    """Fill the fields of `pattern`: `d`, `m` and `y` have no leading zeros; `dd`,
    `mm` and `yy` have two digits.
    """
    fields = {
        "d": f"{day.day}",
        "dd": f"{day.day:02}",
        "th": f"{day.day}{language.suffixes.get(day.day, language.suffix)}",
        "m": f"{day.month}",
        "mm": f"{day.month:02}",
        "y": f"{day.year}",
        "yy": f"{day.year % 100:02}",
    }
    if language.months:
        fields["month"] = language.months.split()[day.month - 1]
    if language.short_months:
        fields["mon"] = language.short_months.split()[day.month - 1]
        fields["MON"] = fields["mon"].upper()
    if language.weekdays:
        fields["weekday"] = language.weekdays.split()[day.weekday()]
    return pattern.format_map(fields)


def examples(split: str, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield `count` pairs (written, iso).

    The pairs for a smaller count are a prefix of those for a larger one.

    No day occurs twice before all days of the split have occurred once: 65,749 in
    `train`, 3,650 in each other split.
    """
    if split not in SIZES:
        raise UserError(
            f"{split=} is not a split of the dates; choose one of {', '.join(SIZES)}"
        )
    days = [
        FIRST_DAY + datetime.timedelta(i)
        for i in range((LAST_DAY - FIRST_DAY).days + 1)
    ]
    random.Random(f"days {seed}").shuffle(days)
    start, stop = {
        "test": (0, HELD_OUT_DAYS),
        "validation": (HELD_OUT_DAYS, 2 * HELD_OUT_DAYS),
        "train": (2 * HELD_OUT_DAYS, len(days)),
    }[split]
    choose = random.Random(f"formats {seed} {split}").choice
    for day in itertools.islice(itertools.cycle(days[start:stop]), count):
        yield write(day, *choose(formats(day))), day.isoformat()


class Dates(tfds.core.GeneratorBasedBuilder):
    """Builder of a data set of `examples` with seed 0, in order, with the features
    `written` and `iso`.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict(
                {"written": tfds.features.Text(), "iso": tfds.features.Text()}
            ),
            supervised_keys=("written", "iso"),
            disable_shuffling=True,
        )

    def download_and_prepare(self, **kwargs: Any) -> None:
        # tfds writes messages to stdout, which is for results
        with contextlib.redirect_stdout(sys.stderr):
            super().download_and_prepare(**kwargs)

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator]:
        return {split: self._generate_examples(split) for split in SIZES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        for index, (written, iso) in enumerate(examples(split, SIZES[split])):
            yield index, {"written": written, "iso": iso}
