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
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import example_batches
from transformer_jax.data.examples import columns_of, records_of, warn
from transformer_jax.data.windows import (
    QuestionAnsweringData,
    QuestionWindows,
    read_answers,
)
from transformer_jax.models.bert import BertConfig, TokenClassifier
from transformer_jax.tasks import text
from transformer_jax.tasks.fine_tuning import FineTuningTaskConfig, fine_tuned
from transformer_jax.training.metric import F1, LOSS, Metric
from transformer_jax.training.task import (
    Arrays,
    Columns,
    DeviceArrays,
    Inherited,
    Inspected,
    Mean,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
)

SPAN = ("score", "start", "end", "null")


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

    @property
    def columns(self) -> Columns:
        return Columns(("question", "context", "answers"), needed=2)

    @property
    def inherited(self) -> Inherited:
        return self.backbone.inherited(("start", "end"))


def best_spans(
    start: jax.Array, end: jax.Array, inside: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the score start_i + end_j, i and j (B,) of the best span i ≤ j < i +
    `width` (Section 4.2).

    `start` and `end` are (B, T). A span lies where `inside` (B, T) is True. If there is
    no such span, its score is -∞.
    """
    start = jnp.where(inside, start, -jnp.inf)
    end = jnp.where(inside, end, -jnp.inf)
    ahead = jax.lax.reduce_window(
        end, -jnp.inf, jax.lax.max, (1, width), (1, 1), ((0, 0), (0, width - 1))
    )
    scores = start + ahead
    position = jnp.arange(start.shape[1])[None]
    first = scores.argmax(axis=1)
    reached = (position >= first[:, None]) & (position < first[:, None] + width)
    return scores.max(axis=1), first, jnp.where(reached, end, -jnp.inf).argmax(axis=1)


class QuestionAnswering(Task, Inspected):
    """Prediction of the first and the last token of the answer.

    An example has a row for each window of its context, [CLS] question [SEP] window
    [SEP]. A batch holds "text" (B, T), "text_length", "second", the position at which
    the window starts, and "index" (B,). With references, it holds "start" and "end"
    (B,), the positions of the first answer's tokens, or 0, [CLS], if the window does
    not contain them.

    Differs: The paper does not say how long texts are cut, or how answers of windows
    are compared. Windows are those of the authors' code, and the best score of all
    windows wins; the code considers a token only in the window in which it has most
    context.
    """

    metrics: ClassVar = {
        "loss": LOSS,
        "exact_match": Metric("exact_match", better="higher"),
        "f1": F1,
    }
    corpus: Corpus

    def __init__(self, config: QuestionAnsweringConfig, workdir: epath.PathLike | None):
        streams = {"question": "question", "text": "context"}
        corpus = text.make_corpus(
            config, streams, workdir, annotated.squad_file, ("answers",)
        )
        model = TokenClassifier(config.model, 2, config.fine_tuning.feature_layers)
        super().__init__(config, corpus, fine_tuned(config.backbone, model, corpus))

    def _means(self, logits: jax.Array, batch: DeviceArrays) -> Means:
        """Return the mean of -log P over starts and ends, given logits (B, T, 2).

        P is a softmax over valid positions.
        """
        valid = text.valid(batch)[:, None]
        logits = jnp.where(valid, logits.swapaxes(1, 2), jnp.finfo(logits.dtype).min)
        labels = jnp.stack([batch["start"], batch["end"]], axis=1)
        real = jnp.broadcast_to(batch["text_length"][:, None] > 0, labels.shape)
        loss, count = losses.cross_entropy(
            logits, labels, real, vocab_size=logits.shape[-1]
        )
        return {"span": Mean(loss, count)}

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        return self._means(self.network.output(params, batch, key), batch)

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the loss if there are references, and of each row (B,): "score",
        "start" and "end" of the best span of the window, and "null", the score of "no
        answer", which is the span [CLS].
        """
        logits = self.network.output(params, batch)
        position = jnp.arange(logits.shape[1])[None]
        after = position >= batch["second"][:, None]
        before = position < batch["text_length"][:, None] - 1
        width = self.config.answers.max_answer
        best = best_spans(logits[..., 0], logits[..., 1], after & before, width)
        null = logits[:, 0].sum(axis=-1)
        means = self._means(logits, batch) if "start" in batch else {}
        return means, dict(zip(SPAN, (*best, null), strict=True))

    def batches(self, split: str, seed: int | None) -> Batches:
        names = self.config.columns.names
        return self._arranged(*text.split_columns(self.corpus, split, names), seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        columns = columns_of(records, *self.config.columns)
        return self._arranged(columns, "input", None)

    def _arranged(
        self, columns: Sequence[Any], source: str, seed: int | None
    ) -> Batches:
        """Return the batches of questions, contexts and answers, None for missing
        answers.
        """
        data = self.config.data
        questions, contexts, answers = columns
        windows = QuestionWindows(
            self.corpus.encode("question", questions, end=False),
            contexts,
            self.corpus.tokenizers["text"],
            data,
            self.corpus.special_ids("text"),
            source,
        )
        others = {"second": windows.second}
        references = []
        if answers is not None:
            references = read_answers(answers, contexts, source)
            if not data.unanswerable:
                warn(
                    source,
                    np.array([not answer for answer in references]),
                    "have no answer, which requires data.unanswerable = True",
                )
            first = [answer[0] if answer else None for answer in references]
            others |= windows.targets(first, source)
        batches = example_batches(
            self.corpus,
            {"text": windows.rows},
            others,
            seed=seed,
            rows=self.config.evaluation.batch_size,
            limit=data.max_length,
        )
        return batches._replace(
            records=records_of(self.config.columns.inputs, (questions, contexts)),
            references=[[answer.text for answer in each] for each in references],
            owners=windows.owners,
            join=functools.partial(self._join, windows, contexts),
        )

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return the outputs of `evaluate` for each row.

        `Batches.join` makes answers of them.
        """
        columns = [outputs[name].tolist() for name in SPAN]
        return [dict(zip(SPAN, row, strict=True)) for row in zip(*columns, strict=True)]

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
        options = self.config.answers
        unanswerable = self.config.data.unanswerable
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
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """Return the loss, and the exact match and F1 of SQuAD.

        With data.unanswerable, also return the best values that a null_threshold can
        reach, and these thresholds.
        """
        loss: Scores = {"loss": means["span"]} if means else {}
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

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        dummies = text.Dummies((rows,), length, seed)
        start, end = dummies.random.integers(0, dummies.lengths, (2, rows))
        second = dummies.positions()
        batch = dummies.text(self.config.model.vocab_size) | {"second": second}
        if references:
            batch["start"] = start.astype(np.int32)
            batch["end"] = end.astype(np.int32)
        return batch

    def preview(self, arrays: Arrays) -> list[str]:
        tokens = text.first_tokens(arrays, self.network.shown)
        start = arrays["start"][0]
        end = arrays["end"][0]
        answer = " ".join(tokens[start : end + 1]) if start else "not in this window"
        return [
            "the first window of the first batch:",
            f"  {' '.join(tokens)}",
            f"  answer: {answer}",
        ]
