"""The log-likelihood of given texts under a language model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.scoring import scored_batches
from transformer_jax.decoding.distributions import log_probability
from transformer_jax.tasks import text
from transformer_jax.training.task import (
    Arrays,
    DeviceArrays,
    Means,
    Outputs,
    Params,
    Record,
)


@dataclasses.dataclass(frozen=True)
class TextScoring:
    """Scores texts with the parameters of `LanguageModeling`.

    config: the config of that task.
    model, corpus: its model, and the corpus with its tokenizer.
    """

    config: Any
    model: Any
    corpus: Corpus

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """See `scored_batches`."""
        return scored_batches(
            self.corpus,
            "text",
            records,
            limit=self.config.model.max_length,
            rows=self.config.evaluation.batch_size,
            begin=self.config.decoding.prepend_begin,
        )

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the log-likelihood of the tokens of each row that count (B,), and
        their number (B,).
        """
        valid = text.valid(batch)
        x, head = self.model.apply(
            {"params": params}, batch["text"], valid, method=text.hidden_and_head
        )

        def at_one_position(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            vector, token = pair
            return log_probability(head(vector[:, None])[:, 0], token)

        # One position at a time, so that the logits of all are never in memory.
        positions = (jnp.swapaxes(x, 0, 1), batch["target"].T)
        scores = jax.lax.map(at_one_position, positions).T
        counted = valid & (batch["counted"] > 0)
        return {}, {
            "log_likelihood": jnp.where(counted, scores, 0.0).sum(axis=1),
            "count": counted.sum(axis=1),
        }

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"log_likelihood", "tokens"} for each row.

        `Batches.join` makes the scores of texts from them.
        """
        return [
            {"log_likelihood": total, "tokens": count}
            for total, count in zip(
                outputs["log_likelihood"].tolist(),
                outputs["count"].tolist(),
                strict=True,
            )
        ]

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        """Return a batch of random ids: see `Task.dummy_batch`."""
        dummies = text.Dummies((rows,), length, seed)
        size = self.config.model.vocab_size
        return dummies.text(size) | {
            "target": dummies.text(size)["text"],
            "counted": np.ones((rows, length), np.int32),
        }
