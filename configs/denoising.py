r"""Pre-training of a small Transformer for later fine-tuning, on raw text.

Paper: for `objective=span_corruption` Raffel et al. 2020, "Exploring the Limits of
Transfer Learning with a Unified Text-to-Text Transformer" (T5), Section 3.1.4; for
`objective=text_infilling` Lewis et al. 2020, "BART: Denoising Sequence-to-Sequence
Pre-training for Natural Language Generation, Translation, and Comprehension".
Arguments:
`objective=span_corruption` (the default): 15 % of the tokens are missing, in spans of 3
    on average. Each span is a token of its own in the source, and the target is what is
    missing.
`objective=text_infilling`: 30 % of the tokens are missing, in spans of 3 on average.
    Each span is the same token, sentences are in a random order, and the target is the
    whole text.
Data: DIR holds train.txt and val.txt: a sentence per line, a blank line between
documents; scripts/documents.py makes such files.
Command: python scripts/train.py --config=configs/denoising.py \
    --workdir=runs/pretrained --config.data.directory=DIR
Score: python scripts/evaluate.py --workdir=runs/pretrained --split=val
Fine-tuning: the model is that of configs/own_files.py with the size 10k, which reads
pairs of texts, e.g. DIR/train.long and DIR/train.short:
    python scripts/train.py --config=configs/own_files.py:long-short,10k \
    --workdir=runs/tuned --config.data.directory=DIR --config.init_from=runs/pretrained
Cost: not measured yet.
Expected: not measured yet.
Differs: The model is that of Vaswani et al. 2017 with pre-norm, and not that of T5 or
BART. An example does not cross the border of a document. BART's authors make spans
begin at words.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    words = {"objective": ("span_corruption", "text_infilling")}
    choice = parse_arg(arg, words)
    config = defaults("denoising")

    config.data.validation_split = config.data.test_split = "val"
    config.data.tokenizer = "bpe_bytes"
    config.data.max_length = 128
    config.data.batch_tokens = 8192
    config.data.max_buckets = 3

    config.denoising.objective = choice["objective"]
    if choice["objective"] == "text_infilling":
        config.denoising.rate = 0.3
        config.denoising.permute_sentences = True

    model = config.model
    model.source_vocab_size = model.target_vocab_size = 4_000
    model.num_encoder_layers, model.num_decoder_layers = 3, 2
    model.unroll = 3
    model.d_model, model.d_ff = 256, 512
    model.num_heads = 4
    model.head_dim = model.value_dim = 64
    model.norm = "pre"
    model.dropout_rate = 0.1

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)
    config.optimizer.clip_norm = 1.0

    config.training.label_smoothing = 0.0
    config.training.steps = 20_000
    config.training.evaluate_every = share(config, 10)
    config.checkpoint.every = share(config, 10)
    config.checkpoint.keep_latest = 2
    return config
