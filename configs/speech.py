"""x"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(
        arg,
        {"model": ("joint", "attention", "ctc", "las"), "data": ("strings", "words")},
    )
    is_recurrent = choice["model"] == "las"
    config = defaults("transcription", "recurrent" if is_recurrent else "transformer")
    weight = {"joint": 0.3, "ctc": 1.0}.get(choice["model"], 0.0)
    config.training.ctc_weight = config.decoding.ctc_weight = weight

    config.input.modality = "frames"
    config.input.max_positions = 192

    config.data.directory = "runs/data/strings"
    config.data.source_language = "file"
    config.data.target_language = "text"
    config.data.joint_tokenizer = False
    config.data.tokenizer = "words"
    config.data.max_length = 8
    config.data.batch_tokens = 2048
    config.data.max_buckets = 3

    model = config.model
    model.target_vocab_size = 16
    model.max_length = 8
    model.d_model = 128
    model.dropout_rate = 0.1
    if is_recurrent:
        model.attention, model.bidirectional = "additive", True
        model.embedding_dim, model.encoder_dim, model.attention_dim = 64, 128, 128
    else:
        model.num_encoder_layers, model.num_decoder_layers = 4, 1
        model.unroll = 4
        model.d_ff = 256
        model.num_heads, model.head_dim, model.value_dim = 4, 32, 32
        model.norm = "pre"
        model.tie_embeddings = "decoder"

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)

    config.training.steps = 2000
    config.training.evaluate_every = share(config, 4)

    config.checkpoint.every = share(config, 4)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "word_error_rate"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 4
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 8
    return config
