"""Character noise in the input of models of words, subwords and characters.

Three kinds of classifiers of questions (TREC, 4,907 for training, 545 for validation)
and of phrases (SST-2, the first 20,000 and the last 1,347): the small Transformer of
configs/word_vectors.py over words (2 layers, 50 wide); BERT over subwords, fine-tuned
from the small pre-training of `pretraining`; and the first again over characters, 128
wide, on up to 256 of them. In the validation texts, 0, 10 or 30 % of the letters are
replaced by others, or swapped with a neighbour.
"""

import random
import string
from collections.abc import Callable
from typing import Any

from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.pretraining import fine_tuned, pretrained
from transformer_jax.claims.trained import Trained
from transformer_jax.predictor import Predictor

RATES = (0.1, 0.3)


def replaced(text: str, rate: float, draw: random.Random) -> str:
    """Replace each letter by another one, in lower case, with probability `rate`."""
    return "".join(
        draw.choice(string.ascii_lowercase.replace(letter.lower(), ""))
        if letter.isalpha() and draw.random() < rate
        else letter
        for letter in text
    )


def swapped(text: str, rate: float, draw: random.Random) -> str:
    """Swap letters with the next one in the word, so that a share of about `rate` move.

    No letter moves twice. A pair is swapped with probability p; of letters in long
    words, 2p / (1 + p) = `rate` move then.
    """
    letters = list(text)
    i = 0
    while i + 1 < len(letters):
        both = letters[i].isalpha() and letters[i + 1].isalpha()
        if both and draw.random() < rate / (2 - rate):
            letters[i], letters[i + 1] = letters[i + 1], letters[i]
            i += 1
        i += 1
    return "".join(letters)


NOISES: dict[str, Callable[[str, float, random.Random], str]] = {
    "replaced": replaced,
    "swapped": swapped,
}


def robustness(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the accuracy on validation texts without and with noise, and what each
    noise costs.
    """
    split = predictor.config.data.validation_split
    batches = predictor.task.batches(split, None)
    texts = [str(text) for text in batches.records]
    labels = list(batches.references)

    def accuracy(texts: list[str]) -> float:
        rows: list[Any] = predictor.predict(texts)
        pairs = zip(rows, labels, strict=True)
        return sum(row["label"] == label for row, label in pairs) / len(labels)

    measured = {"accuracy": accuracy(texts)}
    for name, noise in NOISES.items():
        for rate in RATES:
            draw = random.Random(f"{setting.seed} {name} {rate}")
            noisy = accuracy([noise(text, rate, draw) for text in texts])
            measured[f"accuracy, {rate:.0%} {name}"] = noisy
            measured[f"lost, {rate:.0%} {name}"] = measured["accuracy"] - noisy
    return measured


SPLITS = {
    "TREC": {},
    "SST-2": {
        "data.train_split": "train[:20000]",
        "data.validation_split": "train[98%:]",
        "training.steps": 1500,
    },
}
CHARACTERS = {
    "data.tokenizer": "characters",
    "data.max_length": 256,
    "data.batch_tokens": 2048,
    "model.vocab_size": 200,
    "model.max_length": 256,
    "model.d_model": 128,
    "model.d_ff": 512,
    "model.num_heads": 4,
    "model.head_dim": 32,
    "model.value_dim": 32,
    "model.dtype": "bfloat16",
    "training.steps": 2000,
}


def conditions(name: str, task: str) -> dict[str, Trained]:
    """Return the classifiers over words, subwords and characters."""

    def small(keys: dict[str, object]) -> Trained:
        return Trained(
            f"word_vectors.py:task={task}",
            keys={**SPLITS[name], **keys},
            data=task,
            score=robustness,
            quick={
                "data.train_split": "train[:200]",
                "data.validation_split": "train[200:220]",
            },
        )

    return {
        f"{name}, words": small({}),
        f"{name}, subwords": fine_tuned(
            pretrained({}), task, SPLITS[name], score=robustness
        ),
        f"{name}, characters": small(CHARACTERS),
    }


def rule(measure: str, task: str, least: str, guess: tuple[float, float]) -> Expected:
    """Return the rule that words lose at least as much as `least`."""
    return Expected(
        measure, f"{task}, words", minus=f"{task}, {least}", least=0, guess=guess
    )


CLAIM = Claim(
    statement="Misspelled words cost models of words more than models of subwords, "
    "and more than models of characters",
    source="tutorial texts; Belinkov and Bisk 2018 find that noise breaks translation "
    "by characters and subwords alike",
    conditions={**conditions("TREC", "trec"), **conditions("SST-2", "sst2")},
    # A word with a wrong letter is unknown to a model of words. With 10 % of the
    # letters wrong, 0.9⁵ = 59 % of the words of five letters are left.
    expected=(
        rule("lost, 10% replaced", "TREC", "subwords", (-0.05, 0.05)),
        rule("lost, 10% replaced", "TREC", "characters", (0.0, 0.15)),
        rule("lost, 10% replaced", "SST-2", "subwords", (-0.05, 0.05)),
        rule("lost, 10% replaced", "SST-2", "characters", (-0.05, 0.1)),
    ),
    cost="quarter of an hour on a core, and five minutes of pre-training",
)
