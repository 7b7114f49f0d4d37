"""Vaswani et al. 2017, Table 3 B: the width of queries and keys.

The model and its training are those of `bases`: four heads, 1,400 steps on all pairs.
Values keep their width of 32. The paper divides its 64 by two and four; here the keys
are narrower by four and by sixteen, because the effect of the first is small.
"""

from transformer_jax.claims.bases import BASE, base, in_paper
from transformer_jax.claims.claim import Claim, Expected

CLAIM = Claim(
    statement="Narrow keys hurt: the compatibility of a query and a key is not easy to "
    "determine",
    source="Vaswani et al. 2017, Table 3 B and Section 6.2",
    conditions={
        "d_k = 2": base({"model.head_dim": 2}),
        "d_k = 8": base({"model.head_dim": 8}),
        "d_k = 32": BASE,
    },
    # Table 3 B, perplexity with d_k = 16 and 64: 5.16 and 4.92, 0.048 nats apart.
    # "d_k = 8" has the paper's ratio, and no rule: three seeds do not resolve 0.05.
    expected=(
        Expected("loss", "d_k = 2", minus="d_k = 32", least=0, guess=(0.02, 0.2)),
    ),
    cost="nine minutes on a core",
    paper=in_paper("d_k-16", "d_k-32", "base"),
)
