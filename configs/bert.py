"""Pre-training of BERT on raw text.

Paper: Devlin et al. 2019. `base` (the default): 12 layers, d_model 768, 12 heads.
`large`: 24 layers, 1024, 16 heads. `mini`: 4 layers, 256, 4 heads, for a CPU (the size
that Turc et al. 2019 call mini). Flags: `cased` keeps upper case and accents; `phase2`
has sequences of 512 tokens instead of 128; `ltr` is the paper's left-to-right model
without next-sentence prediction (Section 5.1).
Command: python scripts/train.py --config=configs/bert.py:mini --workdir=runs/mini \
    --config.data.directory=DIR
Data: DIR holds train.txt and val.txt: a sentence per line, a blank line between
documents; scripts/documents.py makes such files. To use the vocabulary of the paper,
add --config.data.vocabulary=vocab.txt.
The second phase: python scripts/train.py --config=configs/bert.py:base,phase2 \
    --workdir=runs/base512 --config.init_from=runs/base --config.data.directory=DIR
Score: python scripts/evaluate.py --workdir=runs/mini --split=val
Cost: in bfloat16, two CPU cores train mini at 15,000 tokens/s: 16,000 steps take about
half an hour.
Expected: of mini on image captions and paragraphs, 57 % masked accuracy on captions and
28 % on paragraphs, and 56 % next-sentence accuracy; 3,000 more steps on paragraphs
alone raise it to 59 % (docs/results/bert.md).
Differs: the second phase begins a new run, with a new optimizer state and warm-up.
Large sizes were not trained.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share
from transformer_jax.models.bert import SIZES

# of both phases
STEPS = {
    "base": (900_000, 100_000),
    "large": (900_000, 100_000),
    "mini": (16_000, 2_000),
}


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(
        arg, {"size": ("base", "large", "mini")}, flags=("cased", "phase2", "ltr")
    )
    config = defaults("bert_pretraining", "bert")
    size, length = choice["size"], 512 if choice["phase2"] else 128
    small = size == "mini"

    config.data.validation_split = config.data.test_split = "val"
    config.data.tokenizer = "bert"
    config.data.lowercase = not choice["cased"]
    config.data.min_count = 3
    config.data.max_length = length
    config.data.batch_tokens = max(16 * 128, 8 * length) if small else 256 * 512
    config.data.max_buckets = 3

    model = config.model
    model.update(SIZES[size])
    model.max_length = 512
    model.causal = choice["ltr"]
    config.masking.next_sentence = not choice["ltr"]
    model.unroll = 4 if small else 1
    model.dtype = "float32" if small else "bfloat16"

    config.optimizer.schedule = "linear"
    config.optimizer.learning_rate = 1e-3 if small else 1e-4
    config.optimizer.warmup_steps = share(
        config, 10 if small else STEPS[size][choice["phase2"]] // 10_000
    )
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0

    config.training.steps = STEPS[size][choice["phase2"]]
    config.training.evaluate_every = share(config, 10)
    config.checkpoint.every = share(config, 10)
    config.checkpoint.keep_latest = 2
    return config
