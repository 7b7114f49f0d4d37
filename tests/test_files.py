"""Files are written whole or not at all."""

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from transformer_jax import files
from transformer_jax.errors import UserError


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit every file to 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("old", [None, b"old" * 100])
def test_a_full_disk_changes_nothing(tmp_path, old):
    path = tmp_path / "out"
    if old is not None:
        path.write_bytes(old)
    with full_disk(), pytest.raises(files.OutputError) as error:
        files.write(path, b"new" * 5000)
    assert str(error.value).startswith(f"{path} cannot be written: File too large")
    assert ("is unchanged" in str(error.value)) == (old is not None)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == (
        [] if old is None else [old]
    )


def test_an_error_in_the_block_changes_nothing(tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(TypeError), files.replacing(tmp_path / "out") as file:
        file.writelines([b"new", "no bytes"])
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_a_file_whose_kind_cannot_be_told_is_not_emptied(tmp_path, monkeypatch):
    path, of = tmp_path / "out", os.stat
    path.write_text("old")

    def failing(at, *args, **kwargs):
        if str(at) == str(path):
            raise OSError(errno.EIO, "Input/output error")
        return of(at, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        with pytest.raises((TypeError, OSError)), files.replacing(path) as file:
            file.writelines([b"new", "no bytes"])
    assert path.read_text() == "old"


@pytest.mark.parametrize(("follow", "kept"), [(True, "new"), (False, "old")])
def test_links(tmp_path, follow, kept):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with files.replacing(tmp_path / "link", follow=follow) as file:
        file.write(b"new")
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "file").read_text() == kept
    assert (tmp_path / "link").is_symlink() == follow
    assert len(list(tmp_path.iterdir())) == 2


def test_several_files_in_a_new_folder(tmp_path):
    for content in (b"old", b"new"):
        files.write_all(tmp_path / "a" / "b", {"one": content, "two": b"2"})
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()
    } == {"one": b"new", "two": b"2"}
    with pytest.raises(
        files.OutputError, match=r"the folder \S+/one/c cannot be made: Not a directory"
    ):
        files.write_all(tmp_path / "a" / "b" / "one" / "c", {})


def test_a_lasting_error_is_explained(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    rule = (
        r"^--input=a cannot be read: Too many levels of symbolic links \(\S+/loop\);"
        r" name another$"
    )
    with (
        pytest.raises(UserError, match=rule),
        files.explained("--input=a cannot be read", "name another"),
    ):
        (tmp_path / "loop").read_bytes()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_an_error_that_may_pass_stays(number):
    reason = os.strerror(number)
    with pytest.raises(OSError, match=reason), files.explained("a", "b"):
        raise OSError(number, reason)


def test_no_folder_can_be_made_in_proc():
    with pytest.raises(
        files.OutputError,
        match=r"the folder /proc/none cannot be made: No folder can be made here",
    ):
        files.make_folder("/proc/none")


def test_permissions_stay(tmp_path):
    (tmp_path / "out").write_text("old")
    (tmp_path / "out").chmod(0o604)
    files.write(tmp_path / "out", b"new")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o604


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(
        target=lambda: found.append((tmp_path / "pipe").read_bytes()), daemon=True
    )
    reader.start()
    files.write(tmp_path / "pipe", b"data")
    reader.join(10)
    assert found == [b"data"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "end",
    [
        "\n",
        "\r",
        "\r\n",
        "\x0b",
        "\x0c",
        "\x1c",
        "\x1d",
        "\x1e",
        "\x85",
        "\u2028",
        "\u2029",
    ],
)
def test_a_prediction_is_one_line_for_every_reader(end, tmp_path):
    records = [{"text": f"a{end}b{end}", f"{end}é": [end]}, [f"a{end}"]]
    lines = [files.one_line(value) for value in (f"a{end}b{end}é", *records)]
    assert [line.splitlines() for line in lines] == [[line] for line in lines]
    (tmp_path / "out").write_text("".join(line + "\n" for line in lines))
    assert (tmp_path / "out").read_text() == "".join(line + "\n" for line in lines)
    assert lines[0] == f"a{' ' * len(end)}b{' ' * len(end)}é"
    assert [json.loads(line) for line in lines[1:]] == records


def test_no_other_character_ends_a_line():
    ends = {chr(i) for i in range(0x110000) if len(f"a{chr(i)}b".splitlines()) > 1}
    assert ends == set(files.LINE_ENDS)
