"""Multi30k image captions (Elliott et al. 2016): en-de (the default), de-en or en-fr.

The captions are tokenized and lower-cased.

Paper: Wu et al. 2021, "Good for Misconceived Reasons". Its text-only Transformer-tiny
(4+4 layers, d_model 128, 2.57 M parameters, joint BPE of about 10k) scores 41.02 BLEU
on en-de test2016.
Sizes: `tiny` (the default), `small` and `base`, which are wider, and `annotated`, the
Annotated Transformer's model (59,510,544 parameters) over words, with its learning-rate
schedule.
Positions: `positions=sinusoidal|learned|relative|rotary`, with every size (Shaw et al.
2018; Su et al. 2021).
Tokenizer: `bpe` (the default), `wordpiece` or `unigram`; `annotated` always uses words.
`quick`: the size `small`, pre-LN, 2,800 steps of 2,048 positions.
Command: python scripts/train.py --config=configs/multi30k.py:en-de \
    --workdir=runs/multi30k --config.data.directory=DIR
Data: DIR holds train, val and test_2016_flickr, with one file per language, e.g.
train.en. The files are those of data/task1/tok in https://github.com/multi30k/dataset,
without .lc.norm.tok in their names:
    for f in *.lc.norm.tok.*; do mv "$f" "${f/.lc.norm.tok/}"; done
Raw captions (cased, not tokenized) can be downloaded and read through tfds instead:
    python scripts/prepare.py --name=multi30k/en-de --directory=DIR
or with --name=multi30k/en-fr or multi30k/de-fr, and for training
    --config.data.source=tfds --config.data.name=multi30k/en-de \
    --config.data.directory=DIR
For raw captions, set --config.data.tokenizer=bpe_bytes, which separates words from
punctuation (`bpe_metaspace` and `wordpiece` learn "street." as one token), and
--config.checkpoint.best_metric=bleu; their sacreBLEU is `bleu`.
Score: python scripts/evaluate.py --workdir=runs/multi30k; papers report
`bleu_tokenized`.
Cost: 8,000 steps (55 million target tokens) take two hours on two CPU cores; `quick`
takes about 22 minutes on one.
Expected: 40.8 to 41.3 BLEU on test_2016_flickr; en-fr 62.2; raw captions 40.2
sacreBLEU; `quick` 38.
"""

import dataclasses

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share
from transformer_jax.models.transformer import annotated

# size: (encoder layers, decoder layers, d_model, d_ff, heads)
SIZES = {
    "tiny": (4, 4, 128, 256, 4),
    "small": (3, 2, 256, 512, 4),
    "base": (6, 6, 512, 2048, 8),
}


def get_config(arg: str | None = None) -> ConfigDict:
    quick = "quick" in (arg or "").split(",")
    words = {
        "pair": ("en-de", "de-en", "en-fr"),
        # The first value of each key is the default.
        "size": (
            ("small", "tiny", "base")
            if quick
            else ("tiny", "small", "base", "annotated")
        ),
        "norm": ("pre", "post") if quick else ("post", "pre"),
        "positions": ("sinusoidal", "learned", "relative", "rotary"),
        "tokenizer": ("bpe", "wordpiece", "unigram"),
    }
    choice = parse_arg(arg, words, flags=("quick",))
    given = {part.rpartition("=")[2] for part in (arg or "").split(",")}
    if choice["size"] == "annotated" and (
        own := given & {*words["norm"], *words["tokenizer"]}
    ):
        raise ConfigError(
            f"config argument {min(own)!r} cannot be combined with 'annotated', "
            "which fixes this choice: omit one"
        )
    config = defaults("sequence_to_sequence")

    config.data.source_language, config.data.target_language = choice["pair"].split("-")
    config.data.test_split = "test_2016_flickr"
    config.data.tokenizer = (
        "bpe_metaspace" if choice["tokenizer"] == "bpe" else choice["tokenizer"]
    )
    config.data.max_length = 128
    config.data.batch_tokens = 8192

    size = "base" if choice["size"] == "annotated" else choice["size"]
    num_encoder_layers, num_decoder_layers, d_model, d_ff, num_heads = SIZES[size]
    config.model.source_vocab_size = 10_000
    config.model.target_vocab_size = 10_000
    config.model.num_encoder_layers = num_encoder_layers
    config.model.num_decoder_layers = num_decoder_layers
    config.model.d_model = d_model
    config.model.d_ff = d_ff
    config.model.num_heads = num_heads
    config.model.head_dim = d_model // num_heads
    config.model.value_dim = d_model // num_heads
    # a quarter faster on CPUs
    config.model.unroll = max(num_encoder_layers, num_decoder_layers)
    config.model.dropout_rate = 0.3
    config.model.norm = choice["norm"]
    config.model.max_length = 256

    config.optimizer.schedule = "inverse_sqrt"
    config.optimizer.learning_rate = 5e-3 if choice["size"] == "tiny" else 1e-3

    config.training.steps = 8000
    config.optimizer.warmup_steps = share(config, 4)
    config.training.evaluate_every = 250

    config.checkpoint.every = 250
    config.checkpoint.keep_latest = 10
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "bleu_tokenized"

    config.evaluation.checkpoint = "average"
    config.evaluation.average_last = 10

    config.decoding.beam_size = 5
    config.decoding.length_penalty = 1.0
    config.decoding.length_penalty_form = "power"
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10

    if choice["size"] == "annotated":
        config.model.update(dataclasses.asdict(annotated(10_000, 10_000)))
        config.data.joint_tokenizer = False
        config.data.tokenizer = "words"
        config.optimizer.schedule = "noam"
        config.optimizer.learning_rate = 1.0
        config.optimizer.warmup_steps = 3000
    config.model.positions = choice["positions"]
    if quick:
        shorten(config)
    return config


def shorten(config: ConfigDict) -> None:
    """Shorten training: small batches, a short warm-up, cosine decay to 0, and less
    regularization.
    """
    config.data.batch_tokens = 2048
    config.model.source_vocab_size = config.model.target_vocab_size = 6000
    config.model.dropout_rate = 0.15
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 2e-3
    config.training.steps = 2800
    config.optimizer.warmup_steps = share(config, 28, of=3)
    config.training.evaluate_every = share(config, 4)
    config.checkpoint.every = share(config, 4)
    config.evaluation.checkpoint = "best"
