"""Batch plans, which use every example once and are reproducible from a batch
number; padding; prefetching.
"""

import hashlib
import itertools
import json
import math
import threading

import numpy as np
import pytest

from transformer_jax.data.arrays import Arrays
from transformer_jax.data.batching import (
    Batch,
    Batches,
    BatchPlan,
    Divided,
    entropy,
    label_entropy,
    ladder_lengths,
    lengths_of,
    pad,
    padded_arrays,
    prefetch,
)
from transformer_jax.data.columns import ArrayRecords, WithSources
from transformer_jax.data.ragged import Ragged


def some_lengths(n=1013, streams=2, longest=47, seed=0):
    return np.random.default_rng(seed).integers(1, longest + 1, (n, streams))


def epoch(plan, number=0):
    return [plan.batch(i) for i in range(number * len(plan), (number + 1) * len(plan))]


def examples(batches):
    indices = np.concatenate([batch.indices for batch in batches])
    return indices[indices >= 0]


@pytest.mark.parametrize("seed", [None, 5])
def test_every_kept_example_once_an_epoch_within_its_shape(seed):
    lengths = some_lengths()
    plan = BatchPlan(
        lengths,
        max_lengths=(40, 43),
        tokens=331,
        max_buckets=5,
        rows_multiple=3,
        seed=seed,
    )
    kept = np.flatnonzero((lengths <= (40, 43)).all(axis=1))
    np.testing.assert_array_equal(plan.kept, kept)
    assert plan.dropped == len(lengths) - len(kept) > 0
    assert len(plan.shapes) == 5
    for number in (0, 1, 4):
        batches = epoch(plan, number)
        np.testing.assert_array_equal(np.sort(examples(batches)), kept)
        for _, indices, shape in batches:
            assert (len(indices), *shape) in plan.shapes
            assert len(indices) % 3 == 0
            assert len(indices) * max(shape) <= 331
            assert indices.dtype == np.int64
            assert (lengths[indices[indices >= 0]] <= shape).all()


@pytest.mark.parametrize("seed", [None, 5])
def test_a_batch_has_examples_of_one_group(seed):
    lengths = some_lengths()
    groups = np.random.default_rng(1).integers(0, 3, len(lengths))
    options = {"max_lengths": (40, 43), "tokens": 331, "max_buckets": 5}
    plan = BatchPlan(lengths, **options, seed=seed, groups=groups)
    whole = BatchPlan(lengths, **options, seed=seed)
    assert plan.shapes == whole.shapes
    for number in (0, 3):
        batches = epoch(plan, number)
        assert sorted(examples(batches)) == whole.kept.tolist()
        of_batches = [groups[batch.indices[batch.indices >= 0]] for batch in batches]
        assert all(len(set(found.tolist())) == 1 for found in of_batches)
        assert {int(found[0]) for found in of_batches} == {0, 1, 2}
        for batch in batches:
            indices = batch.indices[batch.indices >= 0]
            assert (lengths[indices] <= batch.shape).all()
    if seed is not None:
        order = [int(groups[batch.indices[0]]) for batch in epoch(plan)]
        assert order != sorted(order)


def test_a_ladder_has_examples_of_one_group_in_their_order():
    lengths = some_lengths(200)
    groups = np.random.default_rng(1).integers(0, 3, len(lengths))
    boundaries = ladder_lengths(64)
    plan = BatchPlan.ladder(lengths, boundaries, 7, groups=groups)
    batches = epoch(plan)
    assert sorted(examples(batches)) == list(range(200))
    for batch in batches:
        indices = batch.indices[batch.indices >= 0]
        assert len(set(groups[indices].tolist())) == 1
        assert indices.tolist() == sorted(indices)
        (padded,) = {ladder_of(length, boundaries) for length in lengths[indices, 0]}
        assert padded == batch.shape[0]


def ladder_of(length, boundaries):
    return next(boundary for boundary in boundaries if boundary >= length)


def test_fill_is_the_useful_share_of_each_stream():
    lengths = some_lengths()
    plan = BatchPlan(lengths, max_lengths=None, tokens=331, seed=1)
    padded = sum(len(indices) * np.array(shape) for _, indices, shape in epoch(plan))
    np.testing.assert_allclose(plan.fill, lengths.sum(axis=0) / padded)
    assert plan.dropped == 0


