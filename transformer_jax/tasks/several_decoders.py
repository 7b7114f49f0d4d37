"""Translation into several languages by one encoder and a decoder for each language
(Dong et al. 2015).

The model is that of `SequenceToSequence`. What is new here is which parameters it has:
those of the encoder, and those of each decoder. A batch has one target language, so one
decoder is trained in a step.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.core import meta

from transformer_jax.data.batching import Batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.text import SeparateDirections
from transformer_jax.data.word_vectors import VectorsConfig
from transformer_jax.decoding import DecodingConfig
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.transformer import TransformerConfig
from transformer_jax.tasks.inputs import InputConfig
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.tasks.sequence_to_sequence_config import (
    SequenceToSequenceConfig,
    SequenceToSequenceEvaluation,
    SequenceToSequenceTraining,
)
from transformer_jax.training.task import (
    Arrays,
    Attention,
    Columns,
    Config,
    DeviceArrays,
    Means,
    Outputs,
    Params,
    Predictions,
    Record,
    Scores,
    Step,
    Task,
    Work,
)


@dataclasses.dataclass(frozen=True)
class SeveralDecodersConfig(Config):
    """The config sections of this task: those of `SequenceToSequence` except those of
    word vectors.
    """

    model: TransformerConfig | RecurrentConfig | ConvS2SConfig
    data: SeparateDirections
    input: InputConfig
    training: SequenceToSequenceTraining
    evaluation: SequenceToSequenceEvaluation = dataclasses.field(
        metadata={"free": True}
    )
    decoding: DecodingConfig = dataclasses.field(metadata={"free": True})

    @property
    def of_pairs(self) -> SequenceToSequenceConfig:
        """The config of the same task with one decoder."""
        sections = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        none = VectorsConfig()
        return SequenceToSequenceConfig(
            **sections, source_vectors=none, target_vectors=none
        )

    @property
    def columns(self) -> Columns:
        return self.of_pairs.columns

    @property
    def longest(self) -> tuple[str, int]:
        return self.of_pairs.longest

    @property
    def longest_input(self) -> int:
        return self.of_pairs.longest_input

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, rule and remedy) for values that are inconsistent with
        each other.
        """
        yield from self.of_pairs.problems()

    def advice(self) -> Iterator[str]:
        """Yield warnings about settings that are allowed but unwise."""
        yield from self.of_pairs.advice()


class SeveralDecoders(Task):
    """Translation in several directions, with a decoder for each target language.

    A batch is that of `SequenceToSequence`, and "group" (B,), the number of its
    decoder, the same in all rows. The parameters are "encoder", all that the model
    needs to encode a source, and "decoders", all others, with the decoders as the first
    axis. Embeddings that are tied to those of the source belong to the encoder.

    Differs: The paper changes the language after many batches, and each language has a
    vocabulary of its own. Here the batches of all languages are shuffled. Adam moves a
    decoder a little in the steps of the others, by its averages of past gradients.
    """

    metrics: ClassVar = SequenceToSequence.metrics
    corpus: Corpus

    def __init__(self, config: SeveralDecodersConfig, workdir: epath.PathLike | None):
        self.pairs = SequenceToSequence(config.of_pairs, workdir)
        super().__init__(config, self.pairs.corpus)
        self.decoders = len(config.data.marks)

    # On the device.

    def init(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, self.decoders)
        model = self.pairs.model
        source = jnp.zeros((1, 1), jnp.int32)
        encode: Any = model.encode
        of_encoder = jax.eval_shape(
            lambda: model.init(key, source, method=encode)["params"]
        )
        stacked = jax.vmap(self.pairs.init)(keys)
        encoder = {
            name: jax.tree.map(lambda leaf: leaf[0], stacked[name])
            for name in of_encoder
        }
        decoders = {
            name: meta.add_axis(stacked[name], 0, {nn.PARTITION_NAME: "decoders"})
            for name in stacked
            if name not in of_encoder
        }
        return {"encoder": encoder, "decoders": decoders}

    def _of_batch(self, params: Params, batch: DeviceArrays) -> Params:
        """Return the parameters of one encoder and the decoder of a batch."""
        number = jnp.max(batch["group"])  # 0 in filler rows
        decoder = jax.tree.map(lambda leaf: leaf[number], params["decoders"])
        return {**params["encoder"], **decoder}

    def loss(
        self, params: Params, batch: DeviceArrays, key: jax.Array, step: Step
    ) -> Means:
        """See `SequenceToSequence.loss`."""
        return self.pairs.loss(self._of_batch(params, batch), batch, key, step)

    def evaluate(
        self, params: Params, batch: DeviceArrays, greedy: bool
    ) -> tuple[Means, Outputs]:
        """See `SequenceToSequence.evaluate`."""
        return self.pairs.evaluate(self._of_batch(params, batch), batch, greedy)

    def attention(self, params: Params, batch: DeviceArrays) -> Attention:
        """See `SequenceToSequence.attention`."""
        return self.pairs.attention(self._of_batch(params, batch), batch)

    def checks(self, params: Params, batch: DeviceArrays) -> Mapping[str, float]:
        """See `SequenceToSequence.checks`."""
        return self.pairs.checks(self._of_batch(params, batch), batch)

    # On the host.

    def batches(self, split: str, seed: int | None) -> Batches:
        return self.pairs.batches(split, seed)

    def batches_of(self, records: Sequence[Record]) -> Batches:
        return self.pairs.batches_of(records)

    def dummy_batch(
        self, rows: int, length: int, seed: int | None = None, references: bool = True
    ) -> Arrays:
        """Return a synthetic batch of the decoder with the number `seed`, counted
        from the first again after the last.
        """
        batch = super().dummy_batch(rows, length, seed, references)
        batch["group"] = np.full(rows, (seed or 0) % self.decoders, np.int32)
        return batch

    def decode(self, outputs: Arrays, batch: Arrays) -> list[dict[str, Any]]:
        """See `SequenceToSequence.decode`."""
        return self.pairs.decode(outputs, batch)

    def score(
        self,
        means: Mapping[str, float],
        predictions: Predictions,
        references: Sequence[Any],
    ) -> Scores:
        """See `SequenceToSequence.score`."""
        return self.pairs.score(means, predictions, references)

    def work(self, batch: Arrays) -> Work:
        """Return the work. Its tokens are those of the target."""
        tokens = int(batch["target_length"].sum())
        return super().work(batch)._replace(tokens=tokens)

    def preview(self, arrays: Arrays) -> list[str]:
        """See `SequenceToSequence.preview`."""
        return self.pairs.preview(arrays)
