"""Xiong et al. 2020: what learning-rate warm-up is for."""

from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.trained import Trained

# Not learned: the same probability for every token, ln(10,000).
DIVERGED = {"loss": 9.2, "bleu_tokenized": 0.0}


def condition(norm: str, warmup: int) -> Trained:
    """Return the training with this norm and this number of warm-up steps."""
    return Trained(
        f"multi30k.py:en-de,{norm}",
        keys={
            "model.num_encoder_layers": 6,
            "model.num_decoder_layers": 6,
            "model.unroll": 6,
            # with inverse_sqrt, a run without warm-up would be at 5e-3 for one step
            "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": warmup,
            "training.steps": 600,
            "training.evaluate_every": 600,
            "checkpoint.every": 600,
            "data.batch_tokens": 4096,
            "evaluation.checkpoint": "latest",
        },
        data="multi30k/tok",
        diverged=DIVERGED,
        quick={
            "optimizer.warmup_steps": min(warmup, 1),
            "data.train_split": "train[:200]",
            "data.validation_split": "val[:20]",
        },
    )


CLAIM = Claim(
    statement="Post-LN fails without warm-up, and pre-LN does not",
    source="Xiong et al. 2020, Sections 3 and 4",
    conditions={
        "post-LN": condition("post", 0),
        "post-LN, warm-up": condition("post", 500),
        "pre-LN": condition("pre", 0),
        "pre-LN, warm-up": condition("pre", 500),
    },
    # Xiong et al., Section 3.2 and Figure 2: 8.45 against about 34 BLEU on IWSLT14 for
    # post-LN with Adam. There, a warm-up of 500 steps gives 31.16 at a rate of 5e-4 and
    # 2.77 at 1e-3.
    expected=(
        Expected(
            "loss", "post-LN", minus="post-LN, warm-up", least=0.3, guess=(0.5, 4.0)
        ),
        Expected(
            "loss", "pre-LN", minus="pre-LN, warm-up", most=0.3, guess=(-0.5, 0.3)
        ),
    ),
    cost="an hour on a core",
    paper=(
        "python scripts/train.py --config=configs/wmt14.py:base "
        "--workdir=runs/base --config.optimizer.warmup_steps=0",
    ),
)
