"""Splits of SCAN as parallel files."""

import gzip
import subprocess
import sys

import pytest

from helpers.corpus import real_data
from transformer_jax.data.corpora.scan import HELD_OUT, examples, write
from transformer_jax.data.files import DataError
from transformer_jax.errors import UserError

SPLITS = ("train", "val", "generalization", "test")


def line(command, actions):
    return f"IN: {command} OUT: {' '.join(['I_JUMP'] * actions)}\n"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "scan"
    folder.mkdir()
    lines = "".join(line(f"jump {i}", 1 + i % 10) for i in range(60))
    (folder / "tasks.txt.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "addprim_jump_train.txt").write_text(line("walk", 1) * 30)
    (folder / "addprim_jump_test.txt").write_text(line("jump twice", 2) * 7)
    return folder


def pairs(folder, split):
    columns = [
        (folder / f"{split}.{name}").read_text().splitlines()
        for name in ("commands", "actions")
    ]
    return list(zip(*columns, strict=True))


def test_a_cut_divides_by_the_number_of_actions(data, tmp_path):
    report = write(data, "cut6", tmp_path / "out")
    parts = {split: pairs(tmp_path / "out", split) for split in SPLITS}
    assert {split: len(rows) for split, rows in parts.items()} == {
        "train": 34,
        "val": 2,  # a twentieth of 36, rounded up
        "generalization": 12,
        "test": 12,
    }
    lengths = {
        split: {len(actions.split()) for _, actions in rows}
        for split, rows in parts.items()
    }
    assert lengths["train"] | lengths["val"] == set(range(1, 7))
    assert lengths["generalization"] | lengths["test"] == set(range(7, 11))
    everything = [pair for rows in parts.values() for pair in rows]
    assert sorted(everything) == sorted(map(tuple, examples(data, "tasks.txt")))
    assert len(set(everything)) == 60
    assert report[0] == "train: 34 examples, 1 to 6 actions"
    write(data, "cut6", tmp_path / "again")
    assert pairs(tmp_path / "again", "val") == parts["val"]


def test_a_published_split_keeps_its_parts(data, tmp_path):
    write(data, "jump", tmp_path / "out")
    sizes = {split: len(pairs(tmp_path / "out", split)) for split in SPLITS}
    held_out = 30 // HELD_OUT + 1
    assert sizes["val"] == held_out
    assert sizes["train"] == 30 - held_out
    assert sizes["generalization"] == 3
    assert sizes["test"] == 4
    assert set(pairs(tmp_path / "out", "test")) == {("jump twice", "I_JUMP I_JUMP")}


def test_splits_that_cannot_be_made(data, tmp_path):
    with pytest.raises(UserError, match=r"'add' does not exist: choose .*cut26"):
        write(data, "add", tmp_path / "out")
    with pytest.raises(UserError, match=r"60 examples .* 0 others: .* from 1 to 9"):
        write(data, "cut10", tmp_path / "out")
    with pytest.raises(DataError, match=r"neither simple_train\.txt nor"):
        write(data, "simple", tmp_path / "out")
    (data / "simple_train.txt").write_text(line("walk", 1) + "IN: walk\n")
    with pytest.raises(DataError, match=r"simple_train\.txt:2 is 'IN: walk': it must"):
        write(data, "simple", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(data, tmp_path):
    command = [sys.executable, "-m", "transformer_jax.data.corpora.scan"]
    options = [f"--data={data}", f"--directory={tmp_path / 'out'}"]
    done = subprocess.run(
        [*command, *options, "--split=cut6"], capture_output=True, check=True
    )
    assert b"generalization: 12 examples, 7 to 10 actions" in done.stderr
    assert done.stdout == b""
    failed = subprocess.run([*command, *options, "--split=x"], capture_output=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith(b"error: the split 'x' does not exist")


def test_the_real_files(tmp_path):
    data = real_data("scan")
    write(data, "cut26", tmp_path)
    rows = {split: pairs(tmp_path, split) for split in SPLITS}
    sizes = {split: len(of_split) for split, of_split in rows.items()}
    assert sizes == {"train": 17371, "val": 915, "generalization": 1312, "test": 1312}
    assert len({pair for of_split in rows.values() for pair in of_split}) == 20910
    of_length = examples(data, "length_train.txt")
    write(data, "cut22", tmp_path)
    of_cut = pairs(tmp_path, "train") + pairs(tmp_path, "val")
    assert sorted(of_cut) == sorted(map(tuple, of_length))
