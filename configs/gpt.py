"""Language models: GPT, GPT-2, Llama, and small models of characters for a CPU.

GPT, GPT-2 and Llama are in the sizes of their papers.

Paper: Radford et al. 2018 (GPT) and 2019 (GPT-2), Touvron et al. 2023 (Llama), Zaremba
et al. 2014 (LSTM).
Characters of Shakespeare: `shakespeare-cpu` (the default; 811,776 parameters) is
nanoGPT's example for a laptop: 4 layers, 4 heads, d_model 128, context 64, batches of
12 windows and 2,000 steps. `llama-tiny` (746,624) and `lstm` (822,528; 2 layers of 224
units) take the same data, batches and steps: today's parts, with 2 key-value heads for
4 query heads, and what came before Transformers. `shakespeare-cpu,muon` trains the
first with Muon. `shakespeare-cpu-long` (4,750,592) has Llama's parts, 6 layers, 256
wide, context 256. `shakespeare` is nanoGPT's example for a GPU: 6 layers, 6 heads,
d_model 384, context 256, batches of 64 windows and 5,000 steps.
Text of your own: `mini` (5,240,320: 4 layers, 256 wide, context 128, pre-LN), for a CPU
and for fine-tuning, `gpt` (117 million parameters), `gpt2-small` (124), `gpt2-medium`
(355), `gpt2-large` (774), `gpt2-xl` (1,558) and `llama-7b` (6,738).
Command: python scripts/train.py --config=configs/gpt.py:shakespeare-cpu \
    --workdir=runs/shakespeare --config.data.directory=DIR
Data: for characters, DIR holds input.txt, tiny-shakespeare (1,115,394 characters). The
first 90 % is the training split, the rest the validation split. For the other sizes,
DIR holds train.txt and val.txt.
Score: python scripts/evaluate.py --workdir=runs/shakespeare; `loss` is in nats per
token, over all held-out text.
Cost: `shakespeare-cpu` takes about a minute on one CPU core, `shakespeare-cpu-long` 38
minutes on two, `shakespeare` about three minutes on a GPU (H200).
Expected: nats per character on the held-out text: `shakespeare-cpu` 1.860, mean of
three seeds (nanoGPT's README reports 1.88 on random windows), with Muon 1.639, mean of
three seeds (docs/results/optimizers.md), `llama-tiny` 1.683, `lstm` 1.658,
`shakespeare-cpu-long` 1.466 (stopped after 4,642 steps), `shakespeare` 1.456 (nanoGPT's
README: 1.4697), both the best of their evaluations. `mini`: docs/results/gpt.md,
measured with --config.model.norm=post. The other sizes for text of your own were not
run.
Differs: every epoch goes through the text once, in shuffled windows from a random
offset, where nanoGPT draws windows independently. `shakespeare-cpu` has biases in
linear layers, and Glorot and Bengio's initial weights of linear layers instead of a
standard deviation of 0.02, which is worse (1.881). Layer norms have biases. `gpt` has a
vocabulary of byte-level BPE. GPT trains for 100 epochs of its text; set training.steps
accordingly. For GPT-2, Radford et al. publish the batch size, but neither the learning
rate and the other settings of the optimizer nor the number of updates; the optimizer of
gpt2-* is GPT-3's (Brown et al. 2020, Table 2.1 and Appendix B), with the warm-up of
GPT. `llama-7b` has the settings of its paper, for 10¹² tokens, and a vocabulary of
byte-level BPE.
"""

from typing import Any

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share
from transformer_jax.models.gpt import SIZES, sizes

