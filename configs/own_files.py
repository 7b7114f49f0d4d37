"""Translation between two languages of your own parallel text.

The settings suit the size of the text.

Paper: Vaswani et al. 2017, as pre-LN (Xiong et al. 2020), which tolerates more learning
rates than post-LN.
Command: python scripts/train.py --config=configs/own_files.py:de-en,10k \
    --workdir=runs/mine --config.data.directory=DIR
Data: DIR holds train.de, train.en, val.de, val.en and, for evaluate.py, test.de,
test.en. They contain ordinary text in UTF-8, one sentence per line; line i of one file
is the translation of line i of the other. `.gz` works too.
Argument: the source and the target language, i.e. the files' suffixes, then the size of
the training split: `10k` (the default) for up to 100,000 pairs, `1m` for up to 10
million, `100m` for more. A warning in the log says if another size suits the data
better. docs/own_files.md says how to adjust the settings.
Fine-tuning: `de-en,from=FOLDER` starts from a Hugging Face folder of an encoder–decoder
(BART, mBART, Marian or T5), or from a run. It has the model and the tokenizers, and the
other settings are those of `10k` with a learning rate of 3e-5, which was not tuned:
    python scripts/train.py --config=configs/own_files.py:de-en,from=FOLDER \
        --workdir=runs/tuned --config.data.directory=DIR
Cost: `10k`: about ten minutes on two CPU cores. `1m` and `100m` need accelerators.
Expected: docs/own_files.md has a measured run of `10k`; `1m` and `100m` have not been
trained.
"""

import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share
from transformer_jax.transfer import keys_for

# Number of pairs → keys of the model, then of the rest.
MODELS = {
    "10k": {
        "layers": (3, 2),
        "d_model": 256,
        "d_ff": 512,
        "num_heads": 4,
        "vocab_size": 4_000,
        "dropout": 0.3,
    },
    "1m": {
        "layers": (6, 6),
        "d_model": 512,
        "d_ff": 2048,
        "num_heads": 8,
        "vocab_size": 16_000,
        "dropout": 0.1,
    },
    "100m": {
        "layers": (6, 6),
        "d_model": 1024,
        "d_ff": 4096,
        "num_heads": 16,
        "vocab_size": 32_000,
        "dropout": 0.1,
    },
}
TRAININGS = {
    "10k": {
        "steps": 1_500,
        "batch_tokens": 2_048,
        "rate": 2e-3,
        "warmup": 5,
        "evaluations": 5,
    },
    "1m": {
        "steps": 100_000,
        "batch_tokens": 32_768,
        "rate": 7e-4,
        "warmup": 25,
        "evaluations": 50,
    },
    "100m": {
        "steps": 100_000,
        "batch_tokens": 400_000,
        "rate": 1e-3,
        "warmup": 25,
        "evaluations": 50,
    },
}
# The pairs of the training split that a size is meant for: at least, and at most (0: no
# limit).
PAIRS = {"10k": (0, 100_000), "1m": (100_001, 10_000_000), "100m": (10_000_001, 0)}


def get_config(arg: str | None = None) -> ConfigDict:
    pair, _, rest = (arg or "de-en").partition(",")
    if not (languages := re.fullmatch(r"([^-=]+)-([^-=]+)", pair)):
        raise ConfigError(
            f"config argument {pair!r} is unknown: "
            "start with the languages of your files, e.g. de-en"
        )
    choice = parse_arg(rest, {"size": tuple(MODELS), "from": ()})
    size = choice["size"]
    start = keys_for(choice["from"]) if choice["from"] else {}
    if start and size != "10k":
        raise ConfigError("from=… determines the model: leave out the size")
    model, training = MODELS[size], TRAININGS[size]
    config = defaults("sequence_to_sequence")

    config.data.source_language, config.data.target_language = languages.groups()
    config.data.test_split = "test"
    config.data.tokenizer = "bpe_bytes"
    config.data.meant_for = PAIRS[size]
    config.data.max_length = 128 if size == "10k" else 256
    # leaves out pairs of which one side is nine times as long, as Moses' cleaning does
    config.data.max_ratio = 9.0
    config.data.batch_tokens = training["batch_tokens"]

    config.model.source_vocab_size = config.model.target_vocab_size = model[
        "vocab_size"
    ]
    config.model.num_encoder_layers, config.model.num_decoder_layers = model["layers"]
    config.model.d_model, config.model.d_ff = model["d_model"], model["d_ff"]
    config.model.num_heads = model["num_heads"]
    config.model.head_dim = config.model.value_dim = (
        model["d_model"] // model["num_heads"]
    )
    config.model.dropout_rate = model["dropout"]
    config.model.norm = "pre"
    if size == "10k":
        config.model.unroll = max(model["layers"])  # a quarter faster on CPU
    else:
        config.model.dtype = "bfloat16"

    config.optimizer.schedule = "cosine" if size == "10k" else "inverse_sqrt"
    config.optimizer.learning_rate = training["rate"]
    config.optimizer.warmup_steps = share(config, training["warmup"])

    config.training.steps = training["steps"]
    config.training.evaluate_every = share(config, training["evaluations"])
    config.checkpoint.every = share(config, training["evaluations"])
    config.checkpoint.keep_latest = 5
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "bleu"
    config.evaluation.checkpoint = "best" if size == "10k" else "average"
    config.evaluation.average_last = 5

    config.decoding.beam_size = 5
    config.decoding.length_penalty = 1.0
    config.decoding.length_penalty_form = "power"
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10
    if start:
        _start_from(config, start)
    return config


def _start_from(config: ConfigDict, start: Mapping[str, Any]) -> None:
    """Set what a run needs that starts from a folder, given its keys."""
    architecture = start["model.architecture"]
    if architecture != "transformer":
        raise ConfigError(
            f"from={start['init_from']} holds a {architecture}: name the folder of an "
            "encoder–decoder, e.g. BART, mBART, Marian or T5"
        )
    config.update_from_flattened_dict(start)
    config.model.unroll = 1
    config.data.meant_for = ()
    config.data.max_length = min(config.data.max_length, config.model.max_length)
    config.optimizer.learning_rate = 3e-5
