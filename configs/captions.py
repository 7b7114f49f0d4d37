r"""From a photograph to a sentence that describes it.

Paper: Xu et al. 2015, "Show, Attend and Tell", with soft attention: an LSTM attends to
the grid of a convolutional network. `attention=transformer` selects the Transformer of
Vaswani et al. 2017 on the same grid. `image=features` reads the grids of a network that
was trained elsewhere; `image=photographs` trains a small residual network (He et al.
2016) with the decoder. `blind` replaces every image by zeros, which shows how much of a
score comes from the language alone.
Data: Flickr8k (Hodosh et al. 2013), a table captions.tsv with five captions for each
image, and {split}.image.npy with grids of 7×7×96 or {split}.zip with photographs;
docs/several_targets.md shows the layout.
Command: python scripts/train.py --config=configs/captions.py --workdir=runs/captions \
    --config.data.directory=DIR
Score: python scripts/evaluate.py --workdir=runs/captions
Cost: with features, 4,000 steps took 37 minutes on a core that other programs used as
well; with attention=transformer, the 2,400 steps to the best checkpoint took 22; with
image=photographs, 3,000 steps took 95.
Expected: BLEU-4 of 23.1 with features on the test images, 22.3 with
attention=transformer (mean of three seeds), 11.5 with image=photographs and 7.2 with
blind and greedy search (docs/results/captions.md). As far as we know, Xu et al. report
19.5 with other features.
Differs: The grid is 7×7 instead of 14×14, a learned linear map reads it, and it has
learned positions for Transformers. The output is a maxout layer (Goodfellow et al.
2013) instead of a sum of three linear maps. There is label smoothing, and no doubly
stochastic regularization, which --config.training.attention_regularization=1.0 adds.
Training takes every caption once in an epoch.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    words = {
        "attention": ("additive", "transformer"),
        "image": ("features", "photographs"),
    }
    choice = parse_arg(arg, words, flags=("blind",))
    is_transformer = choice["attention"] == "transformer"
    reads_photographs = choice["image"] == "photographs"
    config = defaults(
        "sequence_to_sequence", "transformer" if is_transformer else "recurrent"
    )

    config.input.blind = choice["blind"]
    if reads_photographs:
        config.input.modality = "image"
        config.input.image_size = (96, 96)
        config.input.channels = (32, 64, 128, 256)  # 6×6 vectors
        config.input.shift = 8
        config.input.flip = True
    else:
        config.input.modality = "grid"
        config.input.grid_shape = (7, 7, 96)
    if not is_transformer:
        config.input.grid_positions = "none"

    config.data.source_language = "image"
    config.data.target_language = "caption"
    config.data.table = "captions.tsv"
    config.data.references = 5
    config.data.joint_tokenizer = False
    config.data.tokenizer = "words"
    config.data.lowercase = True
    config.data.min_count = 5
    config.data.max_length = 24  # longer captions are left out of training
    # 64 captions, or of photographs more where captions are short
    config.data.batch_tokens = 64 * (24 if reads_photographs else 49)
    config.data.max_buckets = 3

    model = config.model
    model.target_vocab_size = 2560
    model.max_length = 40
    if is_transformer:
        model.num_encoder_layers, model.num_decoder_layers = 1, 2
        model.unroll = 2
        model.d_model, model.d_ff = 256, 1024
        model.num_heads, model.head_dim, model.value_dim = 4, 64, 64
        model.norm = "pre"
        model.tie_embeddings = "decoder"
        model.dropout_rate = 0.3
    else:
        model.encoder = "none"
        model.cell = "lstm"
        model.attention = "additive"
        model.context_gate = True
        model.embedding_dim = 256
        model.encoder_dim = 256
        model.d_model = 512
        model.attention_dim = 256
        model.readout, model.readout_dim = "maxout", 256
        model.dropout_rate = 0.5

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)

    config.training.steps = 3000 if reads_photographs else 4000
    config.training.evaluate_every = share(config, 10)
    config.training.label_smoothing = 0.1

    config.checkpoint.every = share(config, 10)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "bleu_4"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 5
    config.decoding.length_penalty = 1.0
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 30
    return config
