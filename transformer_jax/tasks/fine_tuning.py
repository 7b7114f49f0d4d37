"""Shared parts of tasks that fine-tune a pre-trained model: their config sections, and
the model with a new head.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import flax.linen as nn
import numpy as np

from transformer_jax import fields
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.models.bert import BertConfig
from transformer_jax.models.gpt import GPTConfig
from transformer_jax.tasks import text
from transformer_jax.tasks.backbones import BACKBONES, Backbone
from transformer_jax.tasks.word_tables import WordTable
from transformer_jax.training.task import Config, GivenTable, Parts

PARTS = ("frozen_layers", "feature_layers", "transferred_layers")


@dataclasses.dataclass(frozen=True)
class FineTuningConfig:
    """The parts of a pre-trained model that are used, and those that fine-tuning leaves
    unchanged.

    frozen_layers: the embeddings and this many first layers keep their values.
    feature_layers: the whole encoder keeps its values, and the task's head reads the
        concatenated outputs of this many last layers (Devlin et al. 2019, Section 5.3,
        with 4).
    transferred_layers: only the embeddings and this many first layers are taken from
        `init_from`, and all else starts new (Radford et al. 2018, Figure 2, left); -1:
        everything is taken.
    """

    frozen_layers: int = 0
    feature_layers: int = fields.outputs(0)
    transferred_layers: int = -1

    gpt_keys: ClassVar[tuple[str, ...]] = ()  # keys that only GPT supports

    @property
    def views(self) -> int:
        """The number of times that the model reads each text."""
        return 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name in ("frozen_layers", "feature_layers"):
            if getattr(self, name) < 0:
                yield name, "must be at least 0, which trains the whole encoder"
        if self.frozen_layers and self.feature_layers:
            yield (
                "frozen_layers",
                (
                    "must be 0 with fine_tuning.feature_layers, "
                    "which freezes the whole encoder"
                ),
            )
        if self.transferred_layers < -1:
            yield (
                "transferred_layers",
                "must be at least 0, or -1, which takes everything",
            )
        elif self.transferred_layers >= 0 and self.feature_layers:
            yield (
                "transferred_layers",
                (
                    "must be -1 with fine_tuning.feature_layers, "
                    "which freezes the whole encoder"
                ),
            )
        elif 0 <= self.transferred_layers < self.frozen_layers:
            yield (
                "transferred_layers",
                (
                    "must be -1 or at least fine_tuning.frozen_layers = "
                    f"{self.frozen_layers}: what starts new must be trained"
                ),
            )


@dataclasses.dataclass(frozen=True)
class AuxiliaryConfig(FineTuningConfig):
    """The keys of `FineTuningConfig`, and those of GPT.

    auxiliary_weight: λ of the objective L2 + λ · L1, where L1 is the language-modeling
        loss of the texts (Radford et al. 2018, eq. 5, with 0.5); for GPT only.
    plain_text: the model reads the texts alone, one after the other, without special
        tokens around them, and its head has no bias, as GPT-2 in Hugging Face's
        transformers; for GPT only.
    """

    auxiliary_weight: float = 0.0
    plain_text: bool = fields.outputs(False)

    gpt_keys: ClassVar[tuple[str, ...]] = ("auxiliary_weight", "plain_text")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        yield from super().problems()
        if self.auxiliary_weight < 0:
            yield (
                "auxiliary_weight",
                (
                    "must be at least 0, "
                    "which switches the language-modeling loss off; 0.5 is usual"
                ),
            )


@dataclasses.dataclass(frozen=True)
class FineTuningTaskConfig(Config):
    """The config sections of a task that fine-tunes a pre-trained model."""

    model: BertConfig | GPTConfig
    fine_tuning: FineTuningConfig
    vectors: VectorsConfig

    @property
    def given_tables(self) -> tuple[GivenTable, ...]:
        if not self.vectors.file:
            return ()
        model = self.model
        return (
            WordTable(
                "vectors",
                self.vectors,
                model.token_vectors,
                "text",
                self.backbone.table,
                size=model.vocab_size,
            ),
        )

    @property
    def backbone(self) -> Backbone:
        """The pre-trained model."""
        return BACKBONES[self.model.architecture](self)

    @property
    def frozen(self) -> Parts:
        return {**super().frozen, **self.backbone.frozen()}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        yield from text.length_problems(self)
        most = self.model.num_layers
        for name in PARTS:
            if getattr(self.fine_tuning, name) > most:
                yield (
                    f"fine_tuning.{name}",
                    f"must not exceed model.num_layers = {most}",
                )
        yield from BACKBONES[self.model.architecture].problems(self.fine_tuning)

    def advice(self) -> Iterator[str]:
        """Yield warnings about values that are valid but probably unintended."""
        yield from super().advice()
        if self.init_from:
            return
        for name in ("frozen_layers", "feature_layers"):
            if getattr(self.fine_tuning, name):
                yield (
                    f"config.fine_tuning.{name} keeps random values, "
                    "as there is no config.init_from to load from"
                )
        if self.fine_tuning.transferred_layers >= 0:
            yield (
                "config.fine_tuning.transferred_layers has no effect, "
                "as there is no config.init_from to load from"
            )


def fine_tuned(backbone: Backbone, model: nn.Module, corpus: Corpus) -> text.Network:
    """Return how a task calls `model`, the pre-trained model with a new head."""

    def shown(ids: np.ndarray) -> tuple[list[str], str]:
        return backbone.readable(corpus.tokenizers["text"], ids)

    return text.Network(model, shown, backbone.arguments, backbone.views)


def classifier(backbone: Backbone, corpus: Corpus, num_outputs: int) -> text.Network:
    """Return the model with `num_outputs` outputs for each whole text."""
    return fine_tuned(backbone, backbone.classifier(num_outputs), corpus)
