"""Losses as sums and weights, divided once by the engine over all devices and microbatches.

Shapes: B batch · T target positions · V vocabulary.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(
    logits: Array, labels: Array, weights: Array, *, vocab_size: int, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """Cross-entropy against q = (1 - ε) · onehot(label) + ε / V, in nats: (weighted sum, sum of weights).

    logits (B, T, padded V), labels (B, T), weights (B, T); ids ≥ `vocab_size` are padding and have no part in q.
    Szegedy et al. 2016, Section 7; Vaswani et al. 2017, Section 5.4 (ε = 0.1).
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = log_z - (1 - label_smoothing) * label_logits
    if label_smoothing:
        losses -= label_smoothing * logits[..., :vocab_size].mean(axis=-1)
    weights = weights.astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()
