"""TED talks, Portuguese to English: the model of TensorFlow's Transformer tutorial.

The model has the tutorial's size.

Paper: the Transformer of Vaswani et al. 2017 as built in "Neural machine translation
with a Transformer and Keras" (tensorflow/text, docs/tutorials/transformer.ipynb): 4+4
layers, d_model 128, d_ff 512, 8 heads that are each d_model wide (Keras'
key_dim=d_model), post-LN, three separate embedding tables, an output bias, no label
smoothing, the paper's schedule with 4000 warm-up steps, Adam (0.9, 0.98, 1e-9), batches
of 64 sentences, 20 epochs, greedy decoding. With the tutorial's vocabulary sizes, 7,765
and 7,010, the model has the tutorial's 10,184,162 parameters. The talks: Qi et al.
2018, "When and Why are Pre-trained Word Embeddings Useful for Neural Machine
Translation?".
Command: python scripts/train.py --config=configs/ted_hrlr.py --workdir=runs/ted \
    --config.data.directory=DIR
Data: tfds `ted_hrlr_translate/pt_to_en`, 51,785 pairs, lower-cased and tokenized (one
archive of 131 MB):
    python scripts/prepare.py --name=ted_hrlr_translate/pt_to_en --directory=DIR
Cost: 16,200 steps, which is 20 epochs at 64 sentences per batch. Not measured; the
tutorial mentions an hour in Colab.
Expected: not measured, and the tutorial prints no BLEU.
Differs: batches of 2,048 positions, an estimated 64 sentences; pairs longer than 128
tokens are left out, where the tutorial truncates them; BPE with 8,000 tokens instead of
word pieces with at most 8,000; interleaved sines and cosines, where the tutorial has
all sines before all cosines; dropout also on the output of attention, not only on its
weights; embeddings are initialized from a normal distribution.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg, {})
    config = defaults("sequence_to_sequence")

    config.data.source = "tfds"
    config.data.name = "ted_hrlr_translate/pt_to_en"
    config.data.directory = "~/tensorflow_datasets"
    config.data.source_language, config.data.target_language = "pt", "en"
    config.data.validation_split = "validation"
    config.data.test_split = "test"
    config.data.tokenizer = "bpe_metaspace"
    config.data.joint_tokenizer = False
    config.data.lowercase = True
    config.data.max_length = 128
    config.data.batch_tokens = 2048

    config.model.source_vocab_size = 8000
    config.model.target_vocab_size = 8000
    config.model.num_encoder_layers = 4
    config.model.num_decoder_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 512
    config.model.num_heads = 8
    config.model.head_dim = 128
    config.model.value_dim = 128
    config.model.tie_embeddings = "none"
    config.model.output_bias = True
    config.model.attention_dropout_rate = 0.1
    config.model.norm_epsilon = 1e-3
    config.model.max_length = 256

    config.training.steps = 16_200
    config.training.evaluate_every = 810
    config.training.label_smoothing = 0.0

    config.checkpoint.every = 810
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "bleu_tokenized"

    config.decoding.beam_size = 1
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10
    return config
