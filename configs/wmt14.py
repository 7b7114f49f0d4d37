"""WMT 2014 English–German and English–French: every row of the paper's Table 3.

The rows include the base and big models.

Paper: Vaswani et al. 2017. Table 2, newstest2014: en-de 27.3 BLEU (base) and 28.4
(big), en-fr 38.1 and 41.8. Table 3 reports BLEU on newstest2013 (en-de), without
checkpoint averaging; its rows other than base and big therefore turn averaging off:

    base                                        25.8
    big                                         26.4
    (A) heads-1, heads-4, heads-16, heads-32    24.9, 25.5, 25.8, 25.4: number of
                                                heads, total width unchanged
    (B) d_k-16, d_k-32                          25.1, 25.4
    (C) layers-2, layers-4, layers-8            23.7, 25.3, 25.5
        d_model-256, d_model-1024               24.5, 26.0: with d_k = d_v = 32 and 128
        d_ff-1024, d_ff-4096                    25.4, 26.2
    (D) dropout-0, dropout-0.2                  24.6, 25.5
        smoothing-0, smoothing-0.2              25.3, 25.7
    (E) learned                                 25.7: learned positions

Command: python scripts/train.py --config=configs/wmt14.py:base --workdir=runs/wmt14 \
    --config.data.directory=DIR
Arguments: a row of the table (default: base); a pair, en-de (default), de-en, en-fr or
fr-en, e.g. :big,en-fr; norm=post|pre.
Score: python scripts/evaluate.py --workdir=runs/wmt14. For the scores of Table 3 add
--split=validation, and for base and big also --config.evaluation.checkpoint=latest.
Cost: base, 100,000 steps of about 25,000 source and 25,000 target tokens (12 hours on 8
P100 in the paper); big, 300,000 steps (3.5 days in the paper).
Expected: the paper's scores. None of these rows has been trained with this code yet.
Data: tfds `wmt14_translate`, 4.5 million pairs (de-en) and 36 million (fr-en) by the
paper's count:
    python scripts/prepare.py --name=wmt14_translate/de-en --directory=DIR
This downloads the following files, or reads them from --manual_dir:
training-parallel-europarl-v7.tgz, training-parallel-commoncrawl.tgz,
training-parallel-nc-v9.tgz and dev.tgz (1.7 GB together); for fr-en also
training-parallel-un.tgz and training-giga-fren.tar (5 GB more). The validation split is
newstest2013, the test split newstest2014. tfds leaves SGML entities (&amp;) in the test
split, so score publishable results against sacreBLEU's references.
Differs: BPE over bytes, where the paper has BPE (en-de, 37,000) and word pieces (en-fr,
32,000); the attention projections have biases (model.attention_bias); the vocabulary is
learned from 250,000 pairs (from all pairs with data.tokenizer_lines = 0); the output
may have up to padded input length + 50 tokens, where inputs are padded to 8, 12, 16,
24, 32, 48 … tokens.
"""

from typing import Any

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg

# The model keys that each row changes; `label_smoothing` belongs to training.
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout_rate": 0.3},
    **{
        f"heads-{n}": {"num_heads": n, "head_dim": 512 // n, "value_dim": 512 // n}
        for n in (1, 4, 16, 32)
    },
    **{f"d_k-{width}": {"head_dim": width} for width in (16, 32)},
    **{
        f"layers-{n}": {"num_encoder_layers": n, "num_decoder_layers": n}
        for n in (2, 4, 8)
    },
    "d_model-256": {"d_model": 256, "head_dim": 32, "value_dim": 32},
    "d_model-1024": {"d_model": 1024, "head_dim": 128, "value_dim": 128},
    **{f"d_ff-{width}": {"d_ff": width} for width in (1024, 4096)},
    "dropout-0": {"dropout_rate": 0.0},
    "dropout-0.2": {"dropout_rate": 0.2},
    "smoothing-0": {"label_smoothing": 0.0},
    "smoothing-0.2": {"label_smoothing": 0.2},
    "learned": {"positions": "learned"},
}
PAIRS = ("en-de", "de-en", "en-fr", "fr-en")


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(
        arg, {"row": tuple(ROWS), "pair": PAIRS, "norm": ("post", "pre")}
    )
    row, french = choice["row"], "fr" in choice["pair"]
    config = defaults("sequence_to_sequence")

    config.data.source = "tfds"
    config.data.name = f"wmt14_translate/{'fr' if french else 'de'}-en"
    config.data.directory = "~/tensorflow_datasets"
    config.data.source_language, config.data.target_language = choice["pair"].split("-")
    config.data.validation_split = "validation"
    config.data.test_split = "test"
    config.data.max_length = 256
    # the paper names no filter; this is the usual one, of Moses' clean-corpus-n.perl
    config.data.max_ratio = 9.0
    # padded positions of the longer side, about 25,000 tokens of each side
    config.data.batch_tokens = 33_000
    config.data.rows_multiple = 32

    config.model.norm = choice["norm"]
    config.model.source_vocab_size = config.model.target_vocab_size = (
        32_000 if french else 37_000
    )
    config.model.vocab_multiple = 128
    config.model.dtype = "bfloat16"
    for key, value in ROWS[row].items():
        (config.training if key == "label_smoothing" else config.model)[key] = value
    if row == "big" and french:
        config.model.dropout_rate = 0.1  # Section 6.1
    # No loop over layers: on TPUs, steps are faster and need less memory
    # (docs/results/accelerators.md).
    config.model.unroll = max(
        config.model.num_encoder_layers, config.model.num_decoder_layers
    )

    config.training.steps = 300_000 if row == "big" else 100_000

    config.checkpoint.every = 1000
    config.checkpoint.keep_latest = 20
    config.checkpoint.best_metric = "bleu"

    # Section 6.1: mean of the last 5 (base) or 20 (big) checkpoints, beam 4, α = 0.6,
    # output up to input length + 50.
    config.evaluation.checkpoint = "average" if row in ("base", "big") else "latest"
    config.evaluation.average_last = 20 if row == "big" else 5
    config.decoding.beam_size = 4
    config.decoding.length_penalty = 0.6
    config.decoding.length_penalty_form = "wu"
    config.decoding.max_ratio = 1.0
    config.decoding.max_extra = 50
    return config
