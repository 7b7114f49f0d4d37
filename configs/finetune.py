"""Fine-tuning of BERT or GPT.

The kinds of tasks are classification, regression, multiple choice, question answering
and tagging.

Paper: Devlin et al. 2019, Sections 4 and 5.3; with `model=gpt`, Radford et al. 2018,
Sections 3.2, 3.3 and 4.1. The tasks: sst2 (the default), cola, mrpc, qqp, stsb, mnli,
qnli, rte (GLUE), trec, sick, swag, and for BERT only squad, squad2, conll2003, wnut17.
The sizes of BERT (the default): mini (the default), base, large; of GPT: mini (the
default), gpt, gpt2-small and the others of configs/gpt.py. Flags: `tfds` reads the data
set from tfds (GLUE, SQuAD, CoNLL-2003); `cased` keeps upper case, as GPT always does.
Command: python scripts/train.py --config=configs/finetune.py:task=trec \
    --workdir=runs/trec --config.data.directory=DIR --config.init_from=runs/mini
From any run, or from a Hugging Face folder, whose model and tokenizer it takes:
    python scripts/train.py --config=configs/finetune.py:task=trec,from=FOLDER \
    --workdir=runs/trec --config.data.directory=DIR
GPT: python scripts/train.py --config=configs/finetune.py:model=gpt,task=trec \
    --workdir=runs/trec-gpt --config.data.directory=DIR \
    --config.init_from=runs/gpt-mini
Without either, the model is trained from scratch, with a tokenizer trained on the
task's own text.
Data: DIR holds {split}.tsv with a header line and the columns below, {split}.json
(SQuAD) or {split}.conll. Labels are written as below. Files of GLUE are read as they
are published. With `tfds`, DIR is prepared by
    python scripts/prepare.py --name=glue/sst2 --directory=DIR
Score: python scripts/evaluate.py --workdir=runs/trec
Cost: in bfloat16 on one CPU core, trec takes about 1.5 minutes, sick 2.5 and sst2 4.
Expected: from a pre-trained mini of BERT, 89.5 % accuracy on the 500 test questions of
trec, 63.7 % on sick's test split and 80.8 % on sst2's dev split, means of three seeds;
82.7 % on sick from scratch with the model of docs/extending/equal_words.md
(docs/results/bert.md). From a pre-trained mini of GPT, 90.7 % on trec, the mean of
three seeds, and 63.6 % on sick, one seed, both measured with --config.model.norm=post
(docs/results/gpt.md).
Differs: batches hold a number of tokens, not of examples; in sizes of GPT beyond mini,
they hold 32 examples, as in the paper, and training takes 3 epochs. Texts for GPT's
mini are cut to 128 tokens. The best checkpoint is chosen by accuracy, also where GLUE
reports F1 or Matthews' coefficient, by Spearman's coefficient for stsb, and by F1 for
answers and tags. Sizes other than mini were not trained.
"""

from typing import Any

from ml_collections import ConfigDict

from transformer_jax.config import ConfigError, defaults, parse_arg, share
from transformer_jax.models import bert, gpt
from transformer_jax.transfer import keys_for

