"""Fine-tuning of BERT for classification, regression, multiple choice, question answering and tagging.

Paper: Devlin et al. 2019, Sections 4 and 5.3. The tasks: sst2 (the default), cola, mrpc, qqp, stsb, mnli, qnli, rte
(GLUE), trec, sick, swag, squad, squad2, conll2003, wnut17. The sizes: mini (the default), base, large. Flags: `tfds`
reads the data set from tfds (GLUE, SQuAD, CoNLL-2003); `cased` keeps upper case.
Command: python scripts/train.py --config=configs/finetune.py:task=trec --workdir=runs/trec \
    --config.data.directory=DIR --config.init_from=runs/mini
Without init_from, the model is trained from scratch, with a tokenizer trained on the task's own text.
Data: DIR holds {split}.tsv with a header line and the columns below, {split}.json (SQuAD) or {split}.conll. Labels are
written as below. With `tfds`, DIR is prepared by scripts/prepare.py --name=glue/sst2 --directory=DIR.
Score: python scripts/evaluate.py --workdir=runs/trec
Differs: batches hold a number of tokens, not of examples. For sst2, rte and squad, the validation split is the end of
train, so that nothing is chosen on dev, which is the test split here. Sizes other than mini were not trained.
"""

from ml_collections import ConfigDict

from transformer_jax.config import defaults, parse_arg, share
from transformer_jax.models.bert import SIZES

# Task: config.task, steps, and the keys of config.data.
SENTENCE, PAIR = {"text_column": "sentence"}, {"text_column": "sentence1", "second_column": "sentence2"}
ENTAILMENT = ("entailment", "not_entailment")
HELD_OUT = {"train_split": "train[:95%]", "validation_split": "train[95%:]", "test_split": "dev"}
DEV = {"validation_split": "dev"}
TASKS = {
    "sst2": ("classification", 3000, SENTENCE | HELD_OUT | {"max_length": 64}),
    "cola": ("classification", 1000, SENTENCE | DEV | {"max_length": 64}),
    "trec": (
        "classification",
        800,
        SENTENCE
        | {"labels": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"), "max_length": 64}
        | {"train_split": "train[:90%]", "validation_split": "train[90%:]"},
    ),
    "mrpc": ("classification", 800, PAIR | DEV),
    "rte": ("classification", 800, PAIR | HELD_OUT | {"labels": ENTAILMENT}),
    "sick": ("classification", 1200, PAIR | DEV | {"labels": ("contradiction", "neutral", "entailment")}),
    "qqp": ("classification", 20000, {"text_column": "question1", "second_column": "question2"} | DEV),
    "qnli": (
        "classification",
        8000,
        {"text_column": "question", "second_column": "sentence", "labels": ENTAILMENT, "max_length": 256} | DEV,
    ),
    "mnli": (
        "classification",
        30000,
        {"text_column": "premise", "second_column": "hypothesis", "validation_split": "dev_matched"}
        | {"labels": ("entailment", "neutral", "contradiction"), "test_split": "dev_mismatched"},
    ),
    "stsb": ("regression", 1000, PAIR | DEV),
    "swag": (
        "multiple_choice",
        12000,
        {"text_column": "sent1", "second_column": "sent2", "validation_split": "val", "max_length": 128}
        | {"choice_columns": ("ending0", "ending1", "ending2", "ending3")},
    ),
    "squad": ("question_answering", 2000, HELD_OUT | {"max_length": 384}),
    "squad2": ("question_answering", 20000, HELD_OUT | {"max_length": 384, "unanswerable": True}),
    "conll2003": ("tagging", 2500, DEV | {"types": ("PER", "ORG", "LOC", "MISC")}),
    "wnut17": (
        "tagging",
        1000,
        DEV | {"types": ("corporation", "creative-work", "group", "location", "person", "product")},
    ),
}
# The names in tfds, where they or the labels differ from those of the files.
TFDS_LABELS = {
    "sst2": ("negative", "positive"),
    "cola": ("unacceptable", "acceptable"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
}
TFDS = {
    **{task: f"glue/{task}" for task in ("sst2", "cola", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte")},
    "squad": "squad/v1.1",
    "squad2": "squad/v2.0",
    "conll2003": "conll2003",
}
METRICS = {
    "classification": "accuracy",
    "regression": "spearman",
    "multiple_choice": "accuracy",
    "question_answering": "f1",
    "tagging": "f1",
}


def get_config(arg: str | None = None) -> ConfigDict:
    choice = parse_arg(arg, {"task": tuple(TASKS), "size": tuple(SIZES)}, flags=("tfds", "cased"))
    name, mini = choice["task"], choice["size"] == "mini"
    task, steps, data = TASKS[name]
    config = defaults(task, "bert")

    config.data.tokenizer = "bert"
    config.data.lowercase = not choice["cased"]
    config.data.min_count = 2
    config.data.max_length = 128
    config.data.update(data)
    config.data.batch_tokens = max(1024, 8 * config.data.max_length)
    config.data.max_buckets = 3
    if choice["tfds"]:
        config.data.source, config.data.name = "tfds", TFDS.get(name, "")
        config.data.validation_split = config.data.test_split = "validation"
        if name in TFDS_LABELS:
            config.data.labels = TFDS_LABELS[name]
        if name == "mnli":
            config.data.validation_split, config.data.test_split = "validation_matched", "validation_mismatched"
        if name == "conll2003":
            config.data.validation_split, config.data.test_split = "dev", "test"

    config.model.update(SIZES[choice["size"]])
    config.model.max_length = 512
    config.model.unroll = 4 if mini else 1
    config.model.dtype = "float32" if mini else "bfloat16"

    config.optimizer.schedule = "linear"
    config.optimizer.learning_rate = 3e-4 if mini else 3e-5
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0

    config.training.steps = steps
    config.optimizer.warmup_steps = share(config, 10)
    config.training.evaluate_every = share(config, 5)
    config.checkpoint.every = share(config, 5)
    config.training.log_every = 100
    config.checkpoint.keep_latest = 2
    config.checkpoint.best_metric = METRICS[task]
    config.evaluation.checkpoint = "best"
    return config
