"""Olsson et al. 2022: copying by induction needs two layers of attention.

A document has 64 characters: 16 to 32 different ones in random order, which are then
repeated. In the repetition, each next character is the one that followed the same
character before. The number of different ones is random, so that no fixed distance
tells it. Models of 1 and 2 layers, 128 wide, with feed-forward networks and rotary
positions, are trained on 3,000 batches of 32 documents, drawn from 40,000.

The loss that counts is that of the characters that a repetition determines. The row
`val` of metrics.jsonl has the loss of all characters, every 100 steps: its fall is the
phase change of the paper.

Differs: The paper trains on text, and repeats random tokens only to find the heads.
"""

import random
import string
from collections import defaultdict
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from transformer_jax import files
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.token_losses import split_losses
from transformer_jax.claims.trained import Trained
from transformer_jax.config import defaults
from transformer_jax.models.gpt import sizes
from transformer_jax.predictor import Predictor

CHARACTERS = string.ascii_letters + string.digits
LENGTH = 64  # of a document
SHORTEST, LONGEST = 16, 32  # lengths of what is repeated
DOCUMENTS = {"train": 40_000, "val": 1000}
PLACES = (1, 2, 4, 8, 16)  # in the repetition, from 1, whose losses are measured
ROWS = 32  # of a batch


def repeated(draw: random.Random) -> str:
    """Return a document: different characters in random order, again and again."""
    period = draw.randint(SHORTEST, LONGEST)
    once = "".join(draw.sample(CHARACTERS, period))
    return (once * (LENGTH // period + 1))[:LENGTH]


def write_documents(setting: Setting) -> Path:
    """Write the splits `train` and `val`, and return their folder."""
    folder = setting.runs / "data" / "induction"
    if not (folder / "val.txt").exists():
        draw = random.Random(0)
        contents = {}
        for split, count in DOCUMENTS.items():
            documents = [repeated(draw) for _ in range(count)]
            contents[f"{split}.txt"] = ("\n\n".join(documents) + "\n").encode()
        files.write_all(folder, contents)
    return folder


def determined(text: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return where a repetition determines the target: True (B, T) if it and the token
    before it, of text (B, T), have both occurred before.
    """
    places = np.arange(text.shape[1])
    before = places[None, :, None] > places
    until = places[None, :, None] >= places
    known = ((text[:, :, None] == text[:, None]) & before).any(axis=-1)
    return known & ((target[:, :, None] == text[:, None]) & until).any(axis=-1)


def repeated_losses(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the mean loss of determined tokens, at all places and at some, and that of
    the other tokens.
    """
    found: dict[str, list[float]] = defaultdict(list)
    split = predictor.config.data.validation_split
    for batch, losses in split_losses(predictor, split):
        known = determined(batch["text"], batch["target"])
        valid = np.arange(losses.shape[1]) < batch["text_length"][:, None]
        known &= valid
        found["repeated loss"] += losses[known].tolist()
        found["new loss"] += losses[valid & ~known].tolist()
        place = known.cumsum(axis=1)
        for number in PLACES:
            at_place = losses[known & (place == number)].tolist()
            found[f"repeated loss at {number}"] += at_place
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def induction() -> ConfigDict:
    """Return the config, but for the number of layers."""
    config = defaults("language_modeling", "gpt")
    config.data.test_split = "val"
    config.data.tokenizer = "characters"
    config.data.layout = "documents"
    config.data.max_length = LENGTH + 1  # with the line break, which predicts the end
    config.data.batch_tokens = ROWS * (LENGTH + 1)

    config.model.update(sizes(2, 128, 512, 4))
    config.model.vocab_size = 80
    config.model.max_length = LENGTH + 1
    config.model.norm = "pre"
    config.model.positions = "rotary"
    config.model.init = "xavier_uniform"
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0

    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.end_fraction = 0.1
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.training.steps = 3000
    config.training.evaluate_every = 100
    config.checkpoint.every = 3000
    config.checkpoint.keep_best = 0
    return config


def condition(num_layers: int) -> Trained:
    """Return the training of a model with this number of layers."""
    return Trained(
        induction,
        keys={"model.num_layers": num_layers, "model.unroll": num_layers},
        data=write_documents,
        score=repeated_losses,
        quick={
            "data.max_length": LENGTH + 1,
            "data.batch_tokens": 8 * (LENGTH + 1),
            "data.train_split": "train[:200]",
            "data.validation_split": "val[:50]",
            "model.num_layers": num_layers,
            "model.vocab_size": 80,
            "model.max_length": LENGTH + 1,
        },
    )


CLAIM = Claim(
    statement="Two layers of attention learn to copy by induction, and one cannot",
    source="Olsson et al. 2022, In-context learning and induction heads; Elhage et al. "
    "2021",
    conditions={"1 layer": condition(1), "2 layers": condition(2)},
    # Olsson et al.: of their models, only that of one layer has no phase change. The
    # figures are our argument: by induction, the loss is near 0. One layer can know
    # which characters have occurred, but not which one followed: of 16 to 32, about
    # ln 20 = 3.0 nats.
    expected=(
        Expected("repeated loss", "2 layers", most=0.5, guess=(0.0, 0.3)),
        Expected(
            "repeated loss", "1 layer", minus="2 layers", least=1.0, guess=(2.0, 3.2)
        ),
    ),
    cost="six minutes on a core",
)
