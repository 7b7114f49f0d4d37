r"""A small T5 for several tasks at once, pre-trained on raw text and then fine-tuned.

Paper: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer".
Model: `mini` of configs/t5.py, version 1.1 with 4 + 4 layers, 256 wide: 10,393,344
parameters.
Arguments:
`pretrain`: span corruption on raw text.
`tasks=all` (the default): all data sets below, mixed by weights.
`tasks=en-de|sick|trec|samsum|jfleg`: one of them.
Data: DIR has a folder for each data set, e.g. DIR/sick, which
    python -m transformer_jax.data.corpora.text_to_text
makes, and for `pretrain` the files train.txt and val.txt, which scripts/documents.py
makes; see docs/text_to_text.md.
Command: python scripts/train.py --config=configs/text_to_text.py:pretrain \
    --workdir=runs/pretrained --config.data.directory=DIR
Fine-tuning: python scripts/train.py --config=configs/text_to_text.py:tasks=sick \
    --workdir=runs/sick --config.data.directory=DIR --config.init_from=runs/pretrained
From scratch: the same without --config.init_from; then the tokenizer is learned from
the training split.
Score: python scripts/evaluate.py --workdir=runs/sick, and of `tasks=all` one data set
after another, e.g. with --split=test:sick. `exact_match` is the accuracy of SICK and
TREC.
Cost: an hour of pre-training and ten minutes of fine-tuning for sick or trec, on one
core in bfloat16.
Expected: validation loss of `pretrain` 1.98; test accuracy of trec 88.6 % (from scratch
79.7) and of sick 68.8 % (64.6), means of three seeds; of `tasks=all` 87.0 and 63.4 %,
and test BLEU of en-de 32.2; docs/results/text_to_text.md.
Differs: The paper trains with Adafactor and an inverse square root, in batches of
65,536 tokens. Here all rates fall to 0 along a cosine. A batch has at most 1,024
padded positions for pre-training, with Adafactor from 0.01, and 4,096 for fine-tuning,
with Adam from 0.001. A batch has examples of one data set. The tokenizer is byte-level
BPE, with 8,000 ids.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share
from transformer_jax.data.corpora.text_to_text import TASKS
from transformer_jax.models.t5 import SIZES, dropout


class Settings(NamedTuple):
    """The settings that differ between data sets.

    weight: share of the batches in the mixture, up to a factor.
    metric: the score that selects a checkpoint.
    ratio, extra: an output has at most ratio · S + extra tokens.
    """

    weight: int
    steps: int
    metric: str
    ratio: float
    extra: int


# The weights are between equal ones and the numbers of tokens.
SETTINGS = {
    "en-de": Settings(8, 1500, "bleu_tokenized", 1.5, 10),
    "sick": Settings(3, 500, "exact_match", 0.0, 10),
    "trec": Settings(2, 400, "exact_match", 0.0, 10),
    "samsum": Settings(8, 1500, "loss", 0.0, 100),
    "jfleg": Settings(2, 300, "loss", 1.5, 10),
}
ALL = Settings(0, 3000, "loss", 0.5, 60)


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, {"tasks": ("all", *SETTINGS)}, flags=("pretrain",))
    if choice["pretrain"]:
        return _pretraining()
    name = choice["tasks"]
    names = tuple(SETTINGS) if name == "all" else (name,)
    settings = SETTINGS.get(name, ALL)
    config = defaults("sequence_to_sequence")

    config.data.source_language = "inputs"
    config.data.target_language = "targets"
    weights = {name: SETTINGS[name].weight for name in names}
    config.data.mixture = tuple(f"{name}={weight}" for name, weight in weights.items())
    config.data.prefixes = tuple(TASKS[name].prefix for name in names)
    config.data.max_length = 512
    _common(config, settings.steps)
    config.model.update(dropout(0.1))

    config.checkpoint.best_metric = settings.metric
    config.evaluation.checkpoint = "best"
    config.decoding.beam_size = 4
    config.decoding.length_penalty = 0.6
    config.decoding.length_penalty_form = "wu"
    config.decoding.max_ratio = settings.ratio
    config.decoding.max_extra = settings.extra
    return config


def _pretraining() -> ConfigDict:
    config = defaults("denoising")
    config.data.test_split = "val"
    _common(config, 14_000)
    config.data.max_length = 128
    # many small batches: half an hour of large ones with Adam learns no more than three
    # minutes of these
    config.data.batch_tokens = 1024
    config.optimizer.name = "adafactor"
    config.optimizer.learning_rate = 0.01
    return config


def _common(config: ConfigDict, steps: int) -> None:
    """Set what pre-training and fine-tuning have in common."""
    config.data.tokenizer = "bpe_bytes"
    config.data.batch_tokens = 4096
    config.data.max_buckets = 4

    config.model.update(SIZES["mini"])
    config.model.max_length = 512
    config.model.unroll = 4

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.training.steps = steps
    config.optimizer.warmup_steps = share(config, 20)
    config.optimizer.clip_norm = 1.0
    config.training.label_smoothing = 0.0
    config.training.evaluate_every = share(config, 5)
    config.checkpoint.every = share(config, 5)
    config.checkpoint.keep_latest = 2
