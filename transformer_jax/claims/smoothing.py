"""Vaswani et al. 2017, Section 5.4: label smoothing.

The model and its training are those of `bases`. The rules are about two epochs of all
pairs: like the paper's model, it does not over-fit. The two conditions with 4,000
pairs, read twenty times, have no rule: there, smoothing may also lower the perplexity,
because it regularizes. Perplexity is that of the cross-entropy without smoothing, and
accuracy the share of tokens that are the most probable ones.
"""

from typing import Any

import jax

from transformer_jax.claims import measuring
from transformer_jax.claims.bases import FEW, base, in_paper
from transformer_jax.claims.claim import Claim, Expected, Measurements, Setting
from transformer_jax.claims.trained import validation_scores
from transformer_jax.predictor import Predictor


def with_accuracy(predictor: Predictor, setting: Setting) -> Measurements:
    """Return the scores on the validation split, with the accuracy in percent."""
    task: Any = predictor.task
    begin = measuring.begin_id(predictor)

    @jax.jit
    def count(params: Any, batch: measuring.Batch) -> tuple[jax.Array, jax.Array]:
        logits = measuring.logits_of(task.model, params, batch, begin)
        return measuring.correct(logits, batch)

    right = tokens = 0
    for batch in measuring.batches_of(
        predictor, predictor.config.data.validation_split
    ):
        of_batch = count(predictor.params, batch)
        right += int(of_batch[0])
        tokens += int(of_batch[1])
    return {
        **validation_scores(predictor, setting),
        "accuracy": 100 * right / tokens,
    }


ALL, SMOOTHED = "no smoothing", "smoothing 0.1"
NONE = {"training.label_smoothing": 0.0}

CLAIM = Claim(
    statement="Label smoothing raises perplexity, and improves accuracy and BLEU",
    source="Vaswani et al. 2017, Section 5.4 and Table 3 D",
    conditions={
        ALL: base(NONE, score=with_accuracy),
        SMOOTHED: base(score=with_accuracy),
        "few pairs, no smoothing": base({**FEW, **NONE}, score=with_accuracy),
        "few pairs, smoothing 0.1": base(FEW, score=with_accuracy),
    },
    # Table 3 D, ε = 0 and 0.1: perplexity 4.67 and 4.92, 5 % more; BLEU 25.3 and 25.8.
    # The paper has no figures of accuracy.
    expected=(
        Expected("perplexity", SMOOTHED, minus=ALL, least=0, guess=(0.0, 1.5)),
        Expected("accuracy", SMOOTHED, minus=ALL, least=0, guess=(-0.3, 1.0)),
        Expected("bleu_tokenized", SMOOTHED, minus=ALL, least=0, guess=(-0.5, 1.5)),
    ),
    cost="twelve minutes on a core",
    paper=in_paper("smoothing-0", "base"),
)
