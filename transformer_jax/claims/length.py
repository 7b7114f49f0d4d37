"""Bahdanau et al. 2015, Figure 2: attention and long sentences.

The data are joined captions, de–en: every training caption once alone, once in a group
of two, of three and of four, as in docs/results/rnn_attention.md. All models have a
width of 128 and 3,000 words, and train 1,200 steps of 2,048 positions, about five
passes over the captions. The same validation captions are translated alone and in
groups of four.
"""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import Trained, scores_of
from transformer_jax.data.concatenation import concatenate
from transformer_jax.predictor import Predictor

LONGEST = 4  # captions in a line
LANGUAGES = ("de", "en")
SHORT, LONG = "val_short", "val_long"


def joined(setting: Setting) -> Path:
    """Return a folder with the joined captions: the splits train, SHORT and LONG."""
    folder = setting.runs / "data" / "joined"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "joined"
        write(setting.data / "multi30k" / "tok", made)
        # Another process may have been first; its files are the same.
        with contextlib.suppress(OSError):
            made.rename(folder)
    return folder


def write(captions: Path, folder: Path) -> None:
    """Join the captions of the splits train and val, and write SHORT and LONG.

    Lines of one caption come first, and those of LONGEST captions last.
    """
    concatenate(captions, folder, ("train", "val"), LANGUAGES, LONGEST)
    for language in LANGUAGES:
        single = (captions / f"val.{language}").read_text().count("\n")
        lines = (folder / f"val.{language}").read_text().split("\n")[:-1]
        parts = {SHORT: lines[:single], LONG: lines[-(single // LONGEST) :]}
        for split, part in parts.items():
            text = "".join(f"{line}\n" for line in part)
            (folder / f"{split}.{language}").write_text(text)


def by_length(predictor: Predictor, setting: Setting) -> Measurements:
    """Return BLEU of short and of long lines, and the difference."""
    part = "[:20]" if setting.quick else ""
    short, long = (
        scores_of(predictor, f"{split}{part}")["bleu_tokenized"]
        for split in (SHORT, LONG)
    )
    return {
        "BLEU, short": short,
        "BLEU, long": long,
        "BLEU, long − short": long - short,
    }


def condition(model: str, keys: dict[str, Any]) -> Trained:
    """Return the training of a model with these keys."""
    return Trained(
        f"rnn.py:{model},small",
        {
            "model.source_vocab_size": 3000,
            "model.target_vocab_size": 3000,
            "model.d_model": 128,
            "training.steps": 1200,
            "training.evaluate_every": 1200,
            "checkpoint.every": 1200,
            "checkpoint.keep_best": 0,
            "evaluation.checkpoint": "latest",
            "data.validation_split": f"{SHORT}[:200]",
            "data.max_buckets": 4,
            **keys,
        },
        data=joined,
        score=by_length,
        quick={
            "data.train_split": "train[:200]",
            "data.validation_split": f"{SHORT}[:20]",
        },
    )


def recurrent(attention: str, encoder_dim: int) -> Trained:
    """Return the training of a recurrent model with this attention."""
    return condition(
        attention,
        {
            "model.encoder_dim": encoder_dim,
            "model.attention_dim": 128,
            "model.readout": "maxout",  # Bahdanau et al., Section A.2.2
            "model.readout_dim": 128,
            "optimizer.learning_rate": 2e-3,
        },
    )


# so that there is no position that training has hardly seen
TRANSFORMER = {"model.positions": "sinusoidal", "model.embedding_init": "normal"}
MEASURE = "BLEU, long − short"

CLAIM = Claim(
    statement="Attention gains more on long sentences than on short ones",
    source="Bahdanau et al. 2015, Figure 2 and Section 5.1",
    conditions={
        "GRU, no attention": recurrent("none", 128),
        "GRU, additive attention": recurrent("additive", 256),
        "Transformer": condition("transformer", TRANSFORMER),
    },
    # Section 5.1 on Figure 2: without attention, BLEU drops dramatically with the
    # length; RNNsearch-50 loses nothing at 50 words or more. The paper has no
    # Transformer, hence no rule for it. The guess is from one run of each at twice the
    # size: 9.6 points, from at most ten words to more than fifty.
    expected=(
        Expected(
            MEASURE,
            "GRU, additive attention",
            minus="GRU, no attention",
            least=0,
            guess=(2, 12),
        ),
    ),
    cost="half an hour on a core",
)
