"""Plans of windows and packed rows: every token once an epoch, and the same batches
from the same numbers.
"""

import numpy as np
import pytest

from transformer_jax.data.packing import PackedPlan, WindowPlan, best_fit_decreasing
from transformer_jax.data.ragged import Windows


def epoch(plan, number=0):
    return [plan.batch(i) for i in range(number * len(plan), (number + 1) * len(plan))]


def rows_of(plan, number=0):
    """Return {row: [(owner, start, stop), …]} of an epoch, in the order of the
    epoch.
    """
    found = {}
    for batch in epoch(plan, number):
        windows, counts = plan.windows(batch)
        assert len(counts) == len(batch.indices) == plan.shapes[0][0]
        assert ((counts == 0) == (batch.indices < 0)).all()
        parts = np.split(np.stack(windows, axis=1), np.cumsum(counts)[:-1])
        found |= {
            int(i): [tuple(part) for part in own.tolist()]
            for i, own in zip(batch.indices, parts, strict=True)
        }
    found.pop(-1, None)
    return found


def starts_of(plan, number=0):
    return [start for ((_, start, _),) in rows_of(plan, number).values()]


@pytest.mark.parametrize("positions", [7, 12, 13, 19, 20, 101])
def test_windows_are_full_and_shuffled(positions):
    plan, count = WindowPlan(positions, 7, rows=3, seed=5), max(1, (positions - 6) // 7)
    offsets, orders = set(), set()
    for number in range(60):
        found = rows_of(plan, number)
        assert all(
            owner == 0 and stop == start + 7
            for ((owner, start, stop),) in found.values()
        )
        starts = sorted(starts_of(plan, number))
        assert starts[0] >= 0
        assert starts[-1] + 7 <= positions
        assert np.diff(starts).tolist() == [7] * (count - 1)
        offsets.add(starts[0])
        orders.add(tuple(found))
    assert offsets == set(range(min(7, positions - 7 * count + 1)))
    assert len(orders) > min(count - 1, 30)


def plan_of(kind, seed=5):
    if kind == "windows":
        return WindowPlan(101, 7, rows=3, seed=seed)
    return PackedPlan(some_windows(), 11, rows=3, seed=seed)


def some_windows(length=11, count=101):
    """Return the windows of documents of 1 to 3 · length tokens."""
    lengths = np.random.default_rng(0).integers(1, 3 * length, count)
    return Windows.over(lengths, np.full(count, length), length)


@pytest.mark.parametrize("kind", ["windows", "packed"])
def test_a_host_may_have_only_filler_rows(kind):
    plan = plan_of(kind)
    windows, counts = plan.windows(plan.batch(0)._replace(indices=np.array([-1, -1])))
    assert [len(x) for x in windows] == [0, 0, 0]
    assert counts.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["windows", "packed"])
def test_batches_depend_on_seed_and_number_only(kind):
    straight, jumping = plan_of(kind), plan_of(kind)
    batches = epoch(straight) + epoch(straight, 1)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    expected = [
        [x.tolist() for x in (*windows, counts)]
        for windows, counts in map(straight.windows, batches)
    ]
    for i in np.random.default_rng(1).permutation(len(batches)):
        windows, counts = jumping.windows(jumping.batch(i))
        assert [x.tolist() for x in (*windows, counts)] == expected[i]
        np.testing.assert_array_equal(jumping.batch(i).indices, batches[i].indices)
    assert rows_of(straight) != rows_of(straight, 1)
    assert rows_of(plan_of(kind, 6)) != rows_of(straight)


def test_a_text_too_short_for_a_window():
    with pytest.raises(ValueError, match="6 positions are too few for a window of 7"):
        WindowPlan(6, 7, 3, seed=0)


@pytest.mark.parametrize("seed", [None, 3])
def test_packed_rows_hold_every_window_once(seed):
    windows = some_windows()
    plan = PackedPlan(windows, 11, rows=3, seed=seed)
    tokens = windows.lengths.sum()
    for number in range(3):
        found = rows_of(plan, number)
        assert sorted(found) == list(range(plan.count))
        assert sorted(window for row in found.values() for window in row) == sorted(
            zip(*(x.tolist() for x in windows), strict=True)
        )
        assert all(
            sum(stop - start for _, start, stop in row) <= 11 for row in found.values()
        )
    assert plan.fill == tokens / (11 * plan.count) > 0.98
    assert (list(found) == sorted(found)) == (seed is None)


def test_windows_of_equal_length_take_each_others_places():
    """In different epochs, a window of one token meets different others; without a
    seed, the order is kept.
    """
    windows = Windows.over(np.array(15 * [4] + 15 * [1]), np.full(30, 5), 5)
    plan = PackedPlan(windows, 5, rows=4, seed=1)
    partners = {
        row[0][0]
        for number in range(30)
        for row in rows_of(plan, number).values()
        if row[1][0] == 15
    }
    assert len(partners) > 10
    plan = PackedPlan(windows, 5, rows=4, seed=None)
    assert list(rows_of(plan).values()) == [
        [(i, 0, 4), (15 + i, 0, 1)] for i in range(15)
    ]
    assert rows_of(plan, 1) == rows_of(plan)


def packed_one_by_one(counts):
    """Return the rows, each with the lengths of its items, by the definition of best
    fit decreasing.
    """
    room, rows = len(counts) - 1, []
    for length in np.repeat(np.arange(room + 1), counts)[::-1].tolist():
        fitting = [row for row in rows if sum(row) + length <= room]
        if not fitting:
            rows.append(fitting := [])
        else:
            fitting = max(fitting, key=sum)
        fitting.append(length)
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_each_item_goes_where_it_leaves_least_room(seed):
    """Rows with equal room may be exchanged, so compare how full they are."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, draw.integers(1, 9), 14) * draw.integers(0, 2, 14)
    counts[0] = 0
    lengths = np.repeat(np.arange(14), counts)[::-1]
    found = np.bincount(best_fit_decreasing(counts), lengths)
    assert sorted(found.tolist()) == sorted(map(sum, packed_one_by_one(counts)))


def test_packing_is_known_where_it_is_small():
    """Lengths 5, 4, 4, 3, 2, 1, 1 in rows of 6: {5, 1}, {4, 2}, {4, 1}, {3}; the
    second 1 fits best beside a 4.
    """
    assert best_fit_decreasing(np.array([0, 2, 1, 1, 2, 1, 0])).tolist() == [
        0,
        1,
        2,
        3,
        1,
        0,
        2,
    ]
    assert best_fit_decreasing(np.array([0, 0])).tolist() == []