def test_batch_depends_on_lengths_seed_and_number_only():
    lengths = some_lengths()

    def new(seed=7):
        return BatchPlan(lengths, max_lengths=None, tokens=331, seed=seed)

    straight, jumping = new(), new()
    first, second = epoch(straight), epoch(straight, 1)
    for i in np.random.default_rng(1).permutation(2 * len(jumping)):
        np.testing.assert_array_equal(
            jumping.batch(i).indices, (first + second)[i].indices
        )

    def order(batches):
        return np.concatenate([batch.indices for batch in batches]).tolist()

    assert order(first) != order(second)
    assert order(first) != order(epoch(new(8)))
    assert [batch.shape for batch in first] != sorted(batch.shape for batch in first)


def test_evaluation_keeps_the_order_given_within_a_bucket_and_repeats_it():
    plan = BatchPlan(
        np.array([[3], [9], [2], [9], [3]]),
        max_lengths=None,
        tokens=18,
        max_buckets=2,
        seed=None,
    )
    assert plan.shapes == [(6, 3), (2, 9)]
    assert [batch.indices.tolist() for batch in epoch(plan)] == [
        [0, 2, 4, -1, -1, -1],
        [1, 3],
    ]
    assert [batch.indices.tolist() for batch in epoch(plan, 1)] == [
        [0, 2, 4, -1, -1, -1],
        [1, 3],
    ]
    assert [batch.shape for batch in epoch(plan)] == [(3,), (9,)]


