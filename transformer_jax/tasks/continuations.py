"""Prompts and the text of their continuations: where a continuation goes on, and where
it is cut.
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.data.batching import Batches
from transformer_jax.data.continuations import Prompt
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import ladder_batches
from transformer_jax.data.examples import as_object
from transformer_jax.data.sources import DataError
from transformer_jax.decoding import GenerationConfig
from transformer_jax.decoding.stopping import before_end, certain, cut_at
from transformer_jax.training.task import Arrays, Record


def prompt_of(record: Record, number: int, options: GenerationConfig) -> str:
    """Return the prompt in record `number`, from 1.

    It is a text, an object {"text": text}, or {"turns": [text, …]}, in which
    `options.turn_separator` follows every turn. A text may also be such an object as
    JSON.

    Raises:
        DataError: it is none of these.
    """
    match as_object(record, ("text", "turns"), number):
        case {"text": str(text), **others} if not others:
            return text
        case {"turns": [*turns], **others} if (
            not others and turns and all(isinstance(x, str) for x in turns)
        ):
            return "".join(turn + options.turn_separator for turn in turns)
    raise DataError(
        f"record {number} is {record!r:.80}: a prompt is a line of text, "
        '{"text": "…"} or {"turns": ["…", "…"]} with at least one turn'
    )


def prompt_batches(
    records: Sequence[Record],
    corpus: Corpus,
    options: GenerationConfig,
    *,
    max_length: int,
    rows: int,
) -> Batches:
    """Return batches of prompts, `rows` in each, for a model that reads `max_length`
    tokens.

    An empty prompt becomes a line break, unless the begin id precedes prompts. Long
    prompts keep their last tokens, and their begin id.
    """
    begin = options.prepend_begin
    empty = "" if begin else "\n"
    lines = [prompt_of(record, i, options) for i, record in enumerate(records, 1)]
    return ladder_batches(
        corpus,
        {"text": [line or empty for line in lines]},
        rows=rows,
        limit=max_length - options.max_extra,
        source="input",
        begin=begin,
        end=False,
        key="model.max_length - decoding.max_extra",
        tail=True,
    )


@dataclasses.dataclass(frozen=True)
class ContinuedTexts:
    """Makes texts of K continuations of each prompt.

    Of the outputs, it reads "tokens" and "log_probabilities" (B, K, E), "finished" and
    "written" (B, K), the number of tokens written.
    """

    corpus: Corpus
    options: GenerationConfig

    def unfinished(self, outputs: Arrays, batch: Arrays) -> np.ndarray:
        """Return (B, K), True where a continuation goes on: it has no end, no stop
        string, and room.
        """
        stop = self.options.stop_strings
        room = outputs["written"] < self.options.max_extra
        going_on = ~outputs["finished"] & room
        if not stop:
            return going_on
        for row, number in zip(*np.nonzero(going_on), strict=True):
            tokens = outputs["tokens"][row, number]
            text = self._prompt(batch, row).continuation(tokens)
            going_on[row, number] = cut_at(text, stop) is None
        return going_on

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"continuation": text} for each prompt, or {"continuations": [text,
        …]}, best first, if `n_best` > 1.

        A continuation ends before the first stop string, and the best has the largest
        log-probability up to there. One that is unfinished lacks what may still change.
        That of a prompt without tokens is "".
        """
        columns = (
            outputs["tokens"],
            outputs["log_probabilities"],
            self.unfinished(outputs, batch),
        )
        predictions: list[dict[str, Any]] = []
        for row, continuations in enumerate(zip(*columns, strict=True)):
            text_of = functools.partial(self._text, self._prompt(batch, row))
            scored = sorted(map(text_of, *continuations), key=lambda pair: -pair[1])
            texts = [text for text, _ in scored]
            if len(texts) == 1:
                predictions.append({"continuation": texts[0]})
            else:
                predictions.append({"continuations": texts})
        return predictions

    def _prompt(self, batch: Arrays, row: int) -> Prompt:
        ids = batch["text"][row, : batch["text_length"][row]].tolist()
        return Prompt(self.corpus.tokenizers["text"], ids)

    def _text(
        self,
        prompt: Prompt,
        tokens: np.ndarray,
        log_probabilities: np.ndarray,
        unfinished: bool,
    ) -> tuple[str, float]:
        """Return the text of a continuation, and the log-probability of its tokens
        up to the first stop string.
        """
        stop = self.options.stop_strings
        tokens = before_end(tokens, self.options.end_ids)

        def until_stop(length: int) -> str | None:
            return cut_at(prompt.continuation(tokens[:length]), stop)

        lengths = range(len(tokens) + 1)
        if (text := until_stop(lengths[-1])) is not None:
            end = bisect.bisect_left(
                lengths, True, key=lambda length: until_stop(length) is not None
            )
            return text, float(log_probabilities[:end].sum())
        text = prompt.continuation(tokens)
        if unfinished:
            text = certain(text, stop)
        return text, float(log_probabilities.sum())
