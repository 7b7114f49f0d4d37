"""Losses. Those of tokens are a weighted sum and a sum of weights; `ctc` is per row.

The training loop divides one sum by the other only once, after adding up all devices
and microbatches.

Shapes: B batch · S source positions · T target positions · D d_model · V vocabulary.
"""

import jax
import jax.numpy as jnp
import optax

from transformer_jax.errors import UserError
from transformer_jax.models.kernels.chunks import expected_logit, sum_in_chunks
from transformer_jax.models.layers import Head

Array = jax.Array


def cross_entropy(
    logits: Array,
    labels: Array,
    weights: Array,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
) -> tuple[Array, Array]:
    """Return the cross-entropy with label smoothing, in nats.

    The result is (weighted sum, sum of weights).

    The target distribution is q = (1 - ε) · onehot(label) + ε / V, where ε is
    `label_smoothing` and V is `vocab_size` (Szegedy et al. 2016, Section 7; Vaswani et
    al. 2017, Section 5.4, with ε = 0.1). Ids ≥ `vocab_size` pad the vocabulary and have
    q = 0.

    logits (…, padded V), labels (…), weights (…), where … are any axes, e.g. (B, T).
    """
    if labels.shape != logits.shape[:-1] or weights.shape != labels.shape:
        raise UserError(
            f"labels {labels.shape} and weights {weights.shape}: must have the shape "
            f"of the logits {logits.shape} without its last axis; add or remove axes"
        )
    logits = logits.astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, axis=-1) - expected_logit(
        logits, labels, vocab_size, label_smoothing
    )
    weights = weights.astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()


def token_cross_entropy(
    head: Head,
    x: Array,
    labels: Array,
    valid: Array,
    label_smoothing: float = 0.0,
) -> tuple[Array, Array]:
    """Return the cross-entropy of the logits head(x): (sum, sum of `valid`).

    The logits are computed in chunks and are never all in memory. x (B, T, D) is the
    output of the model's last layer, labels (B, T), and valid (B, T) is True at the
    positions that count, or has their weights.
    """

    def loss(
        head: Head,
        x: Array,
        labels: Array,
        weights: Array,
    ) -> Array:
        total, _ = cross_entropy(
            head(x),
            labels,
            weights,
            vocab_size=head.vocab_size,
            label_smoothing=label_smoothing,
        )
        return total

    total = sum_in_chunks(loss, head, x, labels, valid)
    return total, valid.sum().astype(jnp.float32)


def correct_tokens(head: Head, x: Array, labels: Array, valid: Array) -> Array:
    """Return the number of labels with the largest logit of head(x).

    The logits are computed in chunks. x (B, T, D), labels (B, T), and valid (B, T) is
    True at the positions that count.
    """

    def correct(head: Head, x: Array, labels: Array, weights: Array) -> Array:
        most_probable = head(x).argmax(axis=-1)
        return ((most_probable == labels) & weights).sum().astype(jnp.float32)

    return sum_in_chunks(correct, head, x, labels, valid)


def binary_cross_entropy(
    logits: Array, labels: Array, valid: Array
) -> tuple[Array, Array]:
    """Return the cross-entropy of sigmoid(logits), in nats: (sum, number).

    logits, labels and valid have the same shape. The label is True for the class whose
    logit is given, and positions count where `valid` is True.
    """
    each = optax.sigmoid_binary_cross_entropy(
        logits.astype(jnp.float32), labels.astype(jnp.float32)
    )
    return jnp.where(valid, each, 0.0).sum(), valid.sum().astype(jnp.float32)


def doubly_stochastic(
    weights: Array,
    valid: Array,
) -> Array:
    """Return Σ_i (1 - Σ_t α_ti)², summed over the batch (Xu et al. 2015, eq. 14).

    It is small if the decoder looks at every position of the source about once.

    weights α (B, T, S) are those of attention; valid (B, T) is True at the target.

    Differs: A position whose weights are all 0 does not count. This is padding of the
    source, or what is outside of all windows of local attention.
    """
    looks = jnp.where(valid[:, :, None], weights, 0).sum(axis=1)
    return jnp.where(looks > 0, jnp.square(1 - looks), 0).sum()


def ctc(
    logits: Array,
    valid: Array,
    labels: Array,
    label_valid: Array,
    blank: int,
) -> tuple[Array, Array]:
    """Return the loss of connectionist temporal classification, -ln P(labels), and
    where it is defined, both (B,).

    At each position of the source, softmax(logits) has the probabilities of a label or
    of none, the id `blank`. P is the sum over all alignments, i.e. sequences of S ids
    that become the labels once equal neighbours are merged and blanks removed (Graves
    et al. 2006, eqs. 3 and 8).

    There is no alignment if the labels and a blank between each pair of equal
    neighbours need more positions than the source has. The loss is then 0 and not
    defined.

    logits (B, S, V), valid (B, S), labels (B, T), label_valid (B, T). Padding follows
    positions and labels.
    """
    # optax selects log-probabilities by a matrix product, which must not round them
    with jax.default_matmul_precision("highest"):
        losses = optax.ctc_loss(
            logits.astype(jnp.float32),
            1.0 - valid,
            labels,
            1.0 - label_valid,
            blank_id=blank,
        )
    is_repeated = (labels[:, 1:] == labels[:, :-1]) & label_valid[:, 1:]
    needed = label_valid.sum(axis=1) + is_repeated.sum(axis=1)
    defined = needed <= valid.sum(axis=1)
    return jnp.where(defined, losses, 0.0), defined
