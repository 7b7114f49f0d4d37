"""One vector for a text: the mean of an encoder's outputs at all tokens, or its output
at [CLS] (Reimers and Gurevych 2019, "Sentence-BERT", Section 3).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import ladder_batches
from transformer_jax.data.examples import columns_of
from transformer_jax.errors import UserError
from transformer_jax.models.bert import mean_over_tokens
from transformer_jax.tasks import text
from transformer_jax.training.task import (
    POOLINGS,
    Arrays,
    DeviceArrays,
    Means,
    Outputs,
    Params,
    Record,
)


@dataclasses.dataclass(frozen=True)
class SentenceEmbeddings:
    """Embeds texts with the encoder "bert" of a model.

    config: the config of the model's task.
    network: its network.
    corpus: the corpus with its tokenizer.
    pooling: "mean" over all tokens with [CLS] and [SEP], or "cls", the output at
        [CLS]. Neither has the length 1.
    """

    config: Any
    network: text.Network
    corpus: Corpus
    pooling: str

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise UserError(
                f"{self.pooling!r} is no pooling: must be one of {', '.join(POOLINGS)}"
            )
        if self.pooling == "cls" and self.config.model.causal:
            raise UserError(
                "in a model with model.causal, [CLS] sees only itself, so 'cls' gives "
                "all texts the same vector: use 'mean'"
            )

    def batches_of(self, records: Sequence[Record]) -> Batches:
        """Return batches of [CLS] text [SEP], cut to what the model reads."""
        (lines,) = columns_of(records, *self.config.columns)
        return ladder_batches(
            self.corpus,
            {"text": lines or ()},
            rows=self.config.evaluation.batch_size,
            limit=self.config.model.max_length,
            source="input",
            begin=True,
        )

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """Return the vectors (B, D), in float32."""
        x = self.network.output(params, batch, method=_encoded).astype(jnp.float32)
        if self.pooling == "cls":
            return {}, {"embedding": x[:, 0]}
        return {}, {"embedding": mean_over_tokens(x, text.valid(batch))}

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """Return {"embedding": the D numbers} for each row."""
        return [{"embedding": vector} for vector in outputs["embedding"].tolist()]

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        """Return a batch of random ids: see `Task.dummy_batch`."""
        return text.Dummies((rows,), length, seed).text(self.config.model.vocab_size)


def _encoded(model: Any, *arguments: Any) -> jax.Array:
    """Return the encoder's outputs (B, T, D). Pass it to `model.apply`."""
    return model.bert.encode(*arguments)
