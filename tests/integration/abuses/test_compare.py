"""Invalid uses of compare.py.

Each ends with one error message and leaves all files unchanged.
"""

from pathlib import Path

import pytest

from helpers import broken
from helpers.abusing import refused, unharmed
from helpers.forked import script

pytest.importorskip(
    "matplotlib", reason="no matplotlib: pip install -c constraints.txt -e '.[plots]'"
)
RUN, OUTPUT = "--workdirs=@/run", "--output=@/new.svg"
LENGTHS = "--lengths=1,2", "--values=bleu_tokenized", "--split=val"


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory) -> Path:
    folder = broken.make(tmp_path_factory.mktemp("place"), trained)
    (folder / "torn" / "metrics.jsonl").write_text(
        '{"step": 1, "split": "train", "loss": 2.0}\nnonsense\n{"st'
    )
    (folder / "list" / "metrics.jsonl").write_text("[1, 2]\n")
    (folder / "task" / "metrics.jsonl").write_bytes(b"\xff\xfe")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param((RUN,), ("--output is missing", "--help"), id="no output"),
        pytest.param((OUTPUT,), ("--workdirs is missing", "--help"), id="no runs"),
        pytest.param(
            ("--workdirs=", OUTPUT), ("--workdirs is empty",), id="an empty list"
        ),
        pytest.param(
            ("--workdirs=@/run,", OUTPUT),
            ("or one of its names",),
            id="a comma too many",
        ),
        pytest.param(
            ("--workdirs=@/run,@/none", OUTPUT),
            ("@/none/metrics.jsonl is missing",),
            id="one is not there",
        ),
        pytest.param(
            ("--workdirs=@/bare", OUTPUT),
            ("bare/metrics.jsonl is missing or empty",),
            id="an empty folder",
        ),
        pytest.param(
            ("--workdirs=@/lines.txt", OUTPUT),
            ("lines.txt/metrics.jsonl cannot be read: Not a directory",),
            id="a file",
        ),
        pytest.param(
            ("--workdirs=@/list", OUTPUT),
            ("list/metrics.jsonl",),
            id="rows that are lists",
        ),
        pytest.param(
            ("--workdirs=@/task", OUTPUT),
            ("task/metrics.jsonl",),
            id="metrics that are not text",
        ),
        pytest.param(
            (RUN, "--output=@/old.txt"),
            ("must end in one of", ".svg"),
            id="not a picture",
        ),
        pytest.param((RUN, "--output=@/new"), ("must end in one of",), id="no ending"),
        pytest.param(
            (RUN, "--output=@/none/new.svg"), ("there is no folder",), id="no folder"
        ),
        pytest.param(
            (RUN, "--output=@/lines.txt/new.svg"),
            ("there is no folder",),
            id="a file as a folder",
        ),
        pytest.param(
            (RUN, OUTPUT, "--values=blue"),
            ("has no 'blue'", "bleu"),
            id="unknown value",
        ),
        pytest.param(
            (RUN, OUTPUT, "--values="), ("--values is empty",), id="no values"
        ),
        pytest.param(
            (RUN, OUTPUT, "--split=val"),
            ("require --lengths",),
            id="a split without lengths",
        ),
        pytest.param(
            (RUN, OUTPUT, "--config.decoding.beam_size=1"),
            ("require --lengths",),
            id="key without lengths",
        ),
        pytest.param(
            (RUN, OUTPUT, "--lengths=3"),
            ("--lengths plots one metric",),
            id="lengths of the loss",
        ),
        pytest.param(
            (RUN, OUTPUT, "--lengths=3,1", *LENGTHS[1:]),
            ("must be increasing",),
            id="falling lengths",
        ),
        pytest.param(
            (RUN, OUTPUT, "--lengths=0", *LENGTHS[1:]), ("at least 1",), id="length 0"
        ),
        pytest.param(
            (RUN, OUTPUT, "--lengths=", *LENGTHS[1:]),
            ("must be increasing",),
            id="no lengths",
        ),
        pytest.param(
            (RUN, OUTPUT, "--lengths=ten", *LENGTHS[1:]),
            ("must be integers",),
            id="a word",
        ),
        pytest.param(
            (RUN, OUTPUT, *LENGTHS[:1], "--values=blue"),
            ("there is no metric 'blue'",),
            id="no such metric",
        ),
        pytest.param(
            (RUN, OUTPUT, *LENGTHS[:2], "--split=none"),
            ("none.en",),
            id="unknown split",
        ),
        pytest.param(
            ("--workdirs=@/untrained", OUTPUT, *LENGTHS),
            ("no valid checkpoint",),
            id="no checkpoint",
        ),
        pytest.param(
            ("--workdirs=@/run,@/swapped", OUTPUT, *LENGTHS),
            ("tokenizer.json",),
            id="no tokenizer",
        ),
        pytest.param(
            (RUN, OUTPUT, *LENGTHS, "--config.decoding.foo=1"),
            ("is not a key",),
            id="unknown key",
        ),
    ],
)
def test_abuses(place, arguments, words):
    arguments = [argument.replace("@", str(place)) for argument in arguments]
    with unharmed(place):
        refused(
            script("compare", *arguments, cwd=place),
            *(word.replace("@", str(place)) for word in words),
        )


def test_an_old_picture_is_replaced_whole(place, tmp_path):
    (tmp_path / "old.svg").write_text("old")
    with unharmed(place):
        done = script(
            "compare", f"--workdirs={place / 'run'}", f"--output={tmp_path / 'old.svg'}"
        )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "old.svg").read_text().rstrip().endswith("</svg>")
    assert len(list(tmp_path.iterdir())) == 1
