import numpy as np
import pytest

from transformer_jax.data.batching import pad
from transformer_jax.data.ragged import Ragged

ROWS = [[5, 6, 7], [], [8], [9, 10, 11, 12, 2], []]


def lists(ragged):
    return [ragged[i].tolist() for i in range(len(ragged))]


def test_rows():
    ragged = Ragged.of(ROWS, np.uint16)
    assert lists(ragged) == ROWS
    assert ragged.values.dtype == np.uint16
    assert ragged.lengths.tolist() == [3, 0, 1, 5, 0]
    assert ragged.offsets.tolist() == [0, 3, 3, 4, 9, 9]
    assert lists(Ragged.of([])) == []
    assert lists(Ragged.join([ragged, Ragged.of([]), ragged])) == ROWS * 2


def test_take():
    ragged = Ragged.of(ROWS)
    for indices in ([3, 0, 1, 3], [4], [], [2, 2]):
        assert lists(ragged.take(np.array(indices, int))) == [ROWS[i] for i in indices]


def test_cut_keeps_the_end():
    ragged = Ragged.of([[3, 4, 2], [2], [5, 6, 7, 2], [8, 9, 10, 11, 2]])
    assert lists(ragged.cut(3, end=2)) == [[3, 4, 2], [2], [5, 6, 2], [8, 9, 2]]
    assert ragged.cut(5, end=2) is ragged
    assert lists(ragged)[3] == [8, 9, 10, 11, 2]


def test_pad():
    rows = Ragged.of(ROWS, np.uint16)
    padded = pad(rows, np.array([3, -1, 0, 1, 3]), length=6, pad_id=0)
    assert padded.dtype == np.int32
    assert padded.tolist() == [[9, 10, 11, 12, 2, 0], [0] * 6, [5, 6, 7, 0, 0, 0], [0] * 6, [9, 10, 11, 12, 2, 0]]
    assert pad(rows, np.array([-1, 1]), length=2, pad_id=9).tolist() == [[9, 9], [9, 9]]
    with pytest.raises(ValueError, match="Example 3 has 5 tokens, its batch 4"):
        pad(rows, np.array([0, -1, 3]), length=4, pad_id=0)