@pytest.mark.parametrize("max_buckets", [1, 2, 3, 4])
def test_boundaries_pad_least_of_all_choices(max_buckets):
    lengths = some_lengths(n=97, longest=11, seed=3)
    widths = lengths.max(axis=1)

    def padded(ends):
        total = 0
        for low, high in itertools.pairwise((0, *ends)):
            inside = lengths[(widths > low) & (widths <= high)]
            rows = 61 // high
            total += (
                -(-len(inside) // rows) * rows * inside.max(axis=0).sum()
                if len(inside)
                else 0
            )
        return total

    choices = [
        (*ends, 11)
        for count in range(max_buckets)
        for ends in itertools.combinations(range(1, 11), count)
    ]
    plan = BatchPlan(
        lengths, max_lengths=None, tokens=61, max_buckets=max_buckets, seed=1
    )
    found = sum(len(indices) * sum(shape) for _, indices, shape in epoch(plan))
    assert found == min(map(padded, choices))


def test_empty_examples_take_a_position():
    plan = BatchPlan(np.zeros((3, 2), int), max_lengths=None, tokens=4, seed=None)
    assert plan.shapes == [(4, 1, 1)]


def test_the_longest_example_must_fit_the_budget():
    lengths = np.array([[3, 4], [5, 17]])
    with pytest.raises(
        ValueError,
        match=r"data.batch_tokens=33 .* 2 row\(s\) .* 17 positions: set 34 or more",
    ):
        BatchPlan(lengths, max_lengths=None, tokens=33, rows_multiple=2, seed=0)
    assert (
        len(BatchPlan(lengths, max_lengths=(5, 16), tokens=33, rows_multiple=2, seed=0))
        == 1
    )


@pytest.mark.parametrize("lengths", [np.zeros((0, 2), int), np.ones(3, int)])
def test_lengths_have_examples_and_streams(lengths):
    with pytest.raises(ValueError, match=r"must be \(examples, streams\)"):
        BatchPlan(lengths, max_lengths=None, tokens=8, seed=0)


def test_dropping_all_examples_is_an_error():
    with pytest.raises(
        ValueError, match=r"All 2 examples exceed max_lengths=\(3,\): raise the limits"
    ):
        BatchPlan(np.array([[4], [5]]), max_lengths=(3,), tokens=8, seed=0)


@pytest.mark.parametrize(
    "plan",
    [
        BatchPlan(np.ones((7, 1), int), max_lengths=None, tokens=2, seed=0),
        BatchPlan.ladder(np.ones(7, int), (8,), rows=2),
    ],
)
def test_batches_know_their_number_and_are_counted_from_zero(plan):
    assert len(plan) > 1
    assert [batch.number for batch in epoch(plan) + epoch(plan, 1)] == list(
        range(2 * len(plan))
    )
    assert all(
        (len(indices), *shape) in plan.shapes for _, indices, shape in epoch(plan)
    )
    with pytest.raises(ValueError, match="no batch -1"):
        plan.batch(-1)


def test_ladder_puts_an_example_by_its_own_length_alone():
    plan = BatchPlan.ladder(
        np.array([5, 20, 8, 1, 9, 2]), boundaries=(8, 16, 32), rows=3
    )
    assert plan.shapes == [(3, 8), (3, 16), (3, 32)]
    assert [(batch.indices.tolist(), batch.shape) for batch in epoch(plan)] == [
        ([0, 2, 3], (8,)),
        ([5, -1, -1], (8,)),
        ([4, -1, -1], (16,)),
        ([1, -1, -1], (32,)),
    ]
    assert BatchPlan.ladder(np.array([20]), boundaries=(8, 16, 32), rows=3).shapes == [
        (3, 32)
    ]


def test_ladder_of_several_streams_goes_by_the_first_alone():
    lengths = np.array([[5, 30], [20, 1], [8, 9], [1, 17], [9, 0]])
    plan = BatchPlan.ladder(lengths, boundaries=(8, 16, 32), rows=2)
    assert plan.shapes == [(2, 8, 32), (2, 16, 8), (2, 32, 8)]
    assert [(batch.indices.tolist(), batch.shape) for batch in epoch(plan)] == [
        ([0, 2], (8, 32)),
        ([3, -1], (8, 32)),
        ([4, -1], (16, 8)),
        ([1, -1], (32, 8)),
    ]
    assert plan.fill == pytest.approx(
        ((5 + 20 + 8 + 1 + 9) / 128, (30 + 1 + 9 + 17 + 0) / 160)
    )
    with pytest.raises(ValueError, match="Example 1 has 17 positions, the limit is 16"):
        BatchPlan.ladder(np.array([[3, 3], [4, 17]]), boundaries=(8, 16), rows=3)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_divided_plan_has_every_example_once_in_its_shape_and_few_other_rows(rows):
    lengths = np.arange(1, 30)
    whole = BatchPlan.ladder(lengths, [8, 12, 32], rows=8)
    parts = Divided(whole, rows)
    shape = {
        i: batch.shape
        for batch in map(whole.batch, range(len(whole)))
        for i in batch.indices.tolist()
    }
    found = [parts.batch(i) for i in range(len(parts))]
    examples = [i for batch in found for i in batch.indices.tolist() if i >= 0]
    assert sorted(examples) == list(range(29))
    for batch in found:
        assert len(batch.indices) == rows
        assert batch.indices[0] >= 0
        assert (rows, *batch.shape) in parts.shapes
        assert all(shape[i] == batch.shape for i in batch.indices.tolist() if i >= 0)


def test_lengths_of_a_ladder():
    assert ladder_lengths(100) == [8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert ladder_lengths(32) == [8, 12, 16, 24, 32]
    assert ladder_lengths(5) == [5]


def test_ladder_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="Example 1 has 17 positions, the limit is 16"):
        BatchPlan.ladder(np.array([3, 17]), boundaries=(8, 16), rows=3)
    with pytest.raises(ValueError, match="no examples"):
        BatchPlan.ladder(np.array([], int), boundaries=(8, 16), rows=3)


def test_plan_of_a_million_examples():
    plan = BatchPlan(
        some_lengths(n=1_000_000, longest=200), max_lengths=None, tokens=25_000, seed=1
    )
    assert len(plan.kept) == 1_000_000
    assert len(plan.shapes) <= 8
    assert len(np.unique(plan.batch(0).indices)) == len(plan.batch(0).indices)


def test_streams_of_one_length_do_not_choose_buckets():
    """But they bound the rows: 49 positions of an image, and short and long texts."""
    texts = np.repeat([5, 20], 60)
    lengths = np.stack([np.full(120, 49), texts], axis=1)
    plan = BatchPlan(
        lengths, max_lengths=None, tokens=49 * 10, max_buckets=2, seed=None
    )
    assert plan.shapes == [(10, 49, 5), (10, 49, 20)]
    assert plan.fill == (1.0, 1.0)
    # one longer image, and the widest stream decides
    lengths[0, 0] = 50
    plan = BatchPlan(
        lengths, max_lengths=None, tokens=50 * 10, max_buckets=1, seed=None
    )
    assert plan.shapes == [(10, 50, 20)]
    same = np.full((30, 2), [49, 7])
    plan = BatchPlan(same, max_lengths=None, tokens=490, max_buckets=2, seed=None)
    assert plan.shapes == [(10, 49, 7)]
    with pytest.raises(ValueError, match="49 positions: set 49 or more"):
        BatchPlan(same, max_lengths=None, tokens=48, seed=None)


def test_the_search_for_buckets_is_bounded_where_lengths_are_not():
    lengths = np.arange(1, 200_001, 3)[:, None]
    plan = BatchPlan(
        lengths, max_lengths=None, tokens=199_999, max_buckets=3, seed=None
    )
    assert len(plan.shapes) == 3
    assert plan.shapes[-1][1] == lengths.max() == 199_999
    np.testing.assert_array_equal(
        np.sort(examples(epoch(plan))), np.arange(len(lengths))
    )
    assert all(
        (lengths[i[i >= 0]] <= shape).all() and len(i) * shape[0] <= 199_999
        for _, i, shape in epoch(plan)[-99:]
    )


def test_padding_is_zero_and_lengths_say_what_is_valid():
    rows = Ragged.of([[5, 6, 7], [], [8], [9, 10, 11, 12, 0], []], np.uint16)
    indices = np.array([3, -1, 0, 1, 3])
    padded = pad(rows, indices, length=6)
    assert padded.dtype == np.int32
    assert padded.tolist() == [
        [9, 10, 11, 12, 0, 0],
        [0] * 6,
        [5, 6, 7, 0, 0, 0],
        [0] * 6,
        [9, 10, 11, 12, 0, 0],
    ]
    lengths = lengths_of(rows, indices)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [5, 0, 3, 0, 5]
    assert pad(rows, np.array([-1, 1]), length=2).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(
        ValueError, match="Example 3 has 5 positions, but its batch has length 4"
    ):
        pad(rows, np.array([0, -1, 3]), length=4)


def test_arrays_of_a_batch():
    streams = {"source": Ragged.of([[5, 6], [7]]), "target": Ragged.of([[1], [2, 3]])}
    others = {"label": np.array([8, 9]), "tag": Ragged.of([[6, 0], [5]])}
    arrays = padded_arrays(streams, others, Batch(4, np.array([1, -1, 0]), (3, 2)))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "source": [[7, 0, 0], [0, 0, 0], [5, 6, 0]],
        "source_length": [1, 0, 2],
        "target": [[2, 3], [0, 0], [1, 0]],
        "target_length": [2, 0, 1],
        "label": [9, 0, 8],
        "tag": [[5, 0, 0], [0, 0, 0], [6, 0, 0]],
        "index": [1, -1, 0],
    }
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}


