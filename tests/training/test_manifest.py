"""Manifests: each process hashes its share of the files of a step."""

import pytest
from etils import epath

from transformer_jax.training import manifest


def test_shares_are_complete_and_about_equal():
    sizes = {"a": 10, "b": 7, "c": 6, "d": 5, "e": 1, "f": 1}
    shares = manifest._shares(sizes, 2)
    assert sorted(shares[0] + shares[1]) == sorted(sizes)
    assert [sum(sizes[name] for name in share) for share in shares] == [15, 15]
    assert manifest._shares({"a": 3}, 3) == [["a"], [], []]


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_reads_only_its_share(tmp_path, monkeypatch, process):
    """The sums of the other process come from there."""
    folder = epath.Path(tmp_path)
    sizes = {f"file{i}": i for i in range(6)}
    for name, size in sizes.items():
        (folder / name).write_text("x" * size)
    expected, _ = manifest._hash(folder, sizes)
    read = []
    hashed = manifest._sha256

    def counted(path):
        read.append(path.name)
        return hashed(path)

    mine, theirs = (manifest._shares(sizes, 2)[i] for i in (process, 1 - process))
    monkeypatch.setattr(manifest, "_sha256", counted)
    monkeypatch.setattr(manifest.jax, "process_count", lambda: 2)
    monkeypatch.setattr(manifest.jax, "process_index", lambda: process)
    others = {name: expected[name] for name in theirs}
    monkeypatch.setattr(manifest.processes, "everyone", lambda own: [own, others])
    assert manifest._hash(folder, sizes) == (expected, {})
    assert sorted(read) == sorted(mine)


def test_a_name_outside_the_step_is_damage(tmp_path):
    folder = epath.Path(tmp_path / "7")
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / manifest.NAME).write_text(
        '{"files": {"../secret": {"size": 1, "sha256": "0"}}}'
    )
    assert "is not in the folder" in str(manifest.damage(folder))
