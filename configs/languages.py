r"""One model that translates into several languages, on Multi30k.

A token before the source names the language of the target, e.g. "<2de> A man sleeps."
By default, all directions share every parameter.

Paper: Johnson et al. 2017, "Google's Multilingual Neural Machine Translation System";
for `decoders=each` Dong et al. 2015, "Multi-Task Learning for Multiple Language
Translation".
Arguments:
`directions=many` (the default): from English to German, French and Czech.
`directions=pivot`: between English and German, and English and French, in both
    directions. Then the model also translates from German to French, which it has never
    seen ("zero-shot", Section 4.4 there); on Multi30k this fails.
`directions=en-de|en-fr|en-cs`: one direction, without a token, to compare.
`decoders=each`: a decoder with embeddings of its own for each target language, and one
    encoder for all. The token selects the decoder, and is not read.
`recurrent`: GRUs with additive attention (Bahdanau et al. 2015) instead of the
    Transformer.
Every encoder and decoder has the same size, that of configs/multi30k.py:quick, and
every model the same number of steps.
Data: DIR holds train, val and test_2016_flickr of Multi30k, tokenized, with one file
for each of en, de, fr and cs, e.g. train.cs; see configs/multi30k.py.
Command: python scripts/train.py --config=configs/languages.py:directions=many \
    --workdir=runs/many --config.data.directory=DIR
Score: one direction after another, e.g. with
    python scripts/evaluate.py --workdir=runs/many --split=test_2016_flickr:en-cs
Cost: 25 to 40 minutes on one core of a Xeon with `--config.model.dtype=bfloat16`.
Expected: BLEU on test_2016_flickr into German, French and Czech: 37.7, 60.4 and 31.2 by
    three single models; 31.6, 49.4 and 24.9 with `directions=many` (means of three
    seeds); 23.6, 36.0 and 16.8 with `decoders=each` (docs/results/languages.md).
Differs: The paper has LSTMs of 1,024 units with 8 layers, and 32,000 word pieces.
"""

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share

DIRECTIONS = {
    "many": ("en-de", "en-fr", "en-cs"),
    "pivot": ("en-de", "de-en", "en-fr", "fr-en"),
    "en-de": (),
    "en-fr": (),
    "en-cs": (),
}


def get_config(arg: str | None = None) -> ConfigDict:
    words = {"directions": tuple(DIRECTIONS), "decoders": ("one", "each")}
    choice = parse_arg(arg, words, flags=("recurrent",))
    directions = DIRECTIONS[choice["directions"]]
    has_several_decoders = choice["decoders"] == "each"
    if has_several_decoders and not directions:
        raise ConfigError(
            "config argument 'decoders=each' needs several directions: "
            "choose directions=many or directions=pivot"
        )
    task = "several_decoders" if has_several_decoders else "sequence_to_sequence"
    architecture = "recurrent" if choice["recurrent"] else "transformer"
    config = defaults(task, architecture)

    config.data.directions = directions
    if directions:
        config.data.source_language = "source"
        config.data.target_language = "target"
    else:
        source, target = choice["directions"].split("-")
        config.data.source_language = source
        config.data.target_language = target
    config.data.test_split = "test_2016_flickr"
    config.data.tokenizer = "bpe_metaspace"
    config.data.max_length = 128
    config.data.batch_tokens = 2048
    config.data.max_buckets = 4

    model = config.model
    model.source_vocab_size = 8000
    model.target_vocab_size = 8000
    model.max_length = 256
    if choice["recurrent"]:
        model.attention = "additive"
        model.embedding_dim = 128
        model.encoder_dim = 256
        model.bidirectional = True
        model.d_model = 256
        model.attention_dim = 128
        model.dropout_rate = 0.3
    else:
        model.num_encoder_layers, model.num_decoder_layers = 3, 2
        model.unroll = 3
        model.d_model, model.d_ff = 256, 512
        model.num_heads, model.head_dim, model.value_dim = 4, 64, 64
        model.norm = "pre"
        model.dropout_rate = 0.15

    if has_several_decoders and not choice["recurrent"]:
        model.tie_embeddings = "decoder"

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 2e-3 if not choice["recurrent"] else 1e-3
    config.optimizer.warmup_steps = share(config, 28, of=3)

    config.training.steps = 2800
    config.training.evaluate_every = share(config, 4)

    config.checkpoint.every = share(config, 4)
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "bleu_tokenized"
    config.evaluation.checkpoint = "best"

    config.decoding.beam_size = 5
    config.decoding.length_penalty = 1.0
    config.decoding.length_penalty_form = "power"
    config.decoding.max_ratio = 1.5
    config.decoding.max_extra = 10
    return config