def test_prefetch_keeps_order_and_runs_ahead_in_another_thread():
    threads = []

    def produce():
        for i in range(7):
            threads.append(threading.get_ident())
            yield i

    assert list(prefetch(produce(), size=3)) == list(range(7))
    assert set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1


def test_prefetch_raises_in_place():
    def produce():
        yield 1
        raise OSError("broken")

    items = prefetch(produce())
    assert next(items) == 1
    with pytest.raises(OSError, match="broken"):
        next(items)


def test_prefetch_can_be_closed_and_computes_no_more_than_asked():
    made = []
    items = prefetch((made.append(i) or i for i in itertools.count()), size=2)
    assert next(items) == 0
    items.close()
    assert len(made) <= 3
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("prefetch")
    ]


@pytest.mark.parametrize(
    ("records", "references"),
    [
        ((), ()),
        (["ek", "ü \u2028"], ["one", "two"]),
        ([{"b": "1", "a": "2"}], [np.int64(3), {"of": [1.5, None]}]),
    ],
)
def test_the_hash_of_texts_and_objects_is_that_of_their_json(records, references):
    """Checkpoints store it."""
    content = json.dumps(
        [list(records), list(references)], sort_keys=True, default=repr
    )
    expected = hashlib.sha256(content.encode()).hexdigest()
    assert Batches(None, None, records, references).sha256() == expected


def test_sources_beside_references_do_not_change_the_hash():
    """So a run that adds a score keeps its validation data."""
    records = ["ek", "up"]
    references = [["one", "a"], ["two", "b"]]
    beside = WithSources(references, records)
    expected = Batches(None, None, records, references).sha256()
    assert Batches(None, None, records, beside).sha256() == expected
    others = WithSources([["one", "a"], ["two", "c"]], records)
    assert Batches(None, None, records, others).sha256() != expected


def test_the_hash_of_arrays_needs_no_records():
    class Content(Arrays):
        def __getitem__(self, i):
            raise AssertionError("an entry is read")

    images = np.arange(24).reshape(2, 3, 4)

    def sha256(values, references=("a", "b")):
        records = ArrayRecords("image", Content(values))
        return Batches(None, None, records, references).sha256()

    seen = {sha256(images), sha256(images + 1), sha256(images, ("a", "c"))}
    assert sha256(images) in seen
    assert len(seen) == 3


def test_entropy_of_token_frequencies():
    halves_and_quarters = np.array([5, 5, 0, 9], np.uint16)
    assert entropy(halves_and_quarters) == pytest.approx(1.5 * math.log(2))
    assert entropy(np.zeros(7, np.int32)) == 0.0
    assert entropy(np.zeros(0, np.int32)) == 0.0


def test_labels_have_an_entropy_and_numbers_have_none():
    labels = label_entropy(np.array([1, 0, 1, 0], np.int32))
    assert labels is not None
    assert labels() == pytest.approx(math.log(2))
    assert label_entropy(np.array([0.5, 2.0], np.float32)) is None
    assert label_entropy(None) is None
