"""Vaswani et al. 2017, Table 3 A: the number of heads, at equal cost.

The model and its training are those of `bases`: two layers of width 128 in each stack,
1,400 steps on all pairs. The heads share the width, so 1, 4 and 32 heads have keys of
128, 32 and 4 numbers; the paper's 1, 8 and 32 heads of 512 have 512, 64 and 16.
"""

from transformer_jax.claims.bases import BASE, base, in_paper
from transformer_jax.claims.claim import Claim, Expected
from transformer_jax.claims.trained import Trained

WIDTH = 128  # of all heads together


def condition(heads: int) -> Trained:
    """Return the training with this number of heads, whose widths add up to WIDTH."""
    head_dim = WIDTH // heads
    return base(
        {
            "model.num_heads": heads,
            "model.head_dim": head_dim,
            "model.value_dim": head_dim,
        }
    )


CLAIM = Claim(
    statement="Several heads are better than one of the same total width, and too many "
    "are worse",
    source="Vaswani et al. 2017, Table 3 A",
    conditions={"1 head": condition(1), "4 heads": BASE, "32 heads": condition(32)},
    # Table 3 A, perplexity with 1, 8 and 32 heads: 5.29, 4.92 and 5.01, which are
    # 0.073 and 0.018 nats more than with 8.
    expected=(
        Expected("loss", "1 head", minus="4 heads", least=0, guess=(0.01, 0.15)),
        Expected("loss", "32 heads", minus="4 heads", least=0, guess=(0.0, 0.1)),
    ),
    cost="nine minutes on a core",
    paper=in_paper("heads-1", "base", "heads-32"),
)
