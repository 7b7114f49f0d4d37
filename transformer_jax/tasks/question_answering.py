"""Extractive question answering: find the answer to a question in a text (Devlin et
al. 2019, Sections 4.2 and 4.3).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import losses, spans
from transformer_jax.data import annotated
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import records_of, warn
from transformer_jax.data.text import example_batches
from transformer_jax.data.windows import (
    QuestionAnsweringData,
    QuestionWindows,
    read_answers,
)
from transformer_jax.models.bert import BertConfig, TokenClassifier
from transformer_jax.tasks.fine_tuning import FineTuningTask, FineTuningTaskConfig
from transformer_jax.training.metric import F1, LOSS, Metric
from transformer_jax.training.task import Arrays, Mean, Outputs, Params


@dataclasses.dataclass(frozen=True)
class AnswersConfig:
    """The choice of an answer.

    max_answer: most tokens of an answer.
    null_threshold: with data.unanswerable, a question has no answer if the score of "no
        answer" exceeds that of the best answer by more than this: −τ of Section 4.3, as
        in the authors' code. Evaluation shows the best value on its split as
        "best_f1_threshold".
    """

    max_answer: int = 30
    null_threshold: float = 0.0

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.max_answer < 1:
            yield "max_answer", "must be at least 1, e.g. 30"


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringConfig(FineTuningTaskConfig):
    """The config sections of question answering."""

    model: BertConfig
    data: QuestionAnsweringData
    answers: AnswersConfig = dataclasses.field(metadata={"free": True})


def best_spans(
    start: jax.Array, end: jax.Array, inside: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the score start_i + end_j, i and j (B,) of the best span i ≤ j < i +
    `width` (Section 4.2).

    `start` and `end` are (B, T). A span lies where `inside` (B, T) is True. If there is
    no such place, its score is -∞.
    """
    start, end = (jnp.where(inside, x, -jnp.inf) for x in (start, end))
    ahead = jax.lax.reduce_window(
        end, -jnp.inf, jax.lax.max, (1, width), (1, 1), ((0, 0), (0, width - 1))
    )
    scores, place = start + ahead, jnp.arange(start.shape[1])[None]
    first = scores.argmax(axis=1)
    reached = (place >= first[:, None]) & (place < first[:, None] + width)
    return scores.max(axis=1), first, jnp.where(reached, end, -jnp.inf).argmax(axis=1)


