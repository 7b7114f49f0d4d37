"""Shazeer 2020: gated feed-forward networks, against ReLU, GELU and SiLU.

The model is `shakespeare-cpu` of configs/gpt.py (4 layers, 128 wide, context 64), and
only the feed-forward network differs. All conditions train 1,000 steps on the same
characters. The gated network has two thirds of the hidden units, 341 instead of 512, so
that all models have as many parameters, up to 168 of 811,776.

Differs: The paper pre-trains T5, without biases. Here there are biases.
"""

from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.trained import Trained


def condition(**model: str | int) -> Trained:
    """Return the recipe with keys of its model changed."""
    return Trained(
        "gpt.py:shakespeare-cpu",
        keys={
            "training.steps": 1000,
            "training.evaluate_every": 1000,
            "checkpoint.every": 1000,
            **{f"model.{key}": value for key, value in model.items()},
        },
        data="tinyshakespeare",
        quick={
            "data.train_split": "input[:5000]",
            "data.validation_split": "input[-1000:]",
        },
    )


CLAIM = Claim(
    statement="With as many parameters, a gated feed-forward network (SwiGLU) learns "
    "better than one with ReLU, GELU or SiLU",
    source="Shazeer 2020, Section 3.2 and Table 1",
    conditions={
        "ReLU": condition(activation="relu"),
        "GELU": condition(),
        "SiLU": condition(activation="silu"),
        "SwiGLU": condition(activation="silu", feed_forward="gated", d_ff=341),
    },
    # Shazeer, Table 1, after 65,536 steps: 1.944 nats for SwiGLU, 1.997 for ReLU, 1.983
    # for GELU and 1.994 for SiLU (Swish).
    expected=(
        Expected("loss", "SwiGLU", minus="ReLU", most=0, guess=(-0.06, -0.01)),
        Expected("loss", "SwiGLU", minus="GELU", most=0, guess=(-0.06, -0.01)),
        Expected("loss", "SwiGLU", minus="SiLU", most=0, guess=(-0.07, -0.01)),
    ),
    cost="four minutes on a core",
)
