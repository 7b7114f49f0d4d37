"""The road to attention on Multi30k, German to English: one key moves from no attention at all to the Transformer.

Paper: Sutskever et al. 2014, Cho et al. 2014 (attention=none with cell=lstm, gru), Bahdanau et al. 2015 (additive),
Luong et al. 2015 (concat, dot, general), Vaswani et al. 2017 (scaled_dot, multi_head on Luong's decoder; transformer).
`attention=additive|none|concat|dot|general|scaled_dot|multi_head|transformer`, `cell=gru|lstm`; `reversed`: the source
is read from its end (for attention=none, where it matters); `small`: half as wide, five epochs, and recurrent models
with dropout 0.3 in place of 0.5 and nothing but the reference's words read by the decoder in training.
What moves with it: additive and the later ones read the source both ways, with 512 units each (dot, which compares
states as they are, with 256 each); none reads it one way, as LSTM in two layers.
Sizes, dropout, teacher forcing, the Transformer's positions and first embeddings, and ten epochs are those of Trevett's
tutorials (bentrevett/pytorch-seq2seq), whose LSTM is `none,lstm,reversed`. Differs: theirs have a constant learning
rate, text tokenized by spaCy, batches of 128 sentences, and no label smoothing in the Transformer.
Command: python scripts/train.py --config=configs/rnn.py:attention=dot --workdir=runs/dot --config.data.directory=DIR
Data: as configs/multi30k.py says.
Cost: in float32 on one core of a Xeon, additive (20,509,552 parameters) trains at 600–700 target tokens a second, at
0.7 of the rate of matrix products alone; ten epochs took 1:50 hours. none: 1:10; transformer: 0:43. On one core of an
EPYC: none,lstm,reversed 0:40, transformer 0:22.
Expected: greedy BLEU on test2016, the tutorials' beside it: none,lstm,reversed 14.5 (13.8), none 23.7 (20.6), additive
35.1 (28.3), transformer 37.1 (36.5).
"""

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share

WORDS = {
    "attention": ("additive", "none", "concat", "dot", "general", "scaled_dot", "multi_head", "transformer"),
    "cell": ("gru", "lstm"),
}


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, WORDS, flags=("small", "reversed"))
    if choice["reversed"] and choice["attention"] != "none":
        raise ConfigError("config argument 'reversed' goes with attention=none alone: leave it out, or add that")
    if choice["cell"] == "lstm" and choice["attention"] == "transformer":
        raise ConfigError("config argument 'lstm' goes with recurrent models: leave it out, or choose an attention")
    config = defaults("sequence_to_sequence", "transformer" if choice["attention"] == "transformer" else "recurrent")
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
    config.optimizer.warmup_steps = 400 if choice["attention"] == "transformer" else 100
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-8
    config.optimizer.clip_norm = 1.0

    config.training.steps = 1100 if choice["small"] else 2200  # five epochs or ten
    config.training.evaluate_every = share(config, 5 if choice["small"] else 10)
    config.checkpoint.every = share(config, 5 if choice["small"] else 10)
    config.training.label_smoothing = 0.1 if choice["attention"] == "transformer" else 0.0

    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "loss"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10
    return config


def recurrent(model: ConfigDict, attention: str, cell: str, small: bool, reversed: bool) -> None:
    """Without attention the LSTM is Sutskever et al.'s, in two layers, and the GRU Cho et al.'s."""
    half = 2 if small else 1
    model.attention, model.cell = attention, cell
    model.embedding_dim, model.d_model, model.attention_dim = 256 // half, 512 // half, 512 // half
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
    model.num_encoder_layers = model.num_decoder_layers = model.unroll = 3
    model.d_model, model.d_ff, model.num_heads = (128, 256, 4) if small else (256, 512, 8)
    model.head_dim = model.value_dim = 32
    model.norm = "post"
    model.tie_embeddings = "none"
    model.positions = "learned"
    model.embedding_init = "xavier_uniform"
    model.dropout_rate = model.attention_dropout_rate = model.feed_forward_dropout_rate = 0.1
