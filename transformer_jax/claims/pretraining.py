"""Small pre-trainings that several claims start from, and their text.

The text is made of documents of several sentences: the five captions of each picture
of Flickr8k, and the paragraphs of SQuAD. Of a picture, the second segment of an example
is other captions, which are easier to tell from those of another picture than sentences
of an article are.

BERT has 2 layers, 128 wide (the "tiny" of Turc et al. 2019), and a vocabulary of 4,000.
It reads 2,500 batches of 2,048 tokens, in rows of at most 128. It is pre-LN and starts
from Glorot and Bengio's weights, because it then learns in fewer steps than BERT.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax import files
from transformer_jax.claims.claim import Setting
from transformer_jax.claims.trained import Score, Trained, validation_scores
from transformer_jax.data.documents import write_documents

STEPS = 2500

# keys of the model, which fine-tuning repeats
TINY: Mapping[str, Any] = {
    "model.vocab_size": 4000,
    "model.num_layers": 2,
    "model.unroll": 2,
    "model.d_model": 128,
    "model.d_ff": 512,
    "model.num_heads": 2,
    "model.norm": "pre",
    "model.init": "xavier_uniform",
    "model.max_length": 128,
    "model.dtype": "bfloat16",
}
LEFT_TO_RIGHT: Mapping[str, Any] = {"model.causal": True}
# a small vocabulary needs more tokens for the sentences of BLiMP
QUICK_MODEL: Mapping[str, Any] = {"model.max_length": 128}


def picture_documents(captions: Path, split: str) -> str:
    """Return a line for each picture of a split of Flickr8k: its captions as sentences.

    Every sentence begins with a capital letter and ends with a full stop, so that its
    end is found.
    """
    sentences = defaultdict[str, list[str]](list)
    with captions.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            text = row["caption"].rstrip(" .!?").strip()
            if row["split"] == split and text:
                sentences[row["image"]].append(f"{text[0].upper()}{text[1:]} .")
    return "".join(f"{' '.join(lines)}\n" for lines in sentences.values())


def documents(setting: Setting) -> Path:
    """Write the text of the pre-trainings if it is not there, and return its folder.

    It has {train,val}.txt of Flickr8k's and SQuAD's own splits.
    """
    folder = setting.runs / "data" / "documents"
    files.make_folder(folder)
    for ours, theirs in (("train", "train"), ("val", "dev")):
        output = folder / f"{ours}.txt"
        if output.exists():
            continue
        pictures = folder / f"{ours}.pictures"
        lines = picture_documents(setting.data / "flickr8k" / "captions.tsv", ours)
        files.write(pictures, lines.encode())
        paragraphs = setting.data / "squad" / f"{theirs}.json"
        write_documents([str(pictures), str(paragraphs)], str(output))
    return folder


def pretrained(
    keys: Mapping[str, Any],
    score: Score = validation_scores,
    steps: int = STEPS,
) -> Trained:
    """Return the pre-training of BERT with some further keys."""
    return Trained(
        "bert.py:mini",
        keys={
            **TINY,
            "data.batch_tokens": 2048,
            "optimizer.learning_rate": 2e-3,
            "training.steps": steps,
            "training.evaluate_every": steps,
            "checkpoint.every": max(1, steps // 10),
            "checkpoint.keep_latest": 10,
            "checkpoint.keep_best": 0,
            **keys,
        },
        data=documents,
        score=score,
        quick={
            "data.train_split": "train[:200]",
            "data.validation_split": "val[:20]",
            "checkpoint.every": 1,
            **QUICK_MODEL,
        },
    )


def fine_tuned(
    start: Trained, task: str, keys: Mapping[str, Any], score: Score = validation_scores
) -> Trained:
    """Return a fine-tuning of `task`, e.g. "sick", with further keys.

    Its batches, steps and choice of the best checkpoint are those of the recipe.
    """
    return Trained(
        f"finetune.py:task={task}",
        keys={
            **TINY,
            "data.max_length": TINY["model.max_length"],
            "optimizer.learning_rate": 3e-4,
            **keys,
        },
        data=task,
        start=start,
        score=score,
        quick={
            "data.train_split": "train[:200]",
            "data.validation_split": "train[200:220]",
            **QUICK_MODEL,
        },
    )
