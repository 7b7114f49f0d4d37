"""Trainings that several claims share: a small Transformer on Multi30k.

It has two layers of width 128 in each stack, pre-LN, four heads, a joint vocabulary of
3,000 subwords, and a million parameters. Its 1,400 steps of 1,024 positions take about
three minutes of one core. That is some two epochs of all pairs, or twenty of FEW.
"""

from collections.abc import Mapping
from typing import Any

from transformer_jax.claims.trained import Trained

RECIPE = "multi30k.py:en-de,tiny,quick"
STEPS = 1400
KEYS = {
    "model.source_vocab_size": 3000,
    "model.target_vocab_size": 3000,
    "model.num_encoder_layers": 2,
    "model.num_decoder_layers": 2,
    "model.unroll": 2,
    "model.d_model": 128,
    "model.d_ff": 256,
    "model.num_heads": 4,
    "model.head_dim": 32,
    "model.value_dim": 32,
    "model.dropout_rate": 0.1,
    "data.batch_tokens": 1024,
    "data.max_buckets": 4,
    "training.steps": STEPS,
    "training.evaluate_every": STEPS,
    "checkpoint.every": STEPS,
    "checkpoint.keep_best": 0,
    "evaluation.checkpoint": "latest",
    "decoding.beam_size": 1,
}
FEW = {"data.train_split": "train[:4000]"}
QUICK = {"data.train_split": "train[:200]", "data.validation_split": "val[:20]"}


def base(
    keys: Mapping[str, Any] | None = None,
    quick: Mapping[str, Any] | None = None,
    **options: Any,
) -> Trained:
    """Return the condition that trains the model with some keys changed.

    `options` are further fields of `Trained`, e.g. the score.
    """
    return Trained(
        RECIPE,
        {**KEYS, **(keys or {})},
        data="multi30k/tok",
        quick={**QUICK, **(quick or {})},
        **options,
    )


BASE = base()


def in_paper(*rows: str) -> tuple[str, ...]:
    """Return the commands that train rows of the paper's Table 3, see
    configs/wmt14.py.
    """
    return tuple(
        f"python scripts/train.py --config=configs/wmt14.py:{row} --workdir=runs/{row}"
        for row in rows
    )
