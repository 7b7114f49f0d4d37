import numpy as np

from transformer_jax.data.ragged import Ragged, Windows

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
    assert lists(ragged.cut(3, begin=True, tail=True)) == [
        row[:1] + row[-2:] if len(row) > 3 else row for row in lists(ragged)
    ]
    assert ragged.cut(5) is ragged
    assert lists(ragged)[3] == [8, 9, 10, 11, 4]


def test_rows_beside_each_other():
    parts = [Ragged.of(ROWS), Ragged.of(ROWS[::-1]), Ragged.repeated(7, 5)]
    assert lists(parts[2]) == [[7]] * 5
    together = Ragged.beside(parts)
    assert lists(together) == [
        a + b + [7] for a, b in zip(ROWS, ROWS[::-1], strict=True)
    ]
    assert lists(Ragged.beside(parts[:1])) == ROWS
    assert lists(Ragged.beside([Ragged.of([]), Ragged.of([])])) == []
    assert (
        Ragged.beside(
            [Ragged.of(ROWS, np.int16), Ragged.of(ROWS, np.int64)]
        ).values.dtype
        == np.int64
    )


def test_the_first_values():
    ragged, counts = Ragged.of(ROWS), np.array([2, 3, 0, 5, 0])
    assert lists(ragged.first(counts)) == [
        row[:n] for row, n in zip(ROWS, counts, strict=True)
    ]
    assert lists(ragged.first(2)) == [row[:2] for row in ROWS]
    assert lists(ragged) == ROWS


def test_windows_are_those_of_a_loop():
    """The loop is that of `convert_examples_to_features` in run_squad.py of
    google-research/bert.
    """
    for stride in (1, 2, 3, 5):
        lengths, rooms = (
            grid.ravel() for grid in np.meshgrid(np.arange(14), np.arange(stride, 8))
        )
        expected = []
        for text, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
            start = 0
            while True:
                size = min(length - start, room)
                expected.append((text, start, start + size))
                if start + size == length:
                    break
                start += min(size, stride)
        found = Windows.over(lengths, rooms, stride)
        assert list(zip(*(x.tolist() for x in found), strict=True)) == expected


def test_slices():
    rows = [[5, 6, 7], [], [8], [9, 10, 11, 12, 2]]
    indices, starts, stops = np.array(
        [[3, 1, 4], [0, 0, 3], [1, 0, 0], [3, 0, 5], [2, 0, 1], [3, 2, 3]]
    ).T
    found = Ragged.of(rows).parts(Windows(indices, starts, stops))
    assert [found[i].tolist() for i in range(6)] == [
        rows[i][a:b] for i, a, b in zip(indices, starts, stops, strict=True)
    ]
