"""Questions about texts of any length: windows of the text, and answers as spans of its
tokens.

Source: Devlin et al. 2019, Section 4.2, and the authors' code
(https://github.com/google-research/bert).
"""

import dataclasses
import json
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax import fields
from transformer_jax.data.examples import warn
from transformer_jax.data.ragged import Ragged, Windows
from transformer_jax.data.sources import DataError
from transformer_jax.data.streams import SpecialIds
from transformer_jax.data.text import TextData
from transformer_jax.data.tokenizer_frames import separators
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.errors import UserError

JOINER = "\u200d"  # makes one symbol of the two beside it
SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
SPECIALS = 3  # special tokens of a row: [CLS] question [SEP] window [SEP]


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringData(TextData):
    """Questions {split}.json in the layout of SQuAD. Long contexts are cut into
    windows, each in a row of its own.

    max_question: most tokens of a question. Longer ones are cut.
    stride: a window starts this many tokens after the one before it.
    unanswerable: there are questions whose context does not answer them, as in SQuAD
        2.0.
    """

    max_length: int = fields.size(384, 32)
    max_question: int = fields.size(64, 8)
    stride: int = fields.size(128, 8)
    unanswerable: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        room = self.max_length - SPECIALS - self.max_question
        if self.max_question < 1:
            yield "max_question", "must be at least 1, e.g. 64"
        elif room < 1:
            yield (
                "max_question",
                (
                    "must leave room for the context "
                    f"in max_length = {self.max_length}: set it "
                    f"to {self.max_length - SPECIALS - 1} or less, or raise max_length"
                ),
            )
        elif not 1 <= self.stride <= room:
            yield (
                "stride",
                (
                    f"must be in [1, {room}], because windows have max_length "
                    f"- max_question - {SPECIALS} = {room} tokens of the context, "
                    "or more for shorter questions"
                ),
            )


class Answer(NamedTuple):
    """A part of a context, and the position of its first character."""

    text: str
    start: int


def read_answers(
    column: Sequence[str], contexts: Sequence[str], source: str
) -> list[list[Answer]]:
    """Read answers as `annotated.squad_file` writes them: per question, a JSON list of
    objects with text and start.

    Args:
        column: the JSON lists.
        contexts: the context of each question.
        source: name of the source of the questions, for messages.

    Raises:
        DataError: a value is not such a list, or an answer is blank or not at its start
            in the context.
    """
    answers_of_questions = []
    for row, (text, context) in enumerate(zip(column, contexts, strict=True), 1):
        try:
            answers = [
                Answer(answer["text"], answer["start"]) for answer in json.loads(text)
            ]
            wrong = [answer for answer in answers if not _is_in(context, answer)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{source}, row {row}: the answers {text[:80]!r} are not a JSON list of"
                ' objects with text and start: write e.g. [{"text": "Paris", "start":'
                " 12}], or [] if there is no answer"
            ) from error
        for answer, start in wrong:
            raise DataError(
                f"{source}, row {row}: the answer {answer[:80]!r} is not in the "
                f"context at start = {start}: correct it; "
                "start counts characters from 0"
            )
        answers_of_questions.append(answers)
    return answers_of_questions


def _is_in(context: str, answer: Answer) -> bool:
    """Return True if an answer is not blank and stands at its start in the context."""
    if not answer.text.strip() or answer.start < 0:
        return False
    return context.startswith(answer.text, answer.start)


