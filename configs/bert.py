"""Text classification with BERT's encoder, trained from scratch.

Paper: Devlin et al. 2019: the architecture (post-LN encoder, [CLS], pooler) without the pre-training.
`trec` (the default): six classes of questions (Li and Roth 2002).
Command: python scripts/train.py --config=configs/bert.py:trec --workdir=runs/trec --config.data.directory=DIR
Data: DIR holds train.tsv and test.tsv, each with a header line and the columns sentence and label. The last tenth of
train.tsv is the validation split.
Score: python scripts/evaluate.py --workdir=runs/trec
Cost: about 2 minutes on two CPU cores that were also running other work.
Expected: 88.6 % accuracy on the 500 test questions. For comparison, a convolutional network without pre-trained vectors
reaches 91.2 % (Kim 2014, CNN-rand), and always predicting the most frequent class gives 27.6 %.
Differs: small, on lower-cased words, without pre-training; <s> and </s> take the place of [CLS] and [SEP].
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg, {"task": ("trec",)})
    config = defaults("classification", "bert")

    config.data.train_split = "train[:90%]"
    config.data.validation_split = "train[90%:]"
    config.data.test_split = "test"
    config.data.labels = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    config.data.tokenizer = "words"
    config.data.lowercase = True
    config.data.min_count = 2
    config.data.max_length = 64
    config.data.batch_tokens = 1024
    config.data.max_buckets = 3

    model = config.model
    model.vocab_size = 5000
    model.num_layers = model.unroll = 2
    model.d_model, model.d_ff = 128, 256
    model.num_heads, model.head_dim, model.value_dim = 4, 32, 32
    model.max_length = 64
    model.dropout_rate = 0.3
    model.norm_epsilon = 1e-12

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-8
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0

    config.training.steps = 1000
    config.training.evaluate_every = share(config, 5)
    config.checkpoint.every = share(config, 5)
    config.training.log_every = 100

    config.checkpoint.keep_latest = 2
    config.checkpoint.best_metric = "accuracy"
    config.evaluation.checkpoint = "best"
    return config
