"""Written dates in many formats and languages → ISO 8601, the smallest complete translation task.

Paper: the Transformer of Vaswani et al. 2017, two layers, 128 wide, over characters.
Command: python scripts/train.py --config=configs/dates.py --workdir=runs/dates
Cost: a few minutes on two CPU cores; see the README. The data is generated into runs/data, nothing is downloaded.
Expected: at least 99 % of unseen dates exactly right.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg, {})
    config = defaults("translation")

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
    config.data.max_shapes = 3

    config.model.source_vocab_size = 128
    config.model.target_vocab_size = 128
    config.model.num_encoder_layers = 2
    config.model.num_decoder_layers = 2
    config.model.unroll = 2
    config.model.d_model = 128
    config.model.d_ff = 256
    config.model.num_heads = 4
    config.model.head_dim = 32
    config.model.value_dim = 32
    config.model.norm = "pre"
    config.model.max_length = 64
    config.model.dropout_rate = 0.0

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.decay_steps = 1300

    config.training.steps = 1300
    config.training.log_every = 100
    config.training.evaluate_every = 650

    config.checkpoint.every = 650
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "exact_match"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 16
    return config
