"""Vaswani et al. 2017, Section 3.5; Shaw et al. 2018; Su et al. 2021: positions.

Two Transformers of configs/dates.py train for 500 steps, with and without positions.
Five language models of characters, configs/gpt.py:shakespeare-cpu with embeddings of
unit variance, train for 1,000 steps on windows of 64 characters. They are scored on the
same characters of the validation split twice: with the 32 to 63 characters before each
as context, and with the 64 to 127 before it. The second score needs positions up to
127; of learned ones, the rows from 64 on exist but were never trained.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import Trained, validation_scores
from transformer_jax.data.running_text import read_text
from transformer_jax.predictor import Predictor

CONTEXT = 64
ROWS = 64  # windows that are scored at a time


def shuffled(text: str, seed: int) -> str:
    """Return a text with its characters in random order."""
    order = np.random.default_rng(seed).permutation(len(text))
    return "".join(text[i] for i in order)


def scores_and_order(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the scores on the validation split, and the share of 200 outputs that stay
    the same if the characters of the source are shuffled.
    """
    task: Any = predictor.task
    columns = task.columns(predictor.config.data.validation_split)
    sources = list(columns["source"][:200])
    mixed = [shuffled(source, i) for i, source in enumerate(sources)]
    pairs = zip(predictor.predict(sources), predictor.predict(mixed), strict=True)
    unchanged = float(np.mean([before == after for before, after in pairs]))
    return {**validation_scores(predictor, setting), "unchanged": unchanged}


def windows(tokens: np.ndarray, length: int, stride: int) -> np.ndarray:
    """Return windows (R, length + 1) that start `stride` tokens apart."""
    starts = np.arange(0, len(tokens) - length, stride)
    return tokens[starts[:, None] + np.arange(length + 1)[None]]


def mean_loss(
    model: Any, params: Any, tokens: np.ndarray, length: int, stride: int
) -> float:
    """Return the mean cross-entropy of tokens, in nats.

    They are predicted in windows of `length` that start `stride` apart. Only the last
    `stride` of a window count, which have at least `length` - `stride` tokens before
    them.
    """

    @jax.jit
    def total(rows: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, rows[:, :-1])[:, -stride:]
        targets = rows[:, 1:][:, -stride:, None]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=2).sum()

    rows = windows(tokens, length, stride)
    whole = max(len(rows) // ROWS, 1)
    parts = [total(jnp.asarray(part)) for part in np.array_split(rows, whole)]
    return float(np.sum(parts)) / (len(rows) * stride)


def scores_at_lengths(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the loss in windows of the training's length and of twice that."""
    task: Any = predictor.task
    split = predictor.config.data.validation_split
    text = read_text(task.corpus, "text", split, "windows", sized=False)
    tokens = text.documents.values
    length = predictor.config.data.max_length
    arguments = (task.model, predictor.params, tokens)
    short = mean_loss(*arguments, length, length // 2)
    long = mean_loss(*arguments, 2 * length, length)
    return {"loss": short, "loss of longer windows": long, "rise": long - short}


def dates(positions: str = "") -> Trained:
    """Return a training on dates with this kind of positions."""
    keys: dict[str, Any] = {"training.steps": 500}
    if positions:
        keys["model.positions"] = positions
    quick = {
        "data.train_split": "train[:200]",
        "data.validation_split": "validation[:20]",
    }
    return Trained("dates.py", keys, score=scores_and_order, quick=quick)


def language_model(positions: str) -> Trained:
    """Return the training of a language model with this kind of positions."""
    return Trained(
        "gpt.py:shakespeare-cpu",
        {
            "model.positions": positions,
            "model.max_length": 2 * CONTEXT,
            # as in Vaswani et al.; sinusoids would drown embeddings of 0.02
            "model.embedding_scale": True,
            "training.steps": 1000,
        },
        data="tinyshakespeare",
        score=scores_at_lengths,
        quick={
            "model.max_length": 64,
            "data.max_length": 32,
            "data.train_split": "input[:1%]",
            "data.validation_split": "input[99%:]",
        },
    )


CLAIM = Claim(
    statement="Without positions order is lost; learned positions are as good as "
    "sinusoidal ones but do not extend to longer texts, and relative and rotary ones "
    "are better and extend",
    source="Vaswani et al. 2017, Section 3.5 and Table 3 (E); Shaw et al. 2018, "
    "Sections 3.2 and 4.2; Su et al. 2021, Section 4.1; Press et al. 2022, Figure 1",
    conditions={
        "dates, sinusoidal": dates(),
        "dates, none": dates("none"),
        "sinusoidal": language_model("sinusoidal"),
        "learned": language_model("learned"),
        "relative": language_model("relative"),
        "rotary": language_model("rotary"),
        "none": language_model("none"),
    },
    expected=(
        # Without positions, an encoder's outputs are permuted like its inputs, and
        # cross-attention does not see the order of the memory.
        Expected("unchanged", "dates, none", least=0.95, guess=(0.98, 1.0)),
        Expected(
            "exact_match",
            "dates, sinusoidal",
            minus="dates, none",
            least=0.3,
            guess=(0.5, 0.95),
        ),
        # Table 3 (E): 25.7 and 25.8 BLEU, and equal perplexities, "nearly identical"
        Expected(
            "loss",
            "learned",
            minus="sinusoidal",
            least=-0.05,
            most=0.05,
            guess=(-0.05, 0.03),
        ),
        # Shaw et al., Table 1: 26.8 against 26.5 BLEU (en–de, base); Su et al., Table
        # 1: 27.5 against 27.3
        Expected("loss", "relative", minus="sinusoidal", most=0, guess=(-0.2, -0.03)),
        Expected("loss", "rotary", minus="sinusoidal", most=0, guess=(-0.2, -0.03)),
        # Rows from 64 on were never trained. Shaw et al. clip distances (at 16 in the
        # base model), so that all distances were trained. Press et al. 2022, Figure 1:
        # rotary positions extend further than sinusoidal ones, but not without end.
        Expected("rise", "learned", least=0.02, guess=(0.05, 0.8)),
        Expected("rise", "relative", most=0.02, guess=(-0.02, 0.02)),
        Expected("rise", "rotary", minus="sinusoidal", most=0, guess=(-0.8, -0.05)),
    ),
    cost="ten minutes on a core",
    paper=tuple(
        f"python scripts/train.py --config=configs/wmt14.py:base "
        f"--workdir=runs/{positions} --config.model.positions={positions}"
        for positions in ("sinusoidal", "learned", "relative", "rotary")
    ),
)
