"""Base classes of tasks that fine-tune a pre-trained model, and their config
sections.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax import fields
from transformer_jax.data.batching import Batches
from transformer_jax.data.examples import columns_of
from transformer_jax.models.bert import BertConfig
from transformer_jax.models.gpt import GPTConfig
from transformer_jax.tasks.backbones import BACKBONES
from transformer_jax.tasks.text import TextTask, TextTaskConfig
from transformer_jax.training.task import Arrays, Mean, Outputs, Params, Record, Work

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
class FineTuningTaskConfig(TextTaskConfig):
    """The config sections of a task that fine-tunes a pre-trained model."""

    model: BertConfig | GPTConfig
    fine_tuning: FineTuningConfig

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from super().problems()
        for name in PARTS:
            if getattr(self.fine_tuning, name) > (most := self.model.num_layers):
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


@dataclasses.dataclass(frozen=True)
class LabelTaskConfig(FineTuningTaskConfig):
    """The config sections of a `LabelTask`."""

    fine_tuning: AuxiliaryConfig


class FineTuningTask(TextTask):
    """A task that fine-tunes a pre-trained model with a new head.

    outputs: the meaning of each output of the head.
    views: how often the model reads each text, see `backbones.Backbone`.
    """

    def __init__(
        self,
        config: Any,
        workdir: epath.PathLike | None,
        outputs: Sequence[str],
        views: int = 1,
    ):
        super().__init__(config, workdir)
        self.backbone = BACKBONES[config.model.architecture](config, views)
        self.frozen = self.backbone.frozen()
        self.inherited = self.backbone.inherited()._replace(
            outputs={"head": tuple(outputs)}
        )

    def init(self, key: jax.Array) -> Params:
        tokens = jnp.zeros((self.backbone.views, 1), jnp.int32)
        return self.model.init(key, tokens, tokens == 0)["params"]

    def batches(self, split: str, seed: int | None) -> Batches:
        table = self.corpus.open(split)
        inside = (
            f" (row 1 is line {table.first_line})"
            if table.first_line not in (0, 2)
            else ""
        )
        what = f"{table.where}, split {split}{inside}"
        return self._batches([table.column(name) for name in self.columns], what, seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        return self._batches(
            columns_of(records, self.columns, self.inputs), "input", None
        )

    def _batches(self, columns: Sequence[Any], what: str, seed: int | None) -> Batches:
        """Return the batches of examples given by their `columns`, None for a
        missing one. `what` is their source.
        """
        raise NotImplementedError

    def arguments(self, batch: Mapping[str, jax.Array]) -> tuple[Any, ...]:
        return self.backbone.arguments(batch, self.valid(batch, "text"))

    def logits(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
    ) -> Any:
        """Return the model's output, with dropout if there is a key."""
        rngs = None if key is None else {"dropout": key}
        return self.model.apply({"params": params}, *self.arguments(batch), rngs=rngs)

    def work(self, batch: Arrays) -> Work:
        tokens, flops = super().work(batch)
        return Work(self.backbone.views * tokens, flops)

    def tokens(self, name: str, ids: np.ndarray) -> tuple[list[str], str]:
        return self.backbone.readable(self.corpus.tokenizers[name], ids)


class LabelTask(FineTuningTask):
    """A task whose model has outputs for whole texts, and whose examples have a label.

    A batch holds "text", "text_length", "index" (B,) and, except in prediction, "label"
    (B,). For pairs, it also holds "second", the place at which the second text starts.
    """

    def __init__(
        self,
        config: Any,
        workdir: epath.PathLike | None,
        outputs: Sequence[str],
        views: int = 1,
    ):
        super().__init__(config, workdir, outputs, views)
        self.model = self.backbone.classifier(len(outputs))

    def means(
        self, logits: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, Mean]:
        """Return the loss L2 of the labels, and metrics, as means over the examples
        of a batch.
        """
        raise NotImplementedError

    def shaped(self, logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the model's output with examples as its first axis."""
        return logits

    def loss(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int,
    ) -> dict[str, Mean]:
        """Return L2, and with fine_tuning.auxiliary_weight λ the language-modeling
        loss L1, scaled by λ.
        """
        logits, others = self.backbone.training_output(
            self.model, params, self.arguments(batch), key
        )
        return self.means(self.shaped(logits, batch), batch) | others

    def evaluate(
        self, params: Params, batch: Mapping[str, jax.Array], greedy: bool
    ) -> tuple[dict[str, Mean], Outputs]:
        """Return the means if there are labels, and the logits."""
        logits = self.shaped(self.logits(params, batch), batch)
        return self.means(logits, batch) if "label" in batch else {}, {"logits": logits}
