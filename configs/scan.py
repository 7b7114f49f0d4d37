"""SCAN: commands such as "walk twice and jump" to actions (Lake and Baroni 2018).

Whether a model composes what it knows shows in the split: `split=cut26` (the default)
trains on examples with at most 26 actions and tests on longer ones, and so do `cut22`
to `cut40`; `length` is the published split, cut at 22. `simple` divides at random.
`jump` and `turn_left` have this command only alone in training.

Paper: Csordás et al. 2021, "The Devil is in the Detail": 3+3 layers, d_model 128, 8
heads, dropout 0.5, Adam at 1e-3, 256 examples a batch, 50,000 updates without early
stopping. `model=additive` is an LSTM with additive attention, with the sizes of the
best one with attention for jump in Lake and Baroni 2018: one layer of 100 units,
dropout 0.1.
Positions of the Transformer: `positions=shaw` (the default; Shaw et al. 2018),
`sinusoidal` or `rotary` (Su et al. 2021).
Command: python scripts/train.py --config=configs/scan.py:cut26 --workdir=runs/scan
Data: made from the folder of https://github.com/brendenlake/SCAN, here data/scan:
    python -m transformer_jax.data.corpora.scan --data=data/scan --split=cut26 \
        --directory=runs/data/scan-cut26
For another split, change both: the recipe reads runs/data/scan-SPLIT.
Score: python scripts/evaluate.py --workdir=runs/scan --split=generalization; papers
report `exact_match`. Validation data is like the training data, so it does not tell
which checkpoint composes: the last one counts.
Cost: about an hour and a half on one CPU core for the Transformer, half an hour for the
recurrent model (estimated from a few steps).
Expected: for cut26, with batches half as large, 7,000 steps and dropout 0.2: 81 % with
Shaw et al.'s positions, 58 with sinusoidal and 49 with rotary ones, and 94 with the
recurrent model after 4,000 steps, one seed each (docs/results/claims_generalization.md,
composition). Csordás et al. report 100 % with relative positions, and next to nothing
with absolute ones; Lake and Baroni, at most 99.8 % for simple, 20.8 % for length and
1.2 % for jump. The recipe at its full length was not run. For smaller models that get
more of cut26 right, see docs/records.md, scan-26.
Differs: a cosine schedule with warm-up, for a fifth of the updates. The relative
positions of the paper are those of Dai et al. 2019, for any distance. Those of Shaw et
al. have a vector for each, here up to 24. The recurrent encoder is bidirectional, and
always reads the right action in training (in the paper, half of the time).
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share

SPLITS = ("simple", "length", "jump", "turn_left")
CUTS = tuple(f"cut{actions}" for actions in range(22, 41))
# the value of model.positions
POSITIONS = {"shaw": "relative", "sinusoidal": "sinusoidal", "rotary": "rotary"}


def get_config(arg: str | None = None) -> ConfigDict:
    words = {
        "split": ("cut26", *SPLITS, *(cut for cut in CUTS if cut != "cut26")),
        "model": ("transformer", "additive"),
        "positions": tuple(POSITIONS),
    }
    choice = parse_arg(arg, words)
    is_recurrent = choice["model"] == "additive"
    config = defaults(
        "sequence_to_sequence", "recurrent" if is_recurrent else "transformer"
    )

    config.data.directory = f"runs/data/scan-{choice['split']}"
    config.data.source_language, config.data.target_language = "commands", "actions"
    config.data.tokenizer = "words"
    config.data.joint_tokenizer = False
    config.data.max_length = 64
    config.data.batch_tokens = 4096  # about 256 examples
    config.data.max_buckets = 4

    model = config.model
    # 13 and 6 words, and 4 special tokens
    model.source_vocab_size, model.target_vocab_size = 17, 10
    model.max_length = 64
    if is_recurrent:
        model.cell = "lstm"
        model.attention = "additive"
        model.bidirectional = True
        model.embedding_dim = model.d_model = model.attention_dim = 100
        model.encoder_dim = 200
        model.dropout_rate = 0.1
    else:
        model.dropout_rate = 0.5
        model.num_encoder_layers = model.num_decoder_layers = model.unroll = 3
        model.d_model, model.d_ff, model.num_heads = 128, 256, 8
        model.head_dim = model.value_dim = 16
        model.tie_embeddings = "decoder"
        model.positions = POSITIONS[choice["positions"]]
        # distances in training outputs; the last vector stands for all larger ones
        model.max_relative_distance = 24

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = share(config, 20)
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-8
    config.optimizer.clip_norm = 5.0

    config.training.steps = 10_000
    config.training.label_smoothing = 0.0
    config.training.evaluate_every = share(config, 5)
    config.checkpoint.every = share(config, 5)
    config.checkpoint.keep_latest = 1
    config.checkpoint.keep_best = 0

    # 48 actions and the end
    config.decoding.beam_size = 1
    config.decoding.max_ratio = 0.0
    config.decoding.max_extra = 60
    return config
