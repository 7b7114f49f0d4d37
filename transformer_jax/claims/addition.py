"""Lee et al. 2023: the order of the digits decides whether addition is learned.

Pairs of numbers with 3 or 5 digits each, e.g. 123+456, of which the target is the sum
as it is written, 579, or from its last digit on, 975. A digit of the reversed sum
depends on two digits and a carry; the first digit of a sum depends on all digits. There
are 10,000 training pairs of 3 digits and 50,000 of 5; 1,000 further pairs validate. A
Transformer of 2 + 2 layers, 128 wide, sees 4,000 batches of 64 pairs, as characters.

Differs: The paper trains a decoder of 10.6 million parameters (NanoGPT), for longer,
and on the numbers as well as the sums. Here, an encoder reads the numbers.
"""

import functools
import random
from pathlib import Path

from ml_collections import ConfigDict

from transformer_jax import files
from transformer_jax.claims.claim import Claim, Expected, Setting
from transformer_jax.claims.trained import Trained
from transformer_jax.config import defaults

TRAINING = {3: 10_000, 5: 50_000}  # digits → pairs
VALIDATION = 1000
ROWS = 64  # of a batch


def sums(digits: int, count: int) -> list[tuple[str, str, str]]:
    """Return different pairs of numbers: (the pair, its sum, and this reversed)."""
    first = 10 ** (digits - 1)
    size = 9 * first
    draw = random.Random(digits)
    pairs = []
    for number in draw.sample(range(size * size), count):
        a, b = divmod(number, size)
        total = str(2 * first + a + b)
        pairs.append((f"{first + a}+{first + b}", total, total[::-1]))
    return pairs


def write_sums(setting: Setting, digits: int) -> Path:
    """Write the splits `train` and `val`, and return their folder."""
    folder = setting.runs / "data" / f"addition-{digits}"
    if not (folder / "val.reversed").exists():
        pairs = sums(digits, TRAINING[digits] + VALIDATION)
        splits = {"train": pairs[VALIDATION:], "val": pairs[:VALIDATION]}
        contents = {}
        for split, part in splits.items():
            columns = zip(*part, strict=True)
            for name, column in zip(
                ("pair", "plain", "reversed"), columns, strict=True
            ):
                contents[f"{split}.{name}"] = ("\n".join(column) + "\n").encode()
        files.write_all(folder, contents)
    return folder


def addition() -> ConfigDict:
    """Return the config, but for the lengths and the order of the digits."""
    config = defaults("sequence_to_sequence", "transformer")
    config.data.source_language = "pair"
    config.data.target_language = "plain"
    config.data.test_split = "val"
    config.data.tokenizer = "characters"
    config.data.max_buckets = 1

    model = config.model
    model.source_vocab_size = model.target_vocab_size = 16
    model.num_encoder_layers = model.num_decoder_layers = model.unroll = 2
    model.d_model, model.d_ff, model.num_heads = 128, 256, 4
    model.head_dim = model.value_dim = 32
    model.max_length = 16
    model.norm = "pre"
    model.positions = "learned"
    model.dropout_rate = 0.0

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100

    config.training.steps = 4000
    config.training.label_smoothing = 0.0
    config.training.evaluate_every = 800
    config.checkpoint.every = 4000
    config.checkpoint.keep_best = 0
    config.evaluation.batch_size = 500

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 8
    return config


def condition(digits: int, order: str) -> Trained:
    """Return the training that adds numbers of `digits` digits, written in `order`."""
    length = 2 * digits + 2  # both numbers, "+", and the end
    return Trained(
        addition,
        keys={
            "data.max_length": length,
            "data.batch_tokens": ROWS * length,
            "data.target_language": order,
        },
        data=functools.partial(write_sums, digits=digits),
        quick={
            "data.train_split": "train[:100]",
            "data.validation_split": "val[:20]",
        },
    )


CLAIM = Claim(
    statement="A small Transformer learns to add if the digits of the sum are "
    "reversed, and otherwise hardly long numbers",
    source="Lee et al. 2023, Teaching arithmetic to small Transformers",
    conditions={
        "3 digits, plain": condition(3, "plain"),
        "3 digits, reversed": condition(3, "reversed"),
        "5 digits, plain": condition(5, "plain"),
        "5 digits, reversed": condition(5, "reversed"),
    },
    # In the paper, 10,000 plain sums of 3 digits give an accuracy just above 0.85, and
    # from about 2,500 reversed ones on it is near 1. With more digits, there are more
    # carries that the first digits of a plain sum depend on, so the difference should
    # grow.
    expected=(
        Expected("exact_match", "3 digits, reversed", least=0.95, guess=(0.97, 1.0)),
        Expected(
            "exact_match",
            "3 digits, reversed",
            minus="3 digits, plain",
            least=0.03,
            guess=(0.03, 0.6),
        ),
        Expected(
            "exact_match",
            "5 digits, reversed",
            minus="5 digits, plain",
            least=0.2,
            guess=(0.3, 1.0),
        ),
    ),
    cost="nine minutes on a core",
)
