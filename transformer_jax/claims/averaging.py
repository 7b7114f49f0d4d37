"""Vaswani et al. 2017, Section 6.1: the average of the last checkpoints.

One training, that of `bases` with the paper's schedule, whose rate falls with the root
of the steps and is still a third of its peak at the end. It is scored with its last
parameters and with the average of five checkpoints, 70 steps apart.
"""

from transformer_jax.claims.bases import base, in_paper
from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.trained import Trained

LAST, AVERAGE = "last checkpoint", "average of five"


def condition(checkpoint: str) -> Trained:
    """Return the training, scored with this kind of checkpoint."""
    return base(
        {
            "optimizer.schedule": "inverse_sqrt",
            "checkpoint.every": 70,
            "checkpoint.keep_latest": 5,
        },
        quick={"checkpoint.every": 1},
        overrides={"evaluation.checkpoint": checkpoint, "evaluation.average_last": 5},
    )


CLAIM = Claim(
    statement="The average of the last checkpoints is better than the last one",
    source="Vaswani et al. 2017, Section 6.1",
    conditions={LAST: condition("latest"), AVERAGE: condition("average")},
    # The paper averages and gives no gain. Averaging removes noise of the last steps,
    # which a rate that is still large leaves; so the gain is seen in each run.
    expected=(
        Expected("loss", AVERAGE, minus=LAST, most=0, guess=(-0.1, -0.01), paired=True),
        Expected(
            "bleu_tokenized", AVERAGE, minus=LAST, least=0, guess=(0.1, 2), paired=True
        ),
    ),
    cost="four minutes on a core",
    paper=(
        *in_paper("base"),
        "python scripts/evaluate.py --workdir=runs/base "
        "--config.evaluation.checkpoint=latest",
        "python scripts/evaluate.py --workdir=runs/base "
        "--config.evaluation.checkpoint=average --config.evaluation.average_last=5",
    ),
)
