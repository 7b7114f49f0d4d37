"""The loss of connectionist temporal classification, by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import labellings
from transformer_jax import losses

S, V, BLANK = 5, 4, 2
LABELS = [(0,), (1, 3), (3, 3), (0, 1, 3), (1, 1, 1), (3, 3, 0, 0), ()]
LENGTHS = [5, 4, 3, 3, 4, 5, 2]
LOGITS = np.random.default_rng(0).normal(size=(len(LABELS), S, V)).astype(np.float32)
VALID = np.arange(S) < np.array(LENGTHS)[:, None]


def padded(fill):
    labels = np.full((len(LABELS), 4), fill, np.int32)
    for row, of_row in zip(labels, LABELS, strict=True):
        row[: len(of_row)] = of_row
    counts = np.array([*map(len, LABELS)])
    return labels, np.arange(4) < counts[:, None]


@jax.jit
def ctc(logits, labels, label_valid):
    return losses.ctc(logits, jnp.asarray(VALID), labels, label_valid, BLANK)


def test_the_loss_is_of_the_sum_over_all_alignments():
    """Three equal labels need five positions, and four with two pairs of equal
    neighbours need six: these two rows have no alignment.
    """
    found, defined = ctc(LOGITS, *padded(0))
    assert defined.tolist() == [True, True, True, True, False, False, True]
    for row, labels in enumerate(LABELS):
        shares = labellings.probabilities(LOGITS[row, : LENGTHS[row]], BLANK)
        assert (labels in shares) == defined[row]
        expected = -np.log(shares.get(labels, 1))
        assert found[row] == pytest.approx(expected, rel=1e-5)


def test_padding_changes_nothing():
    found, _ = ctc(LOGITS, *padded(0))
    changed = np.where(VALID[:, :, None], LOGITS, 7)
    same, _ = ctc(changed, *padded(3))
    np.testing.assert_allclose(same, found, rtol=1e-6)


def test_a_row_without_an_alignment_has_no_gradient():
    labels, label_valid = padded(0)

    @jax.jit
    @jax.grad
    def gradient(logits):
        return losses.ctc(logits, jnp.asarray(VALID), labels, label_valid, BLANK)[
            0
        ].sum()

    of_rows = np.abs(gradient(LOGITS)).max(axis=(1, 2))
    assert (of_rows > 0).tolist() == [True, True, True, True, False, False, True]
    assert np.isfinite(of_rows).all()


def test_no_matrix_product_is_rounded_on_accelerators():
    program = str(jax.make_jaxpr(ctc)(LOGITS, *padded(0)))
    products = program.count("dot_general[")
    highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert products == program.count("precision=")
    assert products == highest > 0
