"""Vaswani et al. 2017, Section 3.2.1: why scores are divided by √d_k.

Random queries and keys show the variance of their products, and what the softmax makes
of it. Two Transformers of configs/dates.py, each with a single head of d_k = 128, train
for 500 steps with and without the division, from the same initial parameters. Inputs of
attention have unit variance there, and so have the first queries and keys.
"""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.claims.changes import unscaled, with_change
from transformer_jax.claims.claim import Claim, Computed, Expected, Measurements
from transformer_jax.claims.trained import Trained
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
    """Return the measurement of random scores of width d_k."""

    def measure(seed: int, quick: bool) -> Measurements:
        return of_width(d_k, is_scaled, seed)

    return Computed(measure, {"d_k": d_k, "scaled": is_scaled})


Unscaled = with_change(unscaled)


def of_training(task: str = "") -> Trained:
    """Return a training on dates with one head of width 128."""
    keys: dict[str, Any] = {
        "model.num_heads": 1,
        "model.head_dim": 128,
        "model.value_dim": 128,
        "training.steps": 500,
    }
    if task:
        keys["task"] = f"transformer_jax.claims.scaling:{task}"
    quick = {
        "data.train_split": "train[:200]",
        "data.validation_split": "validation[:20]",
    }
    return Trained("dates.py", keys, quick=quick)


WIDTHS = (4, 16, 64, 256, 1024)
plain = {f"d_k = {width}": condition(width, is_scaled=False) for width in WIDTHS}
scaled = {f"d_k = {width}, scaled": condition(width, True) for width in WIDTHS}

CLAIM = Claim(
    statement="Without the division by √d_k, scores have the variance d_k, the softmax "
    "saturates, and training is slower",
    source="Vaswani et al. 2017, Section 3.2.1 and footnote 4",
    conditions={
        **plain,
        **scaled,
        "dates, d_k = 128": of_training("Unscaled"),
        "dates, d_k = 128, scaled": of_training(),
    },
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
        # The paper has no figure for it. The first scores have the variance 128, so
        # that the softmax passes little gradient. It does not forbid learning.
        Expected(
            "loss",
            "dates, d_k = 128",
            minus="dates, d_k = 128, scaled",
            least=0,
            guess=(0.0, 0.3),
        ),
    ),
    cost="four minutes on a core",
)
