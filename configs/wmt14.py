"""WMT 2014 English–German, the paper's own task and models.

Paper: Vaswani et al. 2017, Table 3, rows `base` and `big`; 27.3 and 28.4 BLEU on newstest2014 (Table 2).
Command: python scripts/train.py --config=configs/wmt14.py:base --workdir=gs://BUCKET/wmt14 --config.data.directory=DIR
Cost: 100,000 steps of about 25,000 source and 25,000 target tokens (base; 12 hours on 8 P100 in the paper),
300,000 steps (big; 3.5 days).
Data: tfds `wmt14_translate/de-en`, prepared as array_record in DIR.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, {"size": ("base", "big"), "norm": ("post", "pre")})
    config = defaults("translation")

    config.data.source = "tfds"
    config.data.name = "wmt14_translate/de-en"
    config.data.directory = "~/tensorflow_datasets"
    config.data.validation_split = "validation"
    config.data.test_split = "test"
    config.data.max_length = 256
    config.data.max_ratio = 9.0  # the paper names no filter; this is the usual one of Moses' clean-corpus-n.perl
    config.data.batch_tokens = 25_000
    config.data.rows_multiple = 32

    config.model.norm = choice["norm"]
    config.model.vocab_multiple = 128
    config.model.dtype = "bfloat16"
    config.training.steps = config.optimizer.decay_steps = 100_000
    if choice["size"] == "big":
        config.model.d_model = 1024
        config.model.d_ff = 4096
        config.model.num_heads = 16
        config.model.dropout_rate = 0.3
        config.training.steps = config.optimizer.decay_steps = 300_000

    config.checkpoint.every = 1000
    config.checkpoint.keep_latest = 20
    config.checkpoint.best_metric = "bleu"

    # Section 6.1: the last 5 (base) or 20 (big) checkpoints averaged, beam 4, α = 0.6, output up to input + 50.
    config.evaluation.checkpoint = "average"
    config.evaluation.average_last = 20 if choice["size"] == "big" else 5
    config.decoding.beam_size = 4
    config.decoding.length_penalty = 0.6
    config.decoding.length_penalty_form = "wu"
    config.decoding.max_ratio = 1.0
    config.decoding.max_extra = 50
    return config
