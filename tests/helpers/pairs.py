"""Corpora of pairs of short lines, and their batches."""

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.corpus_batches import bucket_batches
from transformer_jax.data.sources import parallel_files
from transformer_jax.data.streams import Tokens
from transformer_jax.data.text import ParallelData

WORDS = ("ek", "at", "ut", "im")


def write(directory, split="train", **columns):
    directory.mkdir(exist_ok=True)
    for name, lines in columns.items():
        (directory / f"{split}.{name}").write_text("\n".join(lines) + "\n")


def pairs(tmp_path, *, joint=True, vocab_size=300, **data):
    """Return the corpus en → de of tmp_path/text."""
    config = ParallelData(
        **{
            "directory": str(tmp_path / "text"),
            "max_length": 32,
            "batch_tokens": 1024,
            **data,
        }
    )
    name = (lambda side: "tokenizer.json") if joint else "tokenizer.{}.json".format
    streams = {
        side: Tokens(column, name(side), vocab_size, f"model.{side}_vocab_size")
        for side, column in (("source", "en"), ("target", "de"))
    }
    return Corpus(config, streams, tmp_path / "run", parallel_files)


def texts(corpus, split):
    """Return {stream: its lines}."""
    return {
        name: corpus.open(split).column(stream.column)
        for name, stream in corpus.streams.items()
    }


def shuffled(corpus, seed=0, **options):
    return bucket_batches(
        corpus, texts(corpus, "train"), split="train", seed=seed, **options
    )


def epoch(batches, number=0):
    plan = batches.plan
    return [
        batches.load(plan.batch(i))
        for i in range(number * len(plan), (number + 1) * len(plan))
    ]


def decoded(corpus, arrays, stream):
    """Return {example: its text}, decoded from the valid tokens only."""
    rows = zip(arrays["index"], arrays[stream], arrays[f"{stream}_length"], strict=True)
    return {
        int(i): corpus.tokenizers[stream].decode(ids[:length])
        for i, ids, length in rows
        if i >= 0
    }


def write_pairs(directory):
    """Write 11 pairs of 1 to 4 words in each split, and return the folder."""
    for split, start in (("train", 0), ("val", 5)):
        lines = [
            " ".join(WORDS[j % 4] for j in range(i, i + 1 + i % 4))
            for i in range(start, start + 11)
        ]
        write(directory, split, en=lines, de=[line.swapcase() for line in lines])
    return directory
