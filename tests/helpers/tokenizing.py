"""Lines, tokenizers trained on them, and what they encode."""

from transformer_jax.data import workers
from transformer_jax.data.tokenizer_training import train_tokenizer

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)

LINES = [
    "Ein Hund läuft über die Wiese .",
    "Two dogs , both <brown> , run </s> here  and there .",
    "  the 日本 café\twas closed",
    (
        "<pad> <s> </s> <unk> x</s> </s>y x</s> </s>y <unk> <pad>x "
        "[MASK] [SEP] [CLS]x [PAD] [SEP] [MASK]"
    ),
    "Straße",
] * 3

ODD = [
    "",
    " ",
    "  ",
    " a",
    "a ",
    "a  b",
    "</s>",
    "<pad>",
    " </s> <pad>",
    "a</s>b",
    "<s> <unk> a",
    "[MASK] x[SEP]",
    "[CLS]",
]


def train(kind, **arguments):
    return train_tokenizer(kind, LINES, 400, **arguments)


def ids(tokenizer, line):
    return tokenizer.encode_batch([line])[0]


def count_processes(monkeypatch):
    """Return a list to which the size of every started process pool is appended."""
    started, pool = [], workers.ProcessPoolExecutor
    monkeypatch.setattr(
        workers,
        "ProcessPoolExecutor",
        lambda count, *rest: started.append(count) or pool(count, *rest),
    )
    return started


def special_ids(tokenizer):
    return (
        tokenizer.pad_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
    )


def rows(ragged):
    return [row.tolist() for row in ragged]
