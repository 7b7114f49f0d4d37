"""Files of word vectors, and configs of tasks that read them."""

from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from helpers.runs import small

# (task, architecture) → the sections of word vectors, with the path of each table
TABLES = {
    ("classification", "bert"): {"vectors": "bert/embedding/table"},
    ("classification", "gpt"): {"vectors": "gpt/embedding/table"},
    ("tagging", "bert"): {"vectors": "bert/embedding/table"},
    ("bert_pretraining", "bert"): {"vectors": "bert/embedding/table"},
    ("language_modeling", "gpt"): {"vectors": "embedding/table"},
    ("language_modeling", "recurrent_lm"): {"vectors": "embedding/table"},
    ("sequence_to_sequence", "transformer"): {
        "source_vectors": "source_embedding/table",
        "target_vectors": "target_embedding/table",
    },
    ("sequence_to_sequence", "convs2s"): {
        "source_vectors": "source_embedding/table",
        "target_vectors": "target_embedding/table",
    },
    ("sequence_to_sequence", "recurrent"): {
        "source_vectors": "source_embedding/table",
        "target_vectors": "target_embedding/table",
    },
}


def reading_words(
    task: str, directory: Path, architecture: str | None = None, **changes: Any
) -> ConfigDict:
    """Return a small config of a task whose tokenizer is "words"."""
    config = small(task, directory, architecture)
    config.data.tokenizer = "words"
    config.training.steps = 2
    if task == "sequence_to_sequence":
        config.data.joint_tokenizer = False
    if architecture == "transformer":
        config.model.tie_embeddings = "none"
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


def width_of(config: ConfigDict) -> int:
    """Return the width of the embeddings of a model."""
    return config.model.get("embedding_dim", 0) or config.model.d_model


def write_vectors(path: Path, words: list[str], width: int, seed: int = 0) -> dict:
    """Write a file of random vectors. Return the vector of each word."""
    draw = np.random.default_rng(seed)
    vectors = {word: np.float32(draw.normal(size=width)) for word in words}
    lines = [
        " ".join([word, *map(str, vector.tolist())]) for word, vector in vectors.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return vectors
