"""Invalid uses of prepare.py.

Each ends with one error message and leaves its folders unchanged.
"""

from pathlib import Path

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("text\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--directory={}/d"], ["--name"]),
        (["--name=dates"], ["--directory"]),
        (["--name=", "--directory={}/d"], ["tfds cannot open ''"]),
        (["--name=no_such_set", "--directory={}/d"], ["no_such_set"]),
        (["--name=../dates", "--directory={}/d"], ["../dates"]),
        (["--name=multi30k/en-xx", "--directory={}/d"], ["multi30k/en-xx"]),
        (["--name=dates/other", "--directory={}/d"], ["dates/other"]),
        (["--name=dates", "--directory={}/file"], ["file"]),
        (["--name=dates", "--directory={}/file/deeper"], ["file/deeper"]),
        (["--name=dates", "--directory={}/loop"], ["loop"]),
        (["--name=dates", "--directory="], ["--directory= is empty"]),
        (
            ["--name=dates", "--directory=~nobody-is-called-that/d"],
            ["home of an unknown user"],
        ),
        (
            ["--name=dates", "--directory={}/d", "--manual_dir={}/absent"],
            ["no directory", "absent"],
        ),
        (
            ["--name=dates", "--directory={}/d", "--manual_dir={}/file"],
            ["no directory", "file"],
        ),
        (["--name=dates", "--directory={}/d", "more"], ["'more' is not an option"]),
        (["--name=dates", "--directory={}/d", "--language=en"], ["language"]),
    ],
)
def test_abuses(folder, arguments, words):
    with unharmed(folder):
        refused(
            script("prepare", *(argument.format(folder) for argument in arguments)),
            *words,
        )
