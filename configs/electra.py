"""Pre-training of ELECTRA on raw text: a discriminator that detects the tokens that a
small generator replaced.

Paper: Clark et al. 2020, Table 6. `small` (the default): 12 layers, d_model 256,
embeddings of 128, generator of a quarter of these widths. `base`: 12 layers, d_model
768, generator of a third. `mini`: the size of configs/bert.py:mini, embeddings of 128,
generator of a quarter, for a CPU. Flag: `cased` keeps upper case and accents.
Command: python scripts/train.py --config=configs/electra.py:mini \
    --workdir=runs/electra --config.data.directory=DIR
Data: that of configs/bert.py: DIR holds train.txt and val.txt, a sentence per line, a
blank line between documents.
Score: python scripts/evaluate.py --workdir=runs/electra --split=val
Use: python scripts/train.py --config=configs/finetune.py:task=trec,from=runs/electra \
    --workdir=runs/trec --config.data.directory=data/trec
Cost: not measured yet.
Expected: not measured yet. The 14,600 steps of mini have as many FLOPs as the 16,000
steps of configs/bert.py:mini (docs/fine_tuning.md#compare-electra-with-bert).
Differs: the schedule, clipping and dropout of mini are those of configs/bert.py:mini.
No size was trained.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share
from transformer_jax.models.bert import SIZES, sizes

DISCRIMINATORS = {
    "mini": SIZES["mini"] | {"embedding_dim": 128},
    "small": sizes(12, 256) | {"embedding_dim": 128},
    "base": sizes(12, 768),
}
# the size → 1 / the generator's share of widths
DIVISORS = {"mini": 4, "small": 4, "base": 3}
STEPS = {"mini": 14_600, "small": 1_000_000, "base": 766_000}
RATES = {"mini": 1e-3, "small": 5e-4, "base": 2e-4}
ROWS = {"mini": 16, "small": 128, "base": 256}
LENGTHS = {"mini": 128, "small": 128, "base": 512}


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, {"size": ("small", "base", "mini")}, flags=("cased",))
    config = defaults("electra_pretraining", "bert")
    size = choice["size"]
    length = LENGTHS[size]
    is_mini = size == "mini"

    config.data.validation_split = config.data.test_split = "val"
    config.data.tokenizer = "bert"
    config.data.lowercase = not choice["cased"]
    config.data.min_count = 3
    config.data.max_length = length
    config.data.batch_tokens = ROWS[size] * length
    config.data.max_buckets = 3

    model = config.model
    model.update(DISCRIMINATORS[size])
    model.max_length = 512
    model.pooler_activation = "gelu"
    model.unroll = 4 if is_mini else 1
    model.dtype = "float32" if is_mini else "bfloat16"

    generator = config.generator
    generator.num_layers = model.num_layers
    for width in ("d_model", "d_ff"):
        generator[width] = model[width] // DIVISORS[size]

    config.optimizer.schedule = "linear"
    config.optimizer.learning_rate = RATES[size]
    config.optimizer.warmup_steps = share(config, 10) if is_mini else 10_000
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0

    config.training.steps = STEPS[size]
    config.training.evaluate_every = share(config, 10)
    config.checkpoint.every = share(config, 10)
    config.checkpoint.keep_latest = 2
    return config
