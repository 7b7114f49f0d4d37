r"""From a recording to its words, e.g. "three one four".

Four models read log-mel spectrograms: a Transformer with an attention decoder
(`attention`), its encoder with connectionist temporal classification alone (`ctc`),
both with one encoder (`joint`), and a recurrent encoder that halves its positions, with
additive attention (`las`).

Paper: `attention` is Dong et al. 2018 (Speech-Transformer); CTC is Graves et al. 2006,
and both together Kim et al. 2017 and Watanabe et al. 2017; `las` is Chan et al. 2016
(Listen, Attend and Spell). Spectrograms are masked as in Park et al. 2019.
Data: spoken strings of digits from recordings of the Free Spoken Digit Dataset:
    python -m transformer_jax.data.corpora.spoken_digits --recordings=DIR \
        --directory=runs/data/strings
    `--held_out=theo` makes a split whose test set has another speaker. `data=words`
    reads the recordings themselves, with --config.data.directory=DIR.
Command: python scripts/train.py --config=configs/speech.py:model=joint \
    --workdir=runs/speech
Cost: on a core of a CPU, 8 to 12 minutes for model=joint, 13 for ctc and las.
Expected: word error rates on unseen strings by known speakers: 1.1 % for model=las,
1.9 % for model=joint, 3.7 % for model=ctc, and 75.3 % for model=attention, which needs
more steps. With data=words, 99.7 % of the official test split are right
(docs/results/speech.md, also for speakers who are not in the training set).
Differs: The models are small, and predict words instead of characters. Dong et al. have
their attention over time and frequency between the convolutions and the encoder, and
Chan et al. three pyramidal layers on one recurrent layer, where `las` has two.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(
        arg,
        {"model": ("joint", "attention", "ctc", "las"), "data": ("strings", "words")},
    )
    is_recurrent = choice["model"] == "las"
    config = defaults("transcription", "recurrent" if is_recurrent else "transformer")
    # how much of training and of the choice of words is CTC
    share_of_ctc = {"joint": 0.3, "ctc": 1.0}.get(choice["model"], 0.0)
    config.training.ctc_weight = share_of_ctc
    config.decoding.ctc_weight = share_of_ctc
    if choice["model"] == "ctc":
        config.training.label_smoothing = 0.0  # it is of the attention decoder

    config.input.modality = "frames"
    config.input.frequency_masks, config.input.frequency_width = 2, 8
    config.input.time_masks = 2
    windows = 2 if is_recurrent else 1  # of 10 ms, in a position
    config.input.stacked_windows = windows
    config.input.time_width = 30 // windows

    config.data.source_language = "file"
    config.data.target_language = "text"
    config.data.joint_tokenizer = False
    config.data.tokenizer = "words"
    config.data.max_length = 8
    config.data.max_buckets = 3
    if choice["data"] == "strings":
        config.data.directory = "runs/data/strings"
        config.input.max_positions = 800 // windows
    else:
        config.input.max_positions = 256 // windows
    config.data.batch_tokens = 8192 // windows

    model = config.model
    model.target_vocab_size = 16
    model.max_length = 8
    model.d_model = 128
    model.dropout_rate = 0.1
    if is_recurrent:
        model.cell, model.attention, model.bidirectional = "lstm", "additive", True
        model.pyramid_layers = 2
        model.embedding_dim, model.encoder_dim, model.attention_dim = 64, 256, 128
    else:
        config.input.convolution_channels = 32
        model.num_encoder_layers, model.num_decoder_layers = 4, 1
        model.unroll = 4
        model.d_ff, model.num_heads, model.head_dim, model.value_dim = 256, 4, 32, 32
        model.norm = "pre"
        model.tie_embeddings = "decoder"

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)

    config.training.steps = 3000
    config.training.evaluate_every = share(config, 6)

    config.checkpoint.every = share(config, 6)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "word_error_rate"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 4
    config.decoding.length_penalty = 0.0
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 8
    return config
