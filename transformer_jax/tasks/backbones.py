"""The pre-trained models that fine-tuning starts from, and what a task must know of
each.
"""

import abc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import losses
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.examples import Frame
from transformer_jax.data.tokenizer_frames import separators
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.models import bert, gpt
from transformer_jax.models.layers import Head
from transformer_jax.tasks.text import Network, segmented, unsegmented
from transformer_jax.training.task import (
    DeviceArrays,
    Inherited,
    Mean,
    Means,
    Params,
    Work,
)


class Backbone(abc.ABC):
    """A pre-trained model inside the model of a task.

    Attributes:
        module: its name in the model of the task.
        embeddings, layers: the modules in it that come before the layers, first the
            embedding of tokens, and the one that holds the stacked layers.
        views: how often the model reads each text of a batch: 2 for both orders of
            pairs.
    """

    module: ClassVar[str]
    embeddings: ClassVar[tuple[str, ...]]
    layers: ClassVar[str]

    def __init__(self, config: Any):
        """`config` is a `FineTuningTaskConfig`."""
        self.model = config.model
        self.options = config.fine_tuning
        self.views: int = config.fine_tuning.views

    @staticmethod
    @abc.abstractmethod
    def problems(fine_tuning: Any) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values of a `FineTuningConfig`
        that this model does not support.
        """

    @abc.abstractmethod
    def classifier(self, num_outputs: int) -> nn.Module:
        """Return the model with `num_outputs` outputs for each text."""

    @abc.abstractmethod
    def frame(self, corpus: Corpus) -> Frame:
        """Return the ids around texts."""

    @abc.abstractmethod
    def arguments(self, batch: DeviceArrays, valid: jax.Array) -> tuple[Any, ...]:
        """Return the arguments of the model. `valid` (B, T) is True at tokens."""

    @property
    def table(self) -> str:
        """The path of the embedding of tokens in the parameters."""
        return f"{self.module}/{self.embeddings[0]}/table"

    def bottom(self, count: int) -> dict[str, int | None]:
        """Return the embeddings and the first `count` layers."""
        return {f"{self.module}/{name}": None for name in self.embeddings} | {
            f"{self.module}/{self.layers}": count
        }

    def frozen(self) -> dict[str, int | None]:
        """Return the parameters that keep their values."""
        return (
            self.bottom(self.options.frozen_layers)
            if self.options.frozen_layers
            else {}
        )

    def inherited(self, outputs: Sequence[str]) -> Inherited:
        """Return what is taken from a pre-trained model.

        `outputs` are the meanings of the outputs of the head.
        """
        head = {"head": tuple(outputs)}
        count = self.options.transferred_layers
        if count < 0:
            return Inherited(outputs=head)
        return Inherited(self.bottom(count), outputs=head)

    def training_output(
        self, network: Network, params: Params, batch: DeviceArrays, key: jax.Array
    ) -> tuple[jax.Array, Means]:
        """Return the output of the network with dropout, and further terms of the
        objective.
        """
        return network.output(params, batch, key), {}

    def work(self, work: Work) -> Work:
        """Return the work with the tokens of each reading of the texts."""
        return work._replace(tokens=self.views * work.tokens)

    def readable(self, tokenizer: Tokenizer, ids: np.ndarray) -> tuple[list[str], str]:
        """Return the readable tokens of ids, and their text."""
        return tokenizer.shown(ids), tokenizer.decode(ids)


class BertBackbone(Backbone):
    """BERT (Devlin et al. 2019)."""

    module = "bert"
    embeddings = ("embedding", "segments", "positions", "norm", "embeddings_project")
    layers = "encoder/layers"

    @staticmethod
    def problems(fine_tuning: Any) -> Iterator[tuple[str, str]]:
        for name in fine_tuning.gpt_keys:
            if getattr(fine_tuning, name):
                yield (
                    f"fine_tuning.{name}",
                    (
                        "is for GPT only: "
                        "set it to 0, or model.architecture = 'gpt' in the recipe"
                    ),
                )

    def classifier(self, num_outputs: int) -> nn.Module:
        return bert.Classifier(self.model, num_outputs, self.options.feature_layers)

    def frame(self, corpus: Corpus) -> Frame:
        """Return [CLS], [SEP], [SEP] of the tokenizer, and the number of [SEP]s
        between the texts of a pair.
        """
        special = corpus.special_ids("text")
        count = separators(corpus.tokenizers["text"])
        return Frame(special.begin, special.end, special.end, separators=count)

    def arguments(self, batch: DeviceArrays, valid: jax.Array) -> tuple[Any, ...]:
        arrange = segmented if self.model.has_segments else unsegmented
        return arrange(batch, valid)

    def frozen(self) -> dict[str, int | None]:
        return {self.module: None} if self.options.feature_layers else super().frozen()


class GPTBackbone(Backbone):
    """GPT (Radford et al. 2018), with new embeddings for `gpt.SPECIALS`.

    They have the ids that follow `vocab_size`.

    With `fine_tuning.plain_text`, there are none, and the end id of the tokenizer
    stands for an empty text.
    """

    module = "gpt"
    embeddings = ("embedding", "positions")
    layers = "decoder/layers"

    @staticmethod
    def problems(fine_tuning: Any) -> Iterator[tuple[str, str]]:
        if fine_tuning.feature_layers:
            yield (
                "fine_tuning.feature_layers",
                "must be 0 with GPT, whose new tokens must be trained",
            )

    def __init__(self, config: Any):
        super().__init__(config)
        self._specials = not self.options.plain_text
        self._ids = range(
            self.model.vocab_size,
            self.model.vocab_size + len(gpt.SPECIALS) * self._specials,
        )

    def classifier(self, num_outputs: int) -> nn.Module:
        return gpt.GPTClassifier(self.model, num_outputs, self.views, self._specials)

    def frame(self, corpus: Corpus) -> Frame:
        if self._specials:
            return Frame(*self._ids)
        return Frame(None, None, None, empty=corpus.tokenizers["text"].eos_id)

    def arguments(self, batch: DeviceArrays, valid: jax.Array) -> tuple[Any, ...]:
        """Return token ids and validity, each (views · B, T).

        With two views, the orders of a pair are adjacent.
        """
        text = batch["text"]
        if self.views == 1:
            return text, valid
        other = gpt.swapped(text, batch["second"], batch["text_length"])
        both = jnp.stack([text, other], axis=1).reshape(-1, text.shape[1])
        return both, jnp.repeat(valid, 2, axis=0)

    def frozen(self) -> dict[str, int | None]:
        """Return the parameters that keep their values. The new embeddings are
        trained.
        """
        frozen = super().frozen()
        if frozen:
            frozen = {**frozen, f"{self.module}/embedding": self._ids.start}
        return frozen

    def inherited(self, outputs: Sequence[str]) -> Inherited:
        """Return what is taken from a language model, which becomes the module, or from
        another fine-tuned model.
        """
        tables = (
            ("embedding/table",)
            if self.model.tie_embeddings
            else ("embedding/table", "output/table")
        )
        rows = {
            f"{self.module}/{table}": self._ids for table in tables if self._specials
        }
        return super().inherited(outputs)._replace(module=self.module, rows=rows)

    def training_output(
        self, network: Network, params: Params, batch: DeviceArrays, key: jax.Array
    ) -> tuple[jax.Array, Means]:
        """Add L1, scaled by λ (Radford et al. 2018, eq. 5).

        Without λ, there are no logits of tokens.
        """
        if not self.options.auxiliary_weight:
            return super().training_output(network, params, batch, key)
        tokens, valid = network.arguments(batch)
        output, x, head = network.output(
            params, batch, key, method=gpt.GPTClassifier.hidden
        )
        mean = next_token_per_text(head, x, tokens, valid)
        return output, {
            "language_modeling": mean._replace(scale=self.options.auxiliary_weight)
        }

    def readable(self, tokenizer: Tokenizer, ids: np.ndarray) -> tuple[list[str], str]:
        names = dict(zip(self._ids, gpt.SPECIALS, strict=self._specials))
        tokens = [
            names.get(int(i), token)
            for i, token in zip(ids, tokenizer.shown(ids), strict=True)
        ]
        pieces = np.split(ids, np.flatnonzero(np.isin(ids, self._ids)))
        return tokens, " ".join(filter(None, map(tokenizer.decode, pieces)))


def next_token_per_text(
    head: Head, x: jax.Array, tokens: jax.Array, valid: jax.Array
) -> Mean:
    """Return L1 of Radford et al. 2018 (eq. 1) as the authors' code averages it: over
    the tokens of each text, then over the texts.

    Every token counts except the first one of each text, special tokens too. x (B, T,
    D) is the last layer's output, tokens (B, T), and valid (B, T) is False at padding.
    """
    # True at the positions whose next token counts
    ahead = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    count = ahead.sum(axis=1, keepdims=True)
    next_tokens = jnp.roll(tokens, -1, axis=1)
    loss, _ = losses.token_cross_entropy(
        head, x, next_tokens, ahead / jnp.maximum(count, 1)
    )
    return Mean(loss, (count > 0).sum().astype(jnp.float32))


BACKBONES: dict[str, type[Backbone]] = {"bert": BertBackbone, "gpt": GPTBackbone}