class QuestionAnswering(FineTuningTask):
    """Prediction of the first and the last token of the answer.

    An example has a row for each window of its context, [CLS] question [SEP] window
    [SEP]. A batch holds "text" (B, T), "text_length", "second", the place at which the
    window starts, and "index" (B,). With references, it holds "start" and "end" (B,),
    the places of the first answer's tokens, or 0, [CLS], if the window does not contain
    them.

    Differs: The paper does not say how long texts are cut, or how answers of windows
    are compared. Windows are those of the authors' code, and the best score of all
    windows wins; the code considers a token only in the window in which it has most
    context.
    """

    Config = QuestionAnsweringConfig
    metrics: ClassVar = {
        "loss": LOSS,
        "exact_match": Metric("exact_match", better="higher"),
        "f1": F1,
    }
    columns = ("question", "context", "answers")
    inputs = 2

    def __init__(self, config: QuestionAnsweringConfig, workdir: epath.PathLike | None):
        super().__init__(config, workdir, ("start", "end"))
        self.model = TokenClassifier(config.model, 2, config.fine_tuning.feature_layers)
        streams = {"question": "question", "text": "context"}
        self.corpus = self.make_corpus(
            streams, workdir, annotated.squad_file, ("answers",)
        )

    def _span(
        self, logits: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, Mean]:
        """Return the mean of -log P over starts and ends, given logits (B, T, 2).

        P is a softmax over valid places.
        """
        valid = self.valid(batch, "text")[:, None]
        logits = jnp.where(valid, logits.swapaxes(1, 2), jnp.finfo(logits.dtype).min)
        labels = jnp.stack([batch["start"], batch["end"]], axis=1)
        real = jnp.broadcast_to(batch["text_length"][:, None] > 0, labels.shape)
        return {
            "span": Mean(
                *losses.cross_entropy(logits, labels, real, vocab_size=logits.shape[-1])
            )
        }

    def loss(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int,
    ) -> dict[str, Mean]:
        return self._span(self.logits(params, batch, key), batch)

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the loss if there are references, and of each row (B,): "score",
        "start" and "end" of the best span of the window, and "null", the score of "no
        answer", which is the span [CLS].
        """
        options, logits = self.config.answers, self.logits(params, batch)
        place = jnp.arange(logits.shape[1])[None]
        inside = (place >= batch["second"][:, None]) & (
            place < batch["text_length"][:, None] - 1
        )
        found = best_spans(logits[..., 0], logits[..., 1], inside, options.max_answer)
        outputs = dict(zip(("score", "start", "end"), found, strict=True)) | {
            "null": logits[:, 0].sum(axis=-1)
        }
        return self._span(logits, batch) if "start" in batch else {}, outputs

    def _batches(self, columns: Sequence[Any], what: str, seed: int | None) -> Batches:
        config, corpus, (questions, contexts, answers) = (
            self.config,
            self.corpus,
            columns,
        )
        asked, special = (
            corpus.encode("question", questions, end=False),
            corpus.special_ids("text"),
        )
        found = QuestionWindows(
            asked, contexts, corpus.tokenizers["text"], config.data, special, what
        )
        others, golds = {"second": found.second}, []
        if answers is not None:
            golds = read_answers(answers, contexts, what)
            if not config.data.unanswerable:
                warn(
                    what,
                    np.array([not g for g in golds]),
                    "have no answer, which requires data.unanswerable = True",
                )
            others |= found.targets([gold[0] if gold else None for gold in golds], what)
        size, limit = config.evaluation.batch_size, config.data.max_length
        batches = example_batches(
            corpus, {"text": found.rows}, others, seed=seed, rows=size, limit=limit
        )
        return batches._replace(
            records=records_of(self.columns[: self.inputs], (questions, contexts)),
            references=[[answer.text for answer in gold] for gold in golds],
            owners=found.owners,
            join=functools.partial(self._join, found, contexts),
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return the outputs of `evaluate` for each row.

        `Batches.join` makes answers of them.
        """
        columns = [outputs[name].tolist() for name in ("score", "start", "end", "null")]
        return [
            dict(zip(("score", "start", "end", "null"), row, strict=True))
            for row in zip(*columns, strict=True)
        ]

    def _join(
        self,
        examples: QuestionWindows,
        contexts: Sequence[str],
        number: int,
        windows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the answer to a question, given the best spans of its windows.

        The fields are "answer", which is context[start:end], "start" and "end" in
        characters, "score" of the best span, and "no_answer_score", the score of "no
        answer" minus that. With data.unanswerable, "best_answer" is the text of the
        best span, and the answer is "", with start and end 0, if `null_threshold` is
        exceeded. A context without tokens has the answer "", and None as scores.
        """
        options, unanswerable = self.config.answers, self.config.data.unanswerable
        best = max(range(len(windows)), key=lambda i: windows[i]["score"])
        score, start, end = (windows[best][name] for name in ("score", "start", "end"))
        null = min(window["null"] for window in windows) - score
        exists = score > -math.inf
        start, end = examples.answer(number, best, start, end) if exists else (0, 0)
        more = {"best_answer": contexts[number][start:end]} if unanswerable else {}
        if unanswerable and null > options.null_threshold:
            start = end = 0
        scores = {
            "score": score if exists else None,
            "no_answer_score": null if exists else None,
        }
        return {
            "answer": contexts[number][start:end],
            "start": start,
            "end": end,
            **scores,
            **more,
        }

    def score(
        self,
        means: Mapping[str, float],
        predictions: Sequence[dict[str, Any]],
        references: Sequence[Any],
    ) -> dict[str, float | str]:
        """Return the loss, and the exact match and F1 of SQuAD.

        With data.unanswerable, also return the best values that a null_threshold can
        reach, and these thresholds.
        """
        loss: dict[str, float | str] = {"loss": means["span"]} if means else {}
        scores = loss | spans.squad(
            [prediction["answer"] for prediction in predictions], references
        )
        if self.config.data.unanswerable:
            nulls = [prediction["no_answer_score"] for prediction in predictions]
            best = [prediction["best_answer"] for prediction in predictions]
            scores |= spans.best_threshold(
                best, [math.inf if null is None else null for null in nulls], references
            )
        return scores

    def dummy_batch(self, rows: int, length: int, seed: int | None = None) -> Arrays:
        draw = np.random.default_rng(seed or 0)
        lengths = (
            np.full(rows, length)
            if seed is None
            else draw.integers(1, length + 1, rows)
        )
        start, end = draw.integers(0, lengths, (2, rows))
        others = {
            "text_length": lengths,
            "second": draw.integers(0, lengths + 1),
            "start": start,
            "end": end,
        }
        text = draw.integers(0, self.config.model.vocab_size, (rows, length), np.int32)
        index = np.arange(rows, dtype=np.int32)
        return {"text": text, "index": index} | {
            name: values.astype(np.int32) for name, values in others.items()
        }

    def preview(self, arrays: Arrays) -> list[str]:
        tokens, _ = self.tokens("text", arrays["text"][0, : arrays["text_length"][0]])
        start, end = arrays["start"][0], arrays["end"][0]
        answer = " ".join(tokens[start : end + 1]) if start else "not in this window"
        return [
            "the first window of the first batch:",
            f"  {' '.join(tokens)}",
            f"  answer: {answer}",
        ]
