"""Several data sets in one training: weights, files, prefixes, and the plan."""

import re
from pathlib import Path

import numpy as np
import pytest

from transformer_jax.config import make_task, parse
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.files import DataError
from transformer_jax.data.mixture import (
    BLOCK,
    Mixture,
    check_prefixes,
    counts_of,
    mixture_files,
    weights_of,
)
from transformer_jax.data.references import References

# Weights.


def test_a_data_set_has_a_name_and_a_weight():
    assert weights_of(("en-de=4", "sick=0.5")) == {"en-de": 4.0, "sick": 0.5}
    assert weights_of(()) == {}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("sick",), "'sick' is no data set with a weight: write NAME=WEIGHT"),
        (("=1",), "'=1' is no data set"),
        (("a/b=1",), "'a/b=1' is no data set"),
        (("a:b=1",), "'a:b=1' is no data set"),
        (("sick=1", "trec=1", "sick=2"), "sick is named twice: give"),
        (("sick=0", "trec=0"), "'sick=0' has the weight '0': it must be a number abov"),
        (("sick=-1", "trec=2"), "'sick=-1' has the weight '-1': it must be a number"),
        (("sick=nan",), "has the weight 'nan'"),
        (("sick=inf",), "has the weight 'inf'"),
        (("sick=many",), "has the weight 'many'"),
        (("sick=",), "has the weight ''"),
        (("sick=1", "trec=1e-4"), "trec has less than one of 1000 batches"),
    ],
)
def test_what_is_no_weight_is_refused(entries, message):
    with pytest.raises(DataError, match=re.escape(message)):
        weights_of(entries)


def test_counts_are_exact_shares_rounded_up_or_down():
    assert counts_of([1, 1, 1], 10).tolist() == [4, 3, 3]
    assert counts_of([5, 3, 2], 10).tolist() == [5, 3, 2]
    assert counts_of([1e308, 1e308], 3).tolist() == [2, 1]
    draw = np.random.default_rng(0)
    for _ in range(50):
        weights = draw.exponential(size=draw.integers(1, 9))
        counts = counts_of(weights.tolist())
        assert counts.sum() == BLOCK
        assert (abs(counts - BLOCK * weights / weights.sum()) < 1).all()


# The plan.

SIZES = (97, 31, 211)
WEIGHTS = {"a": 5.0, "b": 1.0, "c": 2.5}


def mixed(seed=3, weights=WEIGHTS, sizes=SIZES, max_buckets=3):
    """Return a mixture, its lengths, and the plan of all examples."""
    lengths = np.random.default_rng(0).integers(1, 31, (sum(sizes), 2))
    whole = BatchPlan(
        lengths,
        max_lengths=(29, 29),
        tokens=120,
        max_buckets=max_buckets,
        rows_multiple=2,
        seed=seed,
    )
    return Mixture.of(whole, lengths, sizes, weights, seed), lengths, whole


def data_sets(plan, count):
    """Return the data set of each of the first `count` batches.

    A batch has examples of one.
    """
    ends = np.cumsum(SIZES)
    found = []
    for i in range(count):
        indices = plan.batch(i).indices
        of_rows = np.searchsorted(ends, indices[indices >= 0], side="right")
        (number,) = set(of_rows.tolist())
        found.append(number)
    return np.array(found)


def test_shares_are_the_weights_at_any_time():
    plan, _, _ = mixed()
    count = 2 * BLOCK + 345
    of_batches = data_sets(plan, count)
    weights = np.array(list(WEIGHTS.values()))
    seen = np.cumsum(of_batches[:, None] == np.arange(3), axis=0)
    exact = np.arange(1, count + 1)[:, None] * plan.counts / BLOCK
    assert (abs(seen - exact) < 3).all()
    for block in (1, 2):
        np.testing.assert_array_equal(seen[block * BLOCK - 1], block * plan.counts)
    assert (abs(plan.counts - BLOCK * weights / weights.sum()) < 1).all()
    # the order is not the same in every block
    assert (of_batches[:BLOCK] != of_batches[BLOCK : 2 * BLOCK]).any()