# Labels of GLUE's test splits are withheld, so dev is the test split here, and the end
# of train the validation split.
SENTENCE, PAIR = (
    {"text_column": "sentence"},
    {"text_column": "sentence1", "second_column": "sentence2"},
)
ENTAILMENT = ("entailment", "not_entailment")
HELD_OUT = {
    "train_split": "train[:95%]",
    "validation_split": "train[95%:]",
    "test_split": "dev",
}
DEV = {"validation_split": "dev"}
# Task: config.task, steps, and the keys of config.data.
TASKS = {
    "sst2": ("classification", 3000, SENTENCE | HELD_OUT | {"max_length": 64}),
    "cola": ("classification", 1000, SENTENCE | HELD_OUT | {"max_length": 64}),
    "trec": (
        "classification",
        800,
        SENTENCE
        | {"labels": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"), "max_length": 64}
        | {"train_split": "train[:90%]", "validation_split": "train[90%:]"},
    ),
    "mrpc": ("classification", 800, PAIR | HELD_OUT),
    "rte": (
        "classification",
        800,
        PAIR | HELD_OUT | {"labels": ENTAILMENT, "max_length": 256},
    ),
    "sick": (
        "classification",
        1200,
        PAIR | DEV | {"labels": ("contradiction", "neutral", "entailment")},
    ),
    "qqp": (
        "classification",
        20000,
        {"text_column": "question1", "second_column": "question2"} | HELD_OUT,
    ),
    "qnli": (
        "classification",
        8000,
        {
            "text_column": "question",
            "second_column": "sentence",
            "labels": ENTAILMENT,
            "max_length": 256,
        }
        | HELD_OUT,
    ),
    "mnli": (
        "classification",
        30000,
        {
            "text_column": "premise",
            "second_column": "hypothesis",
            "labels": ("entailment", "neutral", "contradiction"),
        }
        | {"validation_split": "dev_matched", "test_split": "dev_mismatched"},
    ),
    "stsb": ("regression", 1000, PAIR | HELD_OUT),
    "swag": (
        "multiple_choice",
        12000,
        {
            "text_column": "sent1",
            "second_column": "sent2",
            "choice_columns": ("ending0", "ending1", "ending2", "ending3"),
        }
        | HELD_OUT
        | {"test_split": "val"},
    ),
    "squad": ("question_answering", 2000, HELD_OUT | {"max_length": 384}),
    "squad2": (
        "question_answering",
        20000,
        HELD_OUT | {"max_length": 384, "unanswerable": True},
    ),
    "conll2003": ("tagging", 2500, DEV | {"types": ("PER", "ORG", "LOC", "MISC")}),
    "wnut17": (
        "tagging",
        1000,
        DEV
        | {
            "types": (
                "corporation",
                "creative-work",
                "group",
                "location",
                "person",
                "product",
            )
        },
    ),
}
# The keys of config.data that differ in tfds.
IN_TFDS = {"test_split": "validation"}
TFDS = {
    "sst2": {"name": "glue/sst2", "labels": ("negative", "positive")} | IN_TFDS,
    "cola": {"name": "glue/cola", "labels": ("unacceptable", "acceptable")} | IN_TFDS,
    "mrpc": {"name": "glue/mrpc", "labels": ("not_equivalent", "equivalent")} | IN_TFDS,
    "qqp": {"name": "glue/qqp", "labels": ("not_duplicate", "duplicate")} | IN_TFDS,
    "stsb": {"name": "glue/stsb"} | IN_TFDS,
    "mnli": {
        "name": "glue/mnli",
        "validation_split": "validation_matched",
        "test_split": "validation_mismatched",
    },
    "qnli": {"name": "glue/qnli"} | IN_TFDS,
    "rte": {"name": "glue/rte"} | IN_TFDS,
    "squad": {"name": "squad/v1.1"} | IN_TFDS,
    "squad2": {"name": "squad/v2.0"} | IN_TFDS,
    "conll2003": {"name": "conll2003"},
}
# Examples of the training splits above.
EXAMPLES = {
    **{
        "sst2": 63981,
        "cola": 8123,
        "trec": 4907,
        "mrpc": 3485,
        "rte": 2366,
        "sick": 4500,
        "qqp": 345654,
    },
    **{"qnli": 99506, "mnli": 392702, "stsb": 5462, "swag": 69869},
}
BATCH = 32  # examples in a batch of GPT beyond mini (Radford et al. 2018, Section 4.1)
SYMMETRIC = ("mrpc", "qqp", "stsb")  # pairs that GPT reads in both orders
# others: accuracy
METRICS = {"regression": "spearman", "question_answering": "f1", "tagging": "f1"}


def size_of(start: dict[str, Any], sizes: dict[str, dict[str, Any]]) -> str:
    """Return the size whose settings suit a model, given by its keys: its own size,
    or else that of the paper.
    """
    if not sizes:
        raise ConfigError(
            f"from={start['init_from']} holds a model that is neither BERT nor GPT: "
            "name another one"
        )
    same = [
        name
        for name, size in sizes.items()
        if (size["num_layers"], size["d_model"])
        == (start["model.num_layers"], start["model.d_model"])
    ]
    return (*same, list(sizes)[1])[0]  # after mini comes the size of the paper


def get_config(arg: str | None = None) -> ConfigDict:
    sizes = {"bert": bert.SIZES, "gpt": gpt.SIZES}
    words = {
        "task": tuple(TASKS),
        "size": tuple(dict.fromkeys([*bert.SIZES, *gpt.SIZES])),
        "model": tuple(sizes),
    }
    choice = parse_arg(arg, words | {"from": ()}, flags=("tfds", "cased"))
    name, size, model = choice["task"], choice["size"], choice["model"]
    start = keys_for(choice["from"]) if choice["from"] else {}
    if start:
        if (size, model, choice["cased"]) != ("mini", "bert", False):
            raise ConfigError(
                "from=… determines the model: leave out size, model and cased"
            )
        model = start["model.architecture"]
        size = size_of(start, sizes.get(model, {}))
    task, steps, data = TASKS[name]
    if size not in sizes[model]:
        raise ConfigError(
            f"model={model} has no size={size}: choose from {', '.join(sizes[model])}"
        )
    if model == "gpt" and name not in EXAMPLES:
        raise ConfigError(
            f"task={name} is for model=bert: "
            f"choose from {', '.join(EXAMPLES)} for model=gpt"
        )
    as_in_paper = model == "gpt" and size != "mini"
    config = defaults(task, model)
    config.model.update(sizes[model][size])
    config.model.dtype = "float32" if size == "mini" else "bfloat16"
    config.model.unroll = 4 if size == "mini" else 1

    config.data.min_count = 2
    config.data.max_length = 128
    config.data.update(data)
    if choice["tfds"]:
        if name not in TFDS:
            raise ConfigError(
                f"task={name} is not in tfds: "
                f"choose from {', '.join(TFDS)}, or use files without the flag"
            )
        config.data.source = "tfds"
        config.data.update(TFDS[name])

    if model == "bert":
        config.data.tokenizer = "bert"
        config.data.lowercase = not choice["cased"]
        config.model.max_length = 512
    else:
        config.fine_tuning.auxiliary_weight = 0.5
    if model == "gpt" and name in SYMMETRIC:
        config.fine_tuning.both_orders = True
    config.update_from_flattened_dict(start)
    length = config.data.max_length = min(
        config.data.max_length, config.model.max_length
    )
    config.data.batch_tokens = BATCH * length if as_in_paper else max(1024, 8 * length)
    config.data.max_buckets = 1 if as_in_paper else 3

    config.optimizer.schedule = "linear"
    # chosen on the validation splits of sick and trec
    rates = {"mini": 1e-4 if "second_column" in data else 3e-4}
    config.optimizer.learning_rate = 6.25e-5 if as_in_paper else rates.get(size, 3e-5)
    config.optimizer.b2 = 0.999
    config.optimizer.epsilon = 1e-8 if as_in_paper else 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.training.steps = 3 * EXAMPLES[name] // BATCH if as_in_paper else steps
    config.optimizer.warmup_steps = share(config, 500 if as_in_paper else 10)
    config.training.evaluate_every = share(config, 5)
    config.checkpoint.every = share(config, 5)
    config.training.log_every = 100
    config.checkpoint.keep_latest = 2
    config.checkpoint.best_metric = METRICS.get(task, "accuracy")
    config.evaluation.checkpoint = "best"
    return config