# Characters: rows of a batch, its length, updates, evaluations, learning rate, and keys
#     of the model.
CHARACTERS: dict[str, tuple[int, int, int, int, float, dict[str, Any]]] = {
    "shakespeare-cpu": (
        *(12, 64, 2000, 4, 1e-3),
        {
            "norm": "pre",
            "init": "xavier_uniform",
            "dropout_rate": 0.0,
            "unroll": 4,
            **sizes(4, 128, 512, 4),
        },
    ),
    "shakespeare-cpu-long": (
        *(16, 256, 7000, 14, 2e-3),
        SIZES["llama-tiny"]
        | {
            "dropout_rate": 0.15,
            "dtype": "bfloat16",
            "unroll": 6,
            **sizes(6, 256, 680, 4),
        },
    ),
    "shakespeare": (
        *(64, 256, 5000, 20, 1e-3),
        {
            "norm": "pre",
            "scale_residual_init": True,
            "attention_bias": False,
            "feed_forward_bias": False,
        }
        | {
            "dropout_rate": 0.2,
            "attention_dropout_rate": 0.2,
            "dtype": "bfloat16",
            "unroll": 6,
        }
        | sizes(6, 384, 1536, 6),
    ),
    "llama-tiny": (
        12,
        64,
        2000,
        4,
        1e-3,
        SIZES["llama-tiny"] | {"dropout_rate": 0.0, "unroll": 4},
    ),
    "lstm": (
        12,
        64,
        2000,
        4,
        2e-3,
        {"num_layers": 2, "d_model": 224, "tie_embeddings": True, "dropout_rate": 0.0},
    ),
}
# Text: rows of a batch, updates, and keys of the optimizer.
GPT2 = {"b2": 0.95, "end_fraction": 0.1, "weight_decay": 0.1}
TRAINING: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mini": (
        16,
        8000,
        {"learning_rate": 1e-3, "b2": 0.999, "end_fraction": 0.0, "weight_decay": 0.01},
    ),
    "gpt": (
        64,
        100_000,
        {
            "learning_rate": 2.5e-4,
            "b2": 0.999,
            "end_fraction": 0.0,
            "weight_decay": 0.01,
        },
    ),
    "gpt2-small": (512, 300_000, {"learning_rate": 6e-4, **GPT2}),
    "gpt2-medium": (512, 300_000, {"learning_rate": 3e-4, **GPT2}),
    "gpt2-large": (512, 300_000, {"learning_rate": 2.5e-4, **GPT2}),
    "gpt2-xl": (512, 300_000, {"learning_rate": 2e-4, **GPT2}),
    "llama-7b": (2048, 238_000, {"learning_rate": 3e-4, **GPT2}),
}


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, {"size": (*CHARACTERS, *TRAINING)}, flags=("muon",))
    size = choice["size"]
    config = defaults("language_modeling", "recurrent_lm" if size == "lstm" else "gpt")
    config.optimizer.schedule = "cosine"
    config.optimizer.epsilon = 1e-8
    config.optimizer.clip_norm = 1.0
    config.checkpoint.keep_latest = 2
    config.decoding.temperature = 0.8
    if size in CHARACTERS:
        characters(config, size)
    else:
        text(config, size)
    if choice["muon"]:
        muon(config, size)
    return config


def muon(config: ConfigDict, size: str) -> None:
    """Set Muon with the learning rate that was chosen for `shakespeare-cpu`."""
    if size != "shakespeare-cpu":
        raise ConfigError(
            f"muon has a learning rate for shakespeare-cpu, not for {size}: set "
            "config.optimizer.name, config.optimizer.b1 and "
            "config.optimizer.learning_rate"
        )
    config.optimizer.name = "muon"
    config.optimizer.b1 = 0.95
    config.optimizer.learning_rate = 8e-3


def characters(config: ConfigDict, size: str) -> None:
    """Set everything for a model of Shakespeare's characters."""
    rows, length, steps, evaluations, learning_rate, model = CHARACTERS[size]
    config.data.train_split = "input[:90%]"
    config.data.validation_split = config.data.test_split = "input[90%:]"
    config.data.tokenizer = "characters"
    config.data.max_length = length  # tokens per window
    config.data.batch_tokens = rows * length
    config.data.rows_multiple = 4
    config.model.update(model, vocab_size=80, max_length=length)
    config.optimizer.learning_rate = learning_rate
    config.optimizer.end_fraction = 0.1
    config.optimizer.warmup_steps = share(config, steps // 100)  # 100 steps
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.training.steps = steps
    config.training.evaluate_every = share(config, evaluations)
    config.checkpoint.every = share(config, evaluations)
    config.decoding.max_extra = 48
    # long enough to fit the training split too well
    if size in ("shakespeare", "shakespeare-cpu-long"):
        config.checkpoint.keep_best = 1
        config.checkpoint.best_metric = "loss"
        config.evaluation.checkpoint = "best"
    if size == "shakespeare-cpu-long":
        config.optimizer.end_fraction = 0.02


def text(config: ConfigDict, size: str) -> None:
    """Set everything for a model of text of one's own."""
    (rows, steps, optimizer), mini = TRAINING[size], size == "mini"
    model = config.model
    model.update(SIZES[size])
    model.dtype = "float32" if mini else "bfloat16"
    model.unroll = 4 if mini else 1
    if size not in ("mini", "gpt"):
        model.remat = "full" if size == "llama-7b" else "scores"
    # parameters and optimizer state exceed the memory of one device
    if size == "llama-7b":
        config.mesh.data, config.mesh.fsdp = 1, -1

    config.data.test_split = "val"
    config.data.min_count = 3 if mini else 1
    config.data.max_length = model.max_length  # tokens per window
    config.data.batch_tokens = rows * model.max_length
    config.optimizer.update(optimizer)
    config.training.steps = steps
    # 2,000 steps
    config.optimizer.warmup_steps = share(config, 10 if mini else steps // 2000)
    config.training.evaluate_every = share(config, 10 if mini else 100)
    config.checkpoint.every = share(config, 10 if mini else 100)
