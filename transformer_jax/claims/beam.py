"""Koehn and Knowles 2017, Section 3.6: wide beams hurt.

One training, that of `bases`, translates 300 captions of the validation split with
three widths of the beam. Normalized scores are log-probabilities divided by the number
of tokens.
"""

from collections.abc import Sequence
from typing import Any

from transformer_jax.claims.bases import base, in_paper
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import Trained
from transformer_jax.predictor import Predictor

SENTENCES = 300


def bleu_and_length(predictor: Predictor, setting: Setting) -> Measurements:
    """Return BLEU, and the words of the translations for each of the references."""
    split = f"val[:{20 if setting.quick else SENTENCES}]"
    task: Any = predictor.task
    batches = task.batches(split, None)
    written: Any = predictor.predict(batches.records)
    scores = task.score({}, [{"text": text} for text in written], batches.references)
    return {
        "bleu_tokenized": float(scores["bleu_tokenized"]),
        "length ratio": length_ratio(written, batches.references),
    }


def length_ratio(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the number of words in all texts, divided by that in the references."""
    words, of_references = (
        sum(len(line.split()) for line in lines) for lines in (texts, references)
    )
    return words / of_references


def condition(beams: int, normalized: bool = False) -> Trained:
    """Return the training, scored with a beam of this width."""
    return base(
        score=bleu_and_length,
        overrides={
            "decoding.beam_size": beams,
            "decoding.length_penalty_form": "power",
            "decoding.length_penalty": float(normalized),
        },
    )


CLAIM = Claim(
    statement="Wide beams hurt, because translations get shorter, and less if scores "
    "are normalized by length",
    source="Koehn and Knowles 2017, Section 3.6",
    conditions={
        "beam 1": condition(1),
        "beam 4": condition(4),
        "beam 50": condition(50),
        "beam 4, normalized": condition(4, normalized=True),
        "beam 50, normalized": condition(50, normalized=True),
    },
    # Koehn and Knowles: for almost all of eight language pairs, BLEU falls beyond a
    # best beam, from 4 to about 30; with normalized scores, the best beams are 30 to
    # 50, and wider ones still lose. "The main cause" are shorter translations.
    expected=(
        Expected(
            "bleu_tokenized", "beam 50", "beam 4", most=0, guess=(-4, 0), paired=True
        ),
        Expected(
            "length ratio",
            "beam 50",
            "beam 4",
            most=0,
            guess=(-0.1, -0.005),
            paired=True,
        ),
        Expected(
            "bleu_tokenized",
            "beam 50, normalized",
            "beam 50",
            least=0,
            guess=(0, 4),
            paired=True,
        ),
    ),
    cost="eight minutes on a core",
    paper=(
        *in_paper("base"),
        "python scripts/evaluate.py --workdir=runs/base --config.decoding.beam_size=50",
    ),
)
