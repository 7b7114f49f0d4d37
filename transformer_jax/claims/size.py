"""Vaswani et al. 2017, Table 3 C: larger models are better.

The model and its training are those of `bases`, with other widths or one layer in each
stack: 1,400 steps on all pairs, about two epochs, in which no size can overfit. Heads
have a width of 32, and d_ff is twice the width.
"""

from transformer_jax.claims.bases import BASE, base, in_paper
from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.trained import Trained


def of_width(d_model: int) -> Trained:
    """Return the training of a model of this width."""
    return base(
        {
            "model.d_model": d_model,
            "model.d_ff": 2 * d_model,
            "model.num_heads": d_model // 32,
        }
    )


CLAIM = Claim(
    statement="Bigger models are better, in width and in depth",
    source="Vaswani et al. 2017, Table 3 C and Section 6.2",
    conditions={
        "2 layers × 64": of_width(64),
        "2 layers × 128": BASE,
        "2 layers × 192": of_width(192),
        "1 layer × 128": base(
            {
                "model.num_encoder_layers": 1,
                "model.num_decoder_layers": 1,
                "model.unroll": 1,
            }
        ),
    },
    # Table 3 C, perplexity: widths of 256, 512 and 1,024 have 5.75, 4.92 and 4.66
    # (0.16 and 0.05 nats apart); 2, 4 and 6 layers have 6.11, 5.19 and 4.92.
    expected=(
        Expected("loss", "2 layers × 64", "2 layers × 128", least=0, guess=(0.1, 0.6)),
        Expected("loss", "2 layers × 128", "2 layers × 192", least=0, guess=(0.0, 0.3)),
        Expected("loss", "1 layer × 128", "2 layers × 128", least=0, guess=(0.02, 0.4)),
    ),
    cost="twelve minutes on a core",
    paper=in_paper("d_model-256", "base", "d_model-1024", "layers-2"),
)
