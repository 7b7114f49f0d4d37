"""Radford et al. 2018, Figure 2: what each layer of a pre-trained model is worth, and
what it knows before fine-tuning.

A small BERT of 2 layers (`pretraining`) takes the place of the paper's GPT. Of it, 0, 1
or 2 layers and the embeddings start a fine-tuning on SICK (4,500 pairs, 500 of
validation); "nothing" starts from a model with the same vocabulary, pre-trained for a
single step. Without fine-tuning, the model tells which of two sentences of BLiMP (30
pairs of each of its 67 paradigms) is acceptable by their pseudo-log-likelihoods, at
three checkpoints of the pre-training.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from etils import epath

from transformer_jax import minimal_pairs
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.pretraining import STEPS, fine_tuned, pretrained
from transformer_jax.claims.trained import Trained
from transformer_jax.minimal_pairs import Pairs
from transformer_jax.predictor import Predictor
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.initialization import abstract_parameters
from transformer_jax.training.sharding import make_mesh

PAIRS = 30  # of each paradigm


def first_of_each(pairs: Pairs, count: int) -> Pairs:
    """Return the first `count` pairs of each paradigm, in the order of `pairs`."""
    seen = defaultdict[str, int](int)
    kept = []
    for i, (_, _, paradigm) in enumerate(pairs.groups):
        seen[paradigm] += 1
        if seen[paradigm] <= count:
            kept.append(i)
    return Pairs(
        [pairs.groups[i] for i in kept],
        [pairs.good[i] for i in kept],
        [pairs.bad[i] for i in kept],
    )


def zero_shot(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the accuracy on BLiMP, the mean over its paradigms."""
    table = minimal_pairs.read_pairs(str(setting.data / "blimp" / "blimp.tsv.gz"))
    pairs = first_of_each(table, 1 if setting.quick else PAIRS)
    sentences = [*pairs.good, *pairs.bad]
    values = minimal_pairs.log_likelihoods(
        sentences, lambda texts: predictor.predict(texts, scored=True)
    )
    count = len(pairs.good)
    scores = minimal_pairs.accuracies(pairs, values[:count], values[count:])
    return {"zero-shot accuracy": scores["accuracy"]}


@dataclasses.dataclass(frozen=True)
class Early:
    """A condition that scores a training at the checkpoint nearest to `step`.

    A quick run has only a few checkpoints, all of which are earlier.
    """

    training: Trained
    step: int

    def __call__(self, setting: Setting) -> Measurements:
        workdir = self.training.train(setting)
        predictor = Predictor.load(workdir, {})
        task = predictor.task
        checkpoints = Checkpoints(
            epath.Path(workdir) / "checkpoints",
            predictor.config.checkpoint,
            task.metrics,
        )
        steps = checkpoints.verified()
        predictor.step = min(steps, key=lambda step: abs(step - self.step))
        predictor.params = checkpoints.restore_params(
            predictor.step, abstract_parameters(task, make_mesh(predictor.config.mesh))
        )
        return self.training.score(predictor, setting)

    @property
    def design(self) -> Mapping[str, Any]:
        """The settings that determine the result: those of `Trained`, and the step."""
        return {**self.training.design, "step": self.step}


def taken(count: int) -> Trained:
    """Return the fine-tuning that takes `count` layers of the pre-trained model."""
    return fine_tuned(pretrained({}), "sick", {"fine_tuning.transferred_layers": count})


training = pretrained({}, score=zero_shot)

CLAIM = Claim(
    statement="Each layer that is taken from a pre-trained model helps, and what the "
    "model knows without fine-tuning grows with pre-training",
    source="Radford et al. 2018, Section 5, Figure 2",
    conditions={
        "nothing": fine_tuned(pretrained({}, steps=1), "sick", {}),
        "embeddings": taken(0),
        "embeddings and 1 layer": taken(1),
        "embeddings and 2 layers": taken(2),
        "zero-shot, a tenth of the steps": Early(training, STEPS // 10),
        "zero-shot, half of the steps": Early(training, STEPS // 2),
        "zero-shot, all steps": training,
    },
    # In the paper, the embeddings help, and the 12 layers gain up to 9 points in all on
    # MNLI. Its zero-shot tasks are others: their scores rise during pre-training.
    expected=(
        Expected(
            "accuracy", "embeddings", minus="nothing", least=0, guess=(-0.01, 0.03)
        ),
        Expected(
            "accuracy",
            "embeddings and 1 layer",
            minus="embeddings",
            least=0,
            guess=(-0.01, 0.04),
        ),
        Expected(
            "accuracy",
            "embeddings and 2 layers",
            minus="embeddings and 1 layer",
            least=0,
            guess=(-0.01, 0.04),
        ),
        Expected(
            "zero-shot accuracy",
            "zero-shot, all steps",
            minus="zero-shot, a tenth of the steps",
            least=0,
            guess=(0.0, 0.05),
        ),
    ),
    cost="quarter of an hour on a core",
)
