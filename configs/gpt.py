"""Decoder-only language model over the characters of Shakespeare.

Paper: Radford et al. 2018 (GPT) and 2019 (pre-LN, final norm), at the size of nanoGPT's example for a laptop:
`shakespeare-cpu` (the default) has 4 layers, 4 heads, d_model 128, context 64, batches of 12 windows and 2,000 steps.
Command: python scripts/train.py --config=configs/gpt.py:shakespeare-cpu --workdir=runs/shakespeare \
    --config.data.directory=DIR
Data: DIR holds input.txt, tiny-shakespeare (1,115,394 characters). The first 90 % is the training split, the rest the
validation split.
Score: python scripts/evaluate.py --workdir=runs/shakespeare; `loss` is in nats per character, over all held-out text.
Cost: about 4 minutes on two CPU cores that were also running other work.
Expected: 1.881 nats per character. nanoGPT's README reports 1.88 on random windows.
Differs: every epoch goes through the text once, in shuffled windows from a random offset, where nanoGPT draws windows
independently; linear layers have biases; the initial weights of residual projections are not scaled down.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg, {"size": ("shakespeare-cpu",)})
    config = defaults("language_modeling", "gpt")

    config.data.train_split = "input[:90%]"
    config.data.validation_split = config.data.test_split = "input[90%:]"
    config.data.tokenizer = "characters"
    config.data.max_length = 64  # tokens per window
    config.data.batch_tokens = 12 * 64
    config.data.rows_multiple = 4

    model = config.model
    model.vocab_size = 80
    model.num_layers = model.unroll = 4
    model.d_model, model.d_ff = 128, 512
    model.num_heads, model.head_dim, model.value_dim = 4, 32, 32
    model.max_length = 64
    model.norm = "pre"
    model.dropout_rate = 0.0

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.end_fraction = 0.1
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.99
    config.optimizer.epsilon = 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.training.steps = 2000
    config.training.evaluate_every = share(config, 4)
    config.checkpoint.every = share(config, 4)
    config.checkpoint.keep_latest = 2

    config.decoding.temperature = 0.8
    config.decoding.max_extra = 48
    return config
