"""Convolutions instead of recurrence, on Multi30k, German to English.

Paper: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning".
Arguments: `small` halves the widths, has half as many layers and trains for five
epochs.
Sizes, kernel widths, dropout, the clipping norm and the ten epochs are those of
Trevett's tutorial 5 (bentrevett/pytorch-seq2seq). The data and the rest of the training
are those of configs/rnn.py, so that the scores can be compared with those of its
recurrent models and its Transformer.
Differs: the tutorial has a constant learning rate, text tokenized by spaCy, batches of
128 sentences and PyTorch's initialization. In its model, the attentions of all layers
share their linear maps and see padding, every sum of two vectors is multiplied by √0.5,
and there is neither weight normalization nor the factor m √(1/m) of a context. The
paper trains with Nesterov's accelerated gradient.
Command: python scripts/train.py --config=configs/convs2s.py \
    --workdir=runs/convs2s --config.data.directory=DIR
Data: see configs/multi30k.py.
Cost: two hours on one core of an EPYC in bfloat16, three and a half in float32. The
model has 39,845,600 parameters, the small one 7,004,128.
Expected: greedy BLEU on test2016 39.3 and a perplexity of 5.00; the tutorial reports
34.1 and 6.26. With beam 5, 40.2.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    small = parse_arg(arg, {}, flags=("small",))["small"]
    config = defaults("sequence_to_sequence", "convs2s")
    model = config.model
    model.source_vocab_size = 8000
    model.target_vocab_size = 6000
    model.embedding_dim = 128 if small else 256
    model.d_model = 256 if small else 512
    model.num_encoder_layers = 5 if small else 10
    model.num_decoder_layers = 5 if small else 10
    model.encoder_kernel_width = 3
    model.decoder_kernel_width = 3
    model.dropout_rate = 0.25
    model.max_length = 100

    config.data.source_language = "de"
    config.data.target_language = "en"
    config.data.test_split = "test_2016_flickr"
    config.data.tokenizer = "words"
    config.data.min_count = 2
    config.data.joint_tokenizer = False
    config.data.lowercase = True
    config.data.max_length = 100
    config.data.batch_tokens = 2048

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-8
    config.optimizer.clip_norm = 0.1

    config.training.steps = 1100 if small else 2200  # five or ten epochs
    config.optimizer.warmup_steps = share(config, config.training.steps // 100)
    config.training.evaluate_every = share(config, 5 if small else 10)
    config.training.label_smoothing = 0.0

    config.checkpoint.every = share(config, 5 if small else 10)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "loss"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10
    return config
