"""From a photograph to a sentence that describes it.

Paper: Xu et al. 2015, "Show, Attend and Tell": an LSTM with additive attention to the
grid of a convolutional network, with the gate β and, by
training.attention_regularization, doubly stochastic attention. `attention=transformer`
selects the decoder of Vaswani et al. 2017 instead.
Data: a table captions.tsv with five captions for each image, and grids of features
{split}.image.npy; docs/data.md shows the layout.
Command: python scripts/train.py --config=configs/captions.py --workdir=runs/captions \
    --config.data.directory=DIR
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
    config.input.grid_shape = (7, 7, 96)

    config.data.source_language = "image"
    config.data.target_language = "caption"
    config.data.table = "captions.tsv"
    config.data.references = 5
    config.data.joint_tokenizer = False
    config.data.tokenizer = "words"
    config.data.lowercase = True
    config.data.min_count = 5
    config.data.max_length = 40
    config.data.batch_tokens = 3136  # 64 grids
    config.data.max_buckets = 1

    model = config.model
    model.target_vocab_size = 4096
    model.max_length = 40
    if is_transformer:
        model.d_model, model.d_ff = 256, 512
        model.num_encoder_layers, model.num_decoder_layers = 1, 3
        model.num_heads, model.head_dim, model.value_dim = 4, 64, 64
        model.unroll = 3
        model.norm = "pre"
        model.tie_embeddings = "decoder"
        model.dropout_rate = 0.3
    else:
        model.encoder = "none"
        model.attention = "additive"
        model.context_gate = True
        model.cell = "lstm"
        model.embedding_dim = 256
        model.encoder_dim = model.d_model = model.attention_dim = 512
        model.dropout_rate = 0.5

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)

    config.training.steps = 5000
    config.training.evaluate_every = share(config, 10)
    config.training.label_smoothing = 0.0

    config.checkpoint.every = share(config, 10)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "bleu_4"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 5
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 30
    return config
