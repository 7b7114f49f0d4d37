"""From a recurrent model without attention to the Transformer, by one argument.

The task is Multi30k, German to English.

Paper: Sutskever et al. 2014 and Cho et al. 2014 (attention=none with cell=lstm and
gru), Bahdanau et al. 2015 (additive), Luong et al. 2015 (concat, dot, general), Vaswani
et al. 2017 (transformer, and its scaled_dot and multi_head attention on Luong's
decoder).
Arguments:
`attention=additive|none|concat|dot|general|scaled_dot|multi_head|transformer` and
`cell=gru|lstm`, the first being the default. `reversed` reads the source backwards
(only for attention=none). `small` halves the widths and trains for five epochs; its
recurrent models have dropout 0.3 instead of 0.5, and in training their decoder reads
only words of the reference.
Encoders: with attention, bidirectional, with 512 units per direction (256 for dot,
which needs encoder and decoder states of equal width). Without attention, one
direction, with two layers for the LSTM.
Sizes, dropout, teacher forcing, the Transformer's positions and embedding initializer,
and the ten epochs are those of Trevett's tutorials (bentrevett/pytorch-seq2seq); their
LSTM is `none,lstm,reversed`.
Differs: the tutorials have a constant learning rate, text tokenized by spaCy, batches
of 128 sentences, and no label smoothing in the Transformer.
Command: python scripts/train.py --config=configs/rnn.py:attention=dot \
    --workdir=runs/dot --config.data.directory=DIR
Data: see configs/multi30k.py.
Cost: in float32 on one core of a Xeon, additive (20,509,552 parameters) trains at
600–700 target tokens per second, a matmul utilization of 0.7. Its ten epochs took 1 h
50 min; none took 1 h 10 min and transformer 43 min. On one core of an EPYC,
none,lstm,reversed took 40 min and transformer 22 min.
Expected: greedy BLEU on test2016, with the tutorials' scores in parentheses:
none,lstm,reversed 14.5 (13.8), none 23.7 (20.6), additive 35.1 (28.3), transformer 37.1
(36.5).
"""

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share

WORDS = {
    "attention": (
        "additive",
        "none",
        "concat",
        "dot",
        "general",
        "scaled_dot",
        "multi_head",
        "transformer",
    ),
    "cell": ("gru", "lstm"),
}


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, WORDS, flags=("small", "reversed"))
    if choice["reversed"] and choice["attention"] != "none":
        raise ConfigError(
            "config argument 'reversed' requires attention=none: "
            "omit 'reversed', or set attention=none"
        )
    if choice["cell"] == "lstm" and choice["attention"] == "transformer":
        raise ConfigError(
            "config argument 'lstm' requires a recurrent model: "
            "omit 'lstm', or choose another attention"
        )
    config = defaults(
        "sequence_to_sequence",
        "transformer" if choice["attention"] == "transformer" else "recurrent",
    )
    if choice["attention"] == "transformer":
        transformer(config.model, choice["small"])
    else:
        recurrent(config.model, **choice)
    model = config.model
    model.source_vocab_size, model.target_vocab_size = 8000, 6000
    model.max_length = 256

    config.data.source_language, config.data.target_language = "de", "en"
    config.data.test_split = "test_2016_flickr"
    config.data.tokenizer = "words"
    config.data.min_count = 2
    config.data.joint_tokenizer = False
    config.data.lowercase = True
    config.data.max_length = 128
    config.data.batch_tokens = 2048

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-8
    config.optimizer.clip_norm = 1.0

    config.training.steps = 1100 if choice["small"] else 2200  # five or ten epochs
    hundredths = 4 if choice["attention"] == "transformer" else 1
    parts = config.training.steps // 100
    config.optimizer.warmup_steps = share(config, parts, hundredths)  # 400 or 100 steps
    config.training.evaluate_every = share(config, 5 if choice["small"] else 10)
    config.checkpoint.every = share(config, 5 if choice["small"] else 10)
    config.training.label_smoothing = (
        0.1 if choice["attention"] == "transformer" else 0.0
    )

    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "loss"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10
    return config


def recurrent(
    model: ConfigDict, attention: str, cell: str, small: bool, reversed: bool
) -> None:
    """Set the recurrent model.

    Without attention: two LSTM layers (Sutskever et al.) or one GRU layer (Cho et al.).
    """
    half = 2 if small else 1
    model.attention, model.cell = attention, cell
    model.embedding_dim, model.d_model, model.attention_dim = (
        256 // half,
        512 // half,
        512 // half,
    )
    model.encoder_dim = model.d_model
    model.dropout_rate = 0.3 if small else 0.5
    model.teacher_forcing = 1.0 if small else 0.5
    if attention == "none":
        model.num_layers = 2 if cell == "lstm" else 1
        model.summary = "initial" if cell == "lstm" else "every_step"
        model.reverse_source = reversed
    else:
        model.bidirectional = True
        if attention != "dot":
            model.encoder_dim = 2 * model.d_model


def transformer(model: ConfigDict, small: bool) -> None:
    """Set the Transformer model."""
    model.num_encoder_layers = model.num_decoder_layers = model.unroll = 3
    model.d_model, model.d_ff, model.num_heads = (
        (128, 256, 4) if small else (256, 512, 8)
    )
    model.head_dim = model.value_dim = 32
    model.norm = "post"
    model.tie_embeddings = "none"
    model.positions = "learned"
    model.embedding_init = "xavier_uniform"
    model.dropout_rate = model.attention_dropout_rate = (
        model.feed_forward_dropout_rate
    ) = 0.1
