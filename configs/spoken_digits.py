r"""From a spoken digit to its word, e.g. "seven".

This is the smallest task whose source is sound: log-mel features of 8 kHz recordings,
an encoder over positions of 40 ms, and a decoder that writes one word.

Paper: the Transformer of Vaswani et al. 2017 on frames, as in Dong et al. 2018.
Data: the Free Spoken Digit Dataset, as WAV files and tables `{split}.tsv` with the
columns file and text; docs/images.md shows their layout.
Command: python scripts/train.py --config=configs/spoken_digits.py \
    --workdir=runs/spoken --config.data.directory=DIR
Cost: less than an hour on two busy CPU cores.
Expected: all 300 words of the test set right; its speakers are those of the training
set. See docs/results/images_and_sounds.md.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg, {})
    config = defaults("sequence_to_sequence")

    config.input.modality = "frames"
    config.input.max_positions = 64  # 2.5 s

    config.data.source_language = "file"
    config.data.target_language = "text"
    config.data.joint_tokenizer = False
    config.data.tokenizer = "words"
    config.data.max_length = 8
    config.data.batch_tokens = 1024
    config.data.max_buckets = 2

    model = config.model
    model.target_vocab_size = 16
    model.max_length = 8
    model.num_encoder_layers, model.num_decoder_layers = 4, 1
    model.unroll = 4
    model.d_model, model.d_ff = 128, 256
    model.num_heads, model.head_dim, model.value_dim = 4, 32, 32
    model.norm = "pre"
    model.tie_embeddings = "decoder"
    model.dropout_rate = 0.2

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)

    config.training.steps = 2000
    config.training.evaluate_every = share(config, 4)

    config.checkpoint.every = share(config, 4)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "exact_match"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 4
    return config