def test_each_data_set_has_its_own_epochs_with_every_example_once():
    plan, lengths, whole = mixed()
    batches = [plan.batch(i) for i in range(BLOCK + 200)]
    assert [batch.number for batch in batches] == list(range(BLOCK + 200))
    first = 0
    for size in SIZES:
        examples = np.arange(first, first + size)
        kept = examples[(lengths[examples] <= 29).all(axis=1)]
        part = whole.part(lengths, np.isin(np.arange(sum(SIZES)), examples))
        assert part.kept.tolist() == kept.tolist()
        assert part.dropped == size - len(kept)
        own = [batch for batch in batches if np.isin(batch.indices, examples).any()]
        assert len(own) > 2 * len(part)
        for epoch in range(len(own) // len(part)):
            these = own[epoch * len(part) : (epoch + 1) * len(part)]
            rows = np.concatenate([batch.indices for batch in these])
            assert sorted(rows[rows >= 0]) == kept.tolist()
        # they are the batches of its plan alone
        for number, batch in enumerate(own):
            alone = part.batch(number)
            np.testing.assert_array_equal(batch.indices, alone.indices)
            assert batch.shape == alone.shape
        first += size


def test_all_data_sets_share_a_few_shapes():
    plan, lengths, whole = mixed(max_buckets=3)
    assert len(whole.shapes) == 3
    assert plan.shapes == whole.shapes
    for i in range(300):
        batch = plan.batch(i)
        assert (len(batch.indices), *batch.shape) in plan.shapes
        rows = batch.indices[batch.indices >= 0]
        assert (lengths[rows] <= batch.shape).all()


def test_a_batch_depends_on_the_seed_and_its_number_alone():
    """So it is the same on every host, and after a restart."""
    plan, _, _ = mixed(seed=3)
    again, _, _ = mixed(seed=3)
    other, _, _ = mixed(seed=4)
    differing = 0
    for i in np.random.default_rng(0).integers(0, 3 * BLOCK, 200).tolist():
        batch = plan.batch(i)
        np.testing.assert_array_equal(batch.indices, again.batch(i).indices)
        rows = other.batch(i).indices
        differing += not np.array_equal(batch.indices, rows)
    assert differing > 150


def test_one_data_set_is_its_own_mixture():
    plan, _, whole = mixed(sizes=(300,), weights={"a": 7.0})
    for i in (0, 1, len(whole), BLOCK + 1):
        np.testing.assert_array_equal(plan.batch(i).indices, whole.batch(i).indices)


def test_a_data_set_without_examples_that_fit_is_refused():
    lengths = np.ones((9, 2), int)
    lengths[4:6] = 50
    whole = BatchPlan(lengths, max_lengths=(9, 9), tokens=20, seed=0)
    message = "none of the 2 examples of b is left to train on: check its files"
    with pytest.raises(ValueError, match=message):
        Mixture.of(whole, lengths, (4, 2, 3), WEIGHTS, 0)


# Files.

TEXTS = {
    "sick": (["sick a", "sick b", "sick c"], ["yes", "no", "yes"]),
    "trec": (["trec d", "", "trec e"], ["who", "where", "when"]),
}
NAMES = tuple(TEXTS)
PREFIXES = ("sick ", "trec ")


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, columns in TEXTS.items():
        (tmp_path / name).mkdir()
        for column, lines in zip(("inputs", "targets"), columns, strict=True):
            path = tmp_path / name / f"train.{column}"
            path.write_text("\n".join(lines) + "\n")
    return tmp_path


def read(folder, split="train", names=NAMES, prefixes=PREFIXES):
    return mixture_files(folder, split, ("inputs", "targets"), names, prefixes)


def test_data_sets_follow_one_another(folder):
    source = read(folder)
    assert list(source.column("inputs")) == TEXTS["sick"][0] + TEXTS["trec"][0]
    assert list(source.column("targets")) == TEXTS["sick"][1] + TEXTS["trec"][1]
    assert source.column("inputs").sizes == [3, 3]
    assert str(folder / "trec" / "train.targets") in source.where


def test_a_split_may_name_a_data_set_and_a_part(folder):
    assert list(read(folder, "train:trec").column("targets")) == TEXTS["trec"][1]
    assert list(read(folder, "train[1:]:sick").column("targets")) == ["no", "yes"]
    parts = read(folder, "train[:2]")
    assert list(parts.column("targets")) == ["yes", "no", "who", "where"]
    with pytest.raises(DataError, match=r"data set rte, which data\.mixture does no"):
        read(folder, "train:rte")


def test_without_names_the_files_are_in_the_folder_itself(folder):
    source = read(folder / "sick", names=())
    assert list(source.column("inputs")) == TEXTS["sick"][0]


def test_several_references_in_numbered_files(folder):
    for number in range(2):
        path = folder / "sick" / f"train.targets{number}"
        path.write_text(f"yes {number}\nno {number}\nyes\n")
    columns = ("inputs", "targets")
    source = mixture_files(
        folder / "sick", "train[1:]", columns, (), PREFIXES, references=2
    )
    assert list(source.column("inputs")) == TEXTS["sick"][0][1:]
    references = source.column("targets")
    assert isinstance(references, References)
    assert list(references) == [["no 0", "no 1"], ["yes", "yes"]]


def test_a_prefix_that_no_task_has_is_refused_with_its_line(folder):
    path = folder / "trec" / "train.inputs"
    path.write_text("trec d\n\nTREC e\n")
    message = (
        f"{path}:3 is 'TREC e': it must begin with the prefix of a task, "
        "which is one of 'sick ', 'trec ' (data.prefixes)"
    )
    for split in ("train", "train[2:]", "train:trec"):
        with pytest.raises(DataError, match=re.escape(message)):
            read(folder, split)
    assert len(read(folder, prefixes=())) == 6


def test_lines_are_numbered_in_the_message():
    check_prefixes(["sick a", " ", ""], PREFIXES)
    with pytest.raises(DataError, match="line 2 is 'a sick': it must begin with"):
        check_prefixes(["sick a", "a sick"], PREFIXES)


def test_faults_of_files_are_refused(folder):
    message = f"data.mixture names rte, but there is no folder {folder / 'rte'}: "
    with pytest.raises(DataError, match=re.escape(message)):
        read(folder, names=("sick", "rte"))
    (folder / "trec" / "train.targets").write_text("who\n")
    with pytest.raises(DataError, match=r"number of lines, .*inputs has 3, .*has 1"):
        read(folder)
    for column in ("inputs", "targets"):
        (folder / "trec" / f"train.{column}").write_text("")
    with pytest.raises(DataError, match=r"trec/train\.targets have no lines"):
        read(folder)


# The config, and a task.


@pytest.fixture
def task_config(folder, tiny):
    for name, _ in TEXTS.items():
        for column in ("inputs", "targets"):
            path = folder / name / f"train.{column}"
            path.write_text(path.read_text() * 20)
    tiny.data.update(
        directory=str(folder),
        mixture=("sick=3", "trec=1"),
        prefixes=PREFIXES,
        source_language="inputs",
        target_language="targets",
    )
    return tiny


def test_batches_of_a_task_are_mixed_by_weights(task_config, tmp_path, caplog):
    task = make_task(parse(task_config), tmp_path / "run")
    batches = task.batches("train", seed=0)
    assert "sick: 60 examples in" in caplog.text
    assert "it has 75.0 % of the steps" in caplog.text
    decode = task.corpus.tokenizers["source"].decode
    words = {"sick": 0, "trec": 0}
    for i in range(20):
        arrays = batches.load(batches.plan.batch(i))
        rows = zip(arrays["source"], arrays["source_length"], strict=True)
        texts = [decode(ids[:length]) for ids, length in rows if length]
        (word,) = {text.split()[0] for text in texts}
        words[word] += 1
    assert abs(words["sick"] - 15) < 2


def test_a_record_begins_with_a_prefix(task_config, tmp_path):
    task = make_task(parse(task_config), tmp_path / "run")
    task.batches_of(["trec d", ""])
    with pytest.raises(DataError, match="line 2 is 'rte d': it must begin with the"):
        task.batches_of(["trec d", "rte d"])


def test_a_data_set_of_blank_lines_is_refused(task_config, tmp_path, folder):
    (folder / "trec" / "train.inputs").write_text("\n" * 60)
    task = make_task(parse(task_config), tmp_path / "run")
    with pytest.raises(ValueError, match="none of the 60 examples of trec is left"):
        task.batches("train", seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": ("sick=1", "sick=1")}, "sick is named twice"),
        ({"prefixes": ("sick ", " ")}, "must hold the first words of inputs"),
        ({"references": 2}, "data.references = 2: must be 1 with data.mixture"),
        ({"table": "a.tsv"}, "data.table = 'a.tsv': must be '' with data.prefixes"),
        ({"directions": ("en-de",)}, "must be () with data.directions"),
    ],
)
def test_config_that_does_not_fit_is_refused(task_config, changes, message):
    task_config.data.update(changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(task_config)


def test_a_source_that_is_no_text_is_no_mixture(task_config):
    task_config.input.modality = "grid"
    with pytest.raises(ValueError, match=r"data\.mixture.*must be \(\) with input"):
        parse(task_config)
