"""Translate written dates in many formats and languages to ISO 8601.

This is the smallest complete translation task.

Paper: the Transformer of Vaswani et al. 2017 with two layers and d_model 128, over
characters. `attention=additive` selects a recurrent encoder–decoder of the same width
instead (Bahdanau et al. 2015). For the other attentions see models/recurrent.py.
Command: python scripts/train.py --config=configs/dates.py --workdir=runs/dates
Cost: a few minutes on two CPU cores; see the README. The data is generated into
runs/data, without a download.
Expected: at least 99 % of unseen dates exactly right.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share
from transformer_jax.models.alignment import ALIGNMENTS


def get_config(arg: str | None = None) -> ConfigDict:
    attention = parse_arg(arg, {"attention": ("transformer", "none", *ALIGNMENTS)})[
        "attention"
    ]
    config = defaults(
        "sequence_to_sequence",
        "transformer" if attention == "transformer" else "recurrent",
    )

    config.data.source = "tfds"
    config.data.name = "dates"
    config.data.directory = "runs/data"
    config.data.validation_split = "validation"
    config.data.test_split = "test"
    config.data.source_language = "written"
    config.data.target_language = "iso"
    config.data.tokenizer = "characters"
    config.data.max_length = 48
    config.data.batch_tokens = 2048
    config.data.max_buckets = 3

    model = config.model
    model.source_vocab_size = model.target_vocab_size = 128
    model.d_model, model.num_heads = 128, 4
    model.max_length = 64
    model.dropout_rate = 0.0
    if attention == "transformer":
        model.num_encoder_layers = model.num_decoder_layers = model.unroll = 2
        model.d_ff, model.head_dim, model.value_dim = 256, 32, 32
        model.norm = "pre"
    else:
        model.attention, model.bidirectional = attention, True
        model.summary = "every_step" if attention == "none" else "initial"
        model.embedding_dim, model.encoder_dim, model.attention_dim = 64, 128, 128

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = share(config, 13)

    config.training.steps = 1300
    config.training.log_every = 100
    config.training.evaluate_every = share(config, 2)

    config.checkpoint.every = share(config, 2)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "exact_match"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 16
    return config
