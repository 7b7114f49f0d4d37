"""From an image of handwritten digits to the digits in reading order, e.g. "3 7 1 4".

This is the smallest task whose source is an image. The model reads cells of 4×4 pixels,
so a digit has four of them, and attends to them while it writes.

Paper: the recurrent decoder with additive attention of Bahdanau et al. 2015, on the
cells of an image as in Xu et al. 2015; `attention=transformer` selects the Transformer
of Vaswani et al. 2017 instead.
Data: python -m transformer_jax.data.corpora.digits --directory=runs/data/digits
Command: python scripts/train.py --config=configs/digits.py --workdir=runs/digits
Cost: the recurrent model takes four minutes on two CPU cores.
Expected: 89.5 % of unseen images exactly right with the recurrent model, and 93.2 %
with the Transformer. See docs/results/images_and_sounds.md.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    words = {"attention": ("additive", "transformer")}
    is_transformer = parse_arg(arg, words)["attention"] == "transformer"
    config = defaults(
        "sequence_to_sequence", "transformer" if is_transformer else "recurrent"
    )

    config.input.modality = "grid"
    config.input.grid_shape = (16, 24, 1)
    config.input.cell_size = 4

    config.data.directory = "runs/data/digits"
    config.data.source_language = "image"
    config.data.target_language = "digits"
    config.data.joint_tokenizer = False
    config.data.tokenizer = "words"
    config.data.max_length = 8
    config.data.batch_tokens = 1536  # 64 images
    config.data.max_buckets = 1

    model = config.model
    model.target_vocab_size = 16
    model.max_length = 8
    model.d_model = 128
    if is_transformer:
        model.num_encoder_layers = model.num_decoder_layers = model.unroll = 2
        model.d_ff, model.num_heads, model.head_dim, model.value_dim = 256, 4, 32, 32
        model.norm = "pre"
        model.tie_embeddings = "decoder"
    else:
        model.attention, model.bidirectional = "additive", True
        model.embedding_dim, model.encoder_dim, model.attention_dim = 64, 128, 128
    model.dropout_rate = 0.1

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = share(config, 20)

    config.training.steps = 2000
    config.training.evaluate_every = share(config, 4)
    config.training.label_smoothing = 0.0

    config.checkpoint.every = share(config, 4)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "exact_match"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 8
    return config