class QuestionWindows:
    """Questions, each with the windows of its context, as rows [CLS] question [SEP]
    window [SEP]. The tokenizer may have several [SEP]s after the question.

    Warnings give the number of questions that are cut or have no tokens, and of
    contexts that have none.

    Args:
        questions: the tokens of each question.
        contexts: the context of each question. Each distinct one is tokenized once.
        tokenizer: tokenizer of the contexts.
        config: sizes of windows and questions.
        special: ids of [CLS] and [SEP].
        source: name of the source of the questions, for messages.

    Attributes:
        rows: the tokens of each row.
        owners: (rows,) the question of each row, ascending.
        second: (rows,) position of the first token of the window.
    """

    def __init__(
        self,
        questions: Ragged,
        contexts: Sequence[str],
        tokenizer: Tokenizer,
        config: QuestionAnsweringData,
        special: SpecialIds,
        source: str,
    ):
        numbers: dict[str, int] = {}
        self._context = np.array(
            [numbers.setdefault(context, len(numbers)) for context in contexts]
        )
        self._texts = list(numbers)
        ids, self._starts, self._ends = tokenizer.spans(self._texts)
        lengths = ids.lengths[self._context]
        most = config.max_question
        warn(
            source,
            questions.lengths > most,
            f"have a question that is cut to data.max_question = {most} tokens",
        )
        warn(source, questions.lengths == 0, "have a question without tokens")
        warn(
            source,
            lengths == 0,
            "have a context without tokens, and are answered by ''",
        )
        asked = questions.first(most)
        count = separators(tokenizer)
        rooms = config.max_length - 2 - count - asked.lengths
        if config.stride > (shortest := rooms.min(initial=config.stride)):
            raise UserError(
                f"data.stride = {config.stride}: must be at most {shortest} with this "
                f"tokenizer, which puts {count} ids between the texts of a pair; "
                "lower it or raise data.max_length"
            )
        windows = Windows.over(lengths, rooms, config.stride)
        self._windows = windows
        self.owners = windows.owners
        part = ids.parts(windows._replace(owners=self._context[windows.owners]))
        begins = Ragged.repeated(special.begin, len(self.owners))
        ends = Ragged.repeated(special.end, len(self.owners))
        between = [ends] * count
        asked_again = asked.take(self.owners)
        self.rows = Ragged.beside([begins, asked_again, *between, part, ends])
        self.second = asked_again.lengths + 1 + count

    def targets(
        self, answers: Sequence[Answer | None], source: str
    ) -> dict[str, np.ndarray]:
        """Return {"start", "end"}: the positions (rows,) of the first and the last
        token that overlap the answer.

        They are 0, the position of [CLS], if the window does not contain all of these
        tokens, or if there is no answer. A warning gives the number of questions whose
        answer is in none of the windows, which `source` names.
        """
        first_token = np.full(len(answers), -1)
        last_token = np.full(len(answers), -1)
        for question, answer in enumerate(answers):
            if answer is None:
                continue
            starts = self._starts[self._context[question]]
            ends = self._ends[self._context[question]]
            overlaps = (ends > answer.start) & (
                starts < answer.start + len(answer.text)
            )
            tokens = np.flatnonzero(overlaps)
            if tokens.size:
                first_token[question] = tokens[0]
                last_token[question] = tokens[-1]
        windows = self._windows
        first = first_token[self.owners]
        last = last_token[self.owners]
        contains_answer = (first >= windows.starts) & (last < windows.stops)
        window_counts = np.bincount(
            self.owners[contains_answer], minlength=len(answers)
        )
        has_answer = np.array([answer is not None for answer in answers])
        warn(
            source,
            has_answer & (window_counts == 0),
            "have an answer that no window contains; its target is [CLS]",
        )
        shift = self.second - windows.starts
        return {
            "start": np.where(contains_answer, first + shift, 0),
            "end": np.where(contains_answer, last + shift, 0),
        }

    def answer(
        self, question: int, window: int, first: int, last: int
    ) -> tuple[int, int]:
        """Return the characters [start, end) of the context that tokens `first` to
        `last` of a row stand for.

        White space at both ends is left out. Combining characters belong to the letter
        before them, even if the tokenizer drops them, as accents. `window` counts the
        rows of the question.
        """
        row = np.searchsorted(self.owners, question) + window
        number = self._context[question]
        shift = self._windows.starts[row] - self.second[row]
        start = int(self._starts[number][first + shift])
        end = int(self._ends[number][last + shift])
        start, end = whole_letters(self._texts[number], start, end)
        text = self._texts[number][start:end]
        start += len(text) - len(text.lstrip())
        return start, start + len(text.strip())


def whole_letters(text: str, start: int, end: int) -> tuple[int, int]:
    """Extend the part [start, end) of a text, unless it is empty, so that neither end
    divides a letter.

    A letter or symbol includes the combining characters after it, and what a zero-width
    joiner adds to it.
    """
    if start == end:
        return start, end
    while start > 0 and _continues(text, start):
        start -= 1
    while end < len(text) and _continues(text, end):
        end += 1
    return start, end


def _continues(text: str, position: int) -> bool:
    """Return True if a character belongs to the letter or symbol before it."""
    character = text[position]
    joined = text[position - 1] == JOINER and not character.isspace()
    return (
        joined
        or character == JOINER
        or character in SKIN_TONES
        or unicodedata.category(character)[0] == "M"
    )
