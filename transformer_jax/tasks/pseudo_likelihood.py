"""The pseudo-log-likelihood of given texts under a masked language model (Salazar et
al. 2020, "Masked language model scoring", eq. 1).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batching import (
    Arrays,
    Batch,
    Batches,
    BatchPlan,
    ladder_lengths,
    padded_arrays,
)
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.files import DataError
from transformer_jax.data.masking import Specials
from transformer_jax.data.ragged import Ragged, ranges
from transformer_jax.data.scoring import joined, read_given
from transformer_jax.decoding.distributions import log_probability
from transformer_jax.tasks import text
from transformer_jax.training.task import (
    DeviceArrays,
    Means,
    Outputs,
    Params,
    Record,
)


@dataclasses.dataclass(frozen=True)
class PseudoLikelihood:
    """Scores texts with the parameters of `BertPretraining`.

    PLL(W) = Σ_t log P(w_t | W with [MASK] in place of w_t). A text is read once for
    each of its tokens. A causal model predicts w_t at the position before it and sees
    no later token, so the sum is log P(W).

    config: the config of that task.
    network: its network.
    corpus: the corpus with its tokenizer.
    """

    config: Any
    network: text.Network
    corpus: Corpus

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of [CLS] text [SEP], a row for each token, which is masked.

        A record is a line of text, {"text": text}, or {"choices": [text, …]}.

        Raises:
            DataError: a record is none of these, or a text is longer than the model
                reads.
        """
        given = [read_given(record, number) for number, record in enumerate(records, 1)]
        for number, each in enumerate(given, 1):
            if each.context:
                raise DataError(
                    f"record {number} has the context {each.context!r:.80}: a masked "
                    "language model scores whole texts; leave the context out"
                )
        texts = [line for each in given for line in each.texts]
        owners = np.repeat(np.arange(len(given)), [len(each.texts) for each in given])
        tokenizer = self.corpus.tokenizers["text"]
        ids = Specials.of(tokenizer)
        rows = tokenizer.encode(texts, begin=ids.begin, end=ids.end)
        self._check(rows, owners)
        # a text without tokens has one row, in which nothing is masked
        counts = np.maximum(rows.lengths - 2, 1)
        text_of = np.repeat(np.arange(len(texts)), counts)
        positions = 1 + ranges(0, counts)
        masked = (rows.lengths > 2)[text_of]
        lengths = rows.lengths[text_of]
        limit = self.config.model.max_length
        plan = BatchPlan.ladder(
            lengths, ladder_lengths(limit), self.config.evaluation.batch_size
        )

        def load(batch: Batch) -> Arrays:
            chosen = np.maximum(batch.indices, 0)
            filled = np.where(batch.indices >= 0, text_of[chosen], -1)
            arrays = padded_arrays({"text": rows}, {}, batch._replace(indices=filled))
            place = positions[chosen][:, None]
            label = np.take_along_axis(arrays["text"], place, axis=1)
            at_mask = masked[chosen] & (batch.indices >= 0)
            new = np.where(at_mask[:, None], ids.mask, label)
            np.put_along_axis(arrays["text"], place, new, axis=1)
            return arrays | {
                "second": arrays["text_length"],
                "positions": (place - self.config.model.causal).astype(np.int32),
                "label": label.astype(np.int32),
                "masked": at_mask.astype(np.int32),
                "index": batch.indices.astype(np.int32),
            }

        join = joined(given, text_of)
        return Batches(plan, load, records, owners=owners[text_of], join=join)

    def _check(self, rows: Ragged, owners: np.ndarray) -> None:
        """Raise DataError if a text is longer than the model reads."""
        limit = self.config.model.max_length
        too_long = np.flatnonzero(rows.lengths > limit)
        if len(too_long):
            first = too_long[0]
            raise DataError(
                f"record {owners[first] + 1} has {rows.lengths[first]} tokens with "
                f"[CLS] and [SEP]: must have at most model.max_length = {limit} to be "
                "scored; shorten or divide it"
            )

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return log P of the masked token of each row (B,), 0 without one, and the
        number of masked tokens (B,).
        """
        arguments = self.network.arguments(batch)
        outputs: Any = self.network.model.apply(
            {"params": params}, *arguments, batch["positions"]
        )
        vectors, head, _ = outputs
        scores = log_probability(head(vectors)[:, 0], batch["label"][:, 0])
        masked = batch["masked"]
        return {}, {
            "log_likelihood": jnp.where(masked > 0, scores, 0.0),
            "count": masked,
        }

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"log_likelihood", "tokens"} for each row, see `TextScoring`."""
        pairs = zip(
            outputs["log_likelihood"].tolist(), outputs["count"].tolist(), strict=True
        )
        return [{"log_likelihood": total, "tokens": count} for total, count in pairs]

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        """Return a batch of random ids: see `Task.dummy_batch`."""
        dummies = text.Dummies((rows,), length, seed)
        arrays = dummies.text(self.config.model.vocab_size)
        places = dummies.random.integers(0, dummies.lengths)[:, None].astype(np.int32)
        return arrays | {
            "second": arrays["text_length"],
            "positions": places,
            "label": np.take_along_axis(arrays["text"], places, axis=1),
            "masked": np.ones(rows, np.int32),
        }
