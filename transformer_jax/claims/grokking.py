"""Power et al. 2022 and Nanda et al. 2023: grokking needs weight decay.

Addition modulo 97: the text "a b =" has one of 97 labels. A random 40 % of the 9,409
pairs are the training split, and 2,000 of the others validate. A causal Transformer of
one layer (pre-LN, 128 wide, 4 heads, d_ff 512, ReLU) is trained for 15,000 steps of 512
pairs with AdamW, at a learning rate of 0.001 after 10 steps.

Accuracy in training is that of a batch, every 20 steps, and in validation every 100
steps. What is not reached counts as the number of steps of the run.

Differs: Nanda et al. train on 30 % of the pairs modulo 113, all in one batch, without a
norm. Power et al. have two layers. There, the sum is a token that follows the text.
"""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from transformer_jax import files
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import Trained
from transformer_jax.config import defaults
from transformer_jax.models.gpt import sizes
from transformer_jax.training.logging import read_rows

P = 97
TRAINING = 3763  # pairs, 40 %
VALIDATION = 2000
ROWS = 512  # of a batch
STEPS = 15_000
FITTED, GENERAL = 0.99, 0.95  # accuracies


def write_sums(setting: Setting) -> Path:
    """Write the splits `train` and `val`, and return their folder."""
    folder = setting.runs / "data" / "grokking"
    if not (folder / "val.tsv").exists():
        pairs = [(a, b) for a in range(P) for b in range(P)]
        random.Random(0).shuffle(pairs)
        ends = {
            "train": pairs[:TRAINING],
            "val": pairs[TRAINING : TRAINING + VALIDATION],
        }
        contents = {}
        for split, part in ends.items():
            rows = ["sentence\tlabel", *(f"{a} {b} =\t{(a + b) % P}" for a, b in part)]
            contents[f"{split}.tsv"] = ("\n".join(rows) + "\n").encode()
        files.write_all(folder, contents)
    return folder


def first_step(
    rows: Iterable[Mapping[str, Any]], split: str, least: float, never: int
) -> float:
    """Return the first step at which the accuracy of a split is at least `least`, or
    `never`.

    rows: those of metrics.jsonl.
    """
    steps = [
        row["step"]
        for row in rows
        if row["split"] == split and (row.get("accuracy") or 0.0) >= least
    ]
    return float(min(steps, default=never))


class Grokking(Trained):
    """A training whose steps until both accuracies are measured, with its scores."""

    def __call__(self, setting: Setting) -> Measurements:
        scores = super().__call__(setting)
        path = self.train(setting) / "metrics.jsonl"
        rows = [row for _, row in read_rows(path)]
        config = self.config(setting)
        steps = config.training.steps
        fitted = first_step(rows, "train", FITTED, steps)
        general = first_step(rows, config.data.validation_split, GENERAL, steps)
        return {
            **scores,
            "steps until fitted": fitted,
            "steps until general": general,
            "delay": general - fitted,
        }


def grokking() -> ConfigDict:
    """Return the config, but for weight decay."""
    config = defaults("classification", "gpt")
    config.data.test_split = "val"
    config.data.tokenizer = "words"
    config.data.labels = tuple(map(str, range(P)))
    config.data.max_length = 3
    config.data.max_buckets = 1
    config.data.batch_tokens = 3 * ROWS
    config.fine_tuning.plain_text = True

    config.model.update(sizes(1, 128, 512, 4))
    config.model.vocab_size = 112
    config.model.max_length = 3
    config.model.norm = "pre"
    config.model.activation = "relu"
    config.model.init = config.model.embedding_init = "xavier_uniform"
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0

    config.optimizer.schedule = "constant"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 10

    config.training.steps = STEPS
    config.training.log_every = 20
    config.training.evaluate_every = 100
    config.checkpoint.every = 5000
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 0
    config.evaluation.batch_size = 500
    return config


def condition(weight_decay: float) -> Grokking:
    """Return the training with this weight decay."""
    return Grokking(
        grokking,
        keys={"optimizer.weight_decay": weight_decay},
        data=write_sums,
        quick={"data.train_split": "train[:100]", "data.validation_split": "val[:20]"},
    )


CLAIM = Claim(
    statement="Long after it has fitted the training data, a Transformer generalises, "
    "and it needs weight decay for this",
    source="Power et al. 2022, Figures 1 and 2; Nanda et al. 2023",
    conditions={
        "weight decay 1": condition(1.0),
        "no weight decay": condition(0.0),
    },
    # Power et al.: for products in S₅ (Figure 2), weight decay more than halves the
    # number of pairs that suffice, compared to most other changes. For division (Figure
    # 1), validation follows training after 1,000 times as many steps, without weight
    # decay. Of a pair whose mirror image is in training, a model may know the sum
    # otherwise; these are 40 %. So the difference need not be near 1.
    expected=(
        Expected("accuracy", "weight decay 1", least=0.95, guess=(0.97, 1.0)),
        Expected("delay", "weight decay 1", least=500, guess=(1000, 6000)),
        Expected(
            "accuracy",
            "weight decay 1",
            minus="no weight decay",
            least=0.3,
            guess=(0.4, 1.0),
        ),
    ),
    cost="ten minutes on a core",
)
