"""Vaswani et al. 2017, Section 3.2.1: why scores are divided by √d_k."""

import jax
import jax.numpy as jnp

from transformer_jax.claims.claim import Claim, Computed, Expected, Measurements
from transformer_jax.models.attention import dot_scores, scaled_dot_product_scores

QUERIES, KEYS = 500, 32


def of_width(d_k: int, is_scaled: bool, seed: int) -> Measurements:
    """Measure the softmax over random keys of unit variance.

    Each query has keys of its own, so that all scores are independent.
    """
    query_key, key_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), d_k))
    q = jax.random.normal(query_key, (QUERIES, 1, d_k))
    k = jax.random.normal(key_key, (QUERIES, KEYS, d_k))
    if is_scaled:
        scores = scaled_dot_product_scores(q[:, :, None], k[:, :, None])[:, 0, 0]
    else:
        scores = dot_scores(q, k)[:, 0]
    p = jax.nn.softmax(scores)  # (queries, keys)
    jacobian = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None]
    norms = jnp.linalg.norm(jacobian, axis=(-2, -1))
    return {
        "variance": float(scores.var()),
        "variance / d_k": float(scores.var()) / d_k,
        "largest weight": float(p.max(axis=-1).mean()),
        "norm of the Jacobian": float(jnp.median(norms)),
    }


def condition(d_k: int, is_scaled: bool) -> Computed:
    def measure(seed: int, quick: bool) -> Measurements:
        return of_width(d_k, is_scaled, seed)

    return Computed(measure, {"d_k": d_k, "scaled": is_scaled})


WIDTHS = (4, 16, 64, 256, 1024)
plain = {f"d_k = {width}": condition(width, is_scaled=False) for width in WIDTHS}
scaled = {f"d_k = {width}, scaled": condition(width, True) for width in WIDTHS}

CLAIM = Claim(
    statement="Without the division by √d_k, scores have the variance d_k, and the "
    "softmax saturates",
    source="Vaswani et al. 2017, Section 3.2.1 and footnote 4",
    conditions={**plain, **scaled},
    expected=(
        *(
            Expected("variance / d_k", name, least=0.9, most=1.1, guess=(0.95, 1.05))
            for name in plain
        ),
        *(
            Expected("variance", name, least=0.9, most=1.1, guess=(0.95, 1.05))
            for name in scaled
        ),
        Expected(
            "largest weight",
            "d_k = 1024",
            minus="d_k = 1024, scaled",
            least=0.5,
            guess=(0.6, 0.9),
        ),
        Expected(
            "norm of the Jacobian",
            "d_k = 1024",
            minus="d_k = 1024, scaled",
            most=-0.05,
            guess=(-0.3, -0.1),
        ),
    ),
    cost="seconds",
)
