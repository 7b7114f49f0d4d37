"""Classification of sentences by a small Transformer encoder, with or without word
vectors that were trained on other text.

Paper: Pennington et al. 2014 (GloVe); the three kinds of vectors are those of Kim 2014,
Section 3.1: `vectors=random` (the default; CNN-rand there), `glove` (trainable;
CNN-non-static) and `frozen` (CNN-static). The model has the parts of BERT (Devlin et
al. 2019), trained from scratch: 2 layers of width 50, 5 heads of 10, d_ff 200.
Arguments: `task=trec|sst2|sick` and `vectors=random|glove|frozen`, the first being the
default.
Command: python scripts/train.py --workdir=runs/trec-glove \
    --config=configs/word_vectors.py:task=trec,vectors=glove \
    --config.data.directory=DIR --config.vectors.file=FILE
Without vectors: python scripts/train.py --workdir=runs/trec-random \
    --config=configs/word_vectors.py:task=trec --config.data.directory=DIR
Data: DIR holds the files of configs/finetune.py for the same task. FILE is a text file
of 50-dimensional vectors of lower-case words, e.g. glove.6B.50d.txt of
https://nlp.stanford.edu/projects/glove, also as .gz; its default is that name in the
working directory. For vectors of another width, set model.d_model to it.
Score: python scripts/evaluate.py --workdir=runs/trec-glove
Cost: 40 seconds (sick) to 3 minutes (sst2) on one core.
Expected: test accuracy of trec with random, frozen and trainable vectors, mean of three
seeds: 83.5, 86.1 and 84.9 % (docs/results/word_vectors.md). Kim 2014, Table 2, has
91.2, 92.8 and 93.6 %, and on the test split of sst2 82.7, 86.8 and 87.2 %.
Differs: Kim trains a convolutional network with 300-dimensional vectors of word2vec.
The best checkpoint is chosen on held-out training examples (sick: on its dev split),
and sst2 is scored on its dev split. The vocabulary has the words of the training split,
so other words of a test are unknown, also if FILE has them. Words are what stands
between spaces: those of sick include the commas that follow them.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share

HELD_OUT = {"train_split": "train[:90%]", "validation_split": "train[90%:]"}
# Task: words of the vocabulary at most, steps, and keys of config.data.
TASKS = {
    "trec": (
        9_000,
        1_600,
        {"labels": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"), **HELD_OUT},
    ),
    "sst2": (
        16_000,
        6_000,
        {
            "train_split": "train[:95%]",
            "validation_split": "train[95%:]",
            "test_split": "dev",
        },
    ),
    "sick": (
        3_000,
        2_400,
        {
            "text_column": "sentence1",
            "second_column": "sentence2",
            "labels": ("contradiction", "neutral", "entailment"),
            "validation_split": "dev",
        },
    ),
}
VECTORS = ("random", "glove", "frozen")


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, {"task": tuple(TASKS), "vectors": VECTORS})
    vocab_size, steps, data = TASKS[choice["task"]]
    config = defaults("classification", "bert")

    if choice["vectors"] != "random":
        config.vectors.file = "glove.6B.50d.txt"
    config.vectors.frozen = choice["vectors"] == "frozen"

    config.data.update(data)
    config.data.tokenizer = "words"
    config.data.lowercase = True
    config.data.max_length = 64
    config.data.batch_tokens = 1024
    config.data.max_buckets = 3

    model = config.model
    model.vocab_size = vocab_size
    model.num_layers = model.unroll = 2
    model.d_model = 50
    model.d_ff = 200
    model.num_heads = 5
    model.head_dim = model.value_dim = 10
    model.norm = "pre"
    model.positions = "rotary"
    model.max_length = 64
    # random vectors of unit variance, about as long as GloVe's
    model.embedding_init = "normal"
    model.embedding_scale = True
    model.dropout_rate = model.attention_dropout_rate = 0.2

    config.optimizer.schedule = "linear"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.training.steps = steps
    config.optimizer.warmup_steps = share(config, 10)
    config.training.evaluate_every = share(config, 10)
    config.checkpoint.every = share(config, 10)
    config.training.log_every = 100
    config.checkpoint.keep_latest = 2
    config.checkpoint.best_metric = "accuracy"
    config.evaluation.checkpoint = "best"
    return config
