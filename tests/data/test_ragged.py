import numpy as np

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
    ragged = Ragged.of([[3, 4, 1], [2], [5, 6, 7, 3], [8, 9, 10, 11, 4]])
    assert lists(ragged.cut(3)) == [[3, 4, 1], [2], [5, 6, 3], [8, 9, 4]]
    assert lists(ragged.cut(3, end=False)) == [[3, 4, 1], [2], [5, 6, 7], [8, 9, 10]]
    assert lists(ragged.cut(3, tail=True)) == [row[-3:] for row in lists(ragged)]
    assert ragged.cut(5) is ragged
    assert lists(ragged)[3] == [8, 9, 10, 11, 4]
