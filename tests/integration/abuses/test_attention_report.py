"""Invalid uses of attention_report.py.

Each ends with one error message and leaves all files unchanged.
"""

import pytest

from helpers.abusing import refused, unharmed
from helpers.forked import script

LINES, RUN, OUTPUT = "--input=@/lines.txt", "--workdir=@/run", "--output=@/new.html"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            (RUN, LINES, "--output=@/lines.txt"),
            ("is also the input",),
            id="output is the input",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/link.txt"),
            ("is also the input",),
            id="through a link",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/hard.txt"),
            ("is also the input",),
            id="through a hard link",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/folder"),
            ("folder is a folder: name",),
            id="output is a folder",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/none/out"), ("there is no folder",), id="no folder"
        ),
        pytest.param(
            (RUN, LINES, "--output=@/loop.txt"),
            ("loop.txt is a link to itself",),
            id="a loop",
        ),
        pytest.param(
            (RUN, LINES, "--output=-"), ("--output=-", "name a file"), id="stdout"
        ),
        pytest.param(
            (RUN, LINES, "--output=@/run/metrics.jsonl"),
            ("is a file of the run",),
            id="the run's metrics",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/" + "x" * 300), ("x" * 300,), id="too long a name"
        ),
        pytest.param((RUN, OUTPUT), ("--input=-: all lines are empty",), id="no lines"),
        pytest.param(
            (RUN, "--input=@/blank.txt", OUTPUT),
            ("all lines are empty",),
            id="blank lines",
        ),
        pytest.param(
            (RUN, "--input=@/none.txt", OUTPUT),
            ("--input=@/none.txt cannot be read",),
            id="no input",
        ),
        pytest.param(
            (RUN, "--input=@/latin1.txt", OUTPUT),
            ("latin1.txt:2 is not UTF-8",),
            id="Latin-1",
        ),
        pytest.param(
            (RUN, LINES, OUTPUT, "--sentences=0"), ("sentences",), id="no sentences"
        ),
        pytest.param(
            (RUN, LINES, OUTPUT, "--sentences=all"),
            ("sentences", "all"),
            id="all sentences",
        ),
        pytest.param(
            ("--workdir=@/none", LINES, OUTPUT),
            ("is not the folder of a run",),
            id="no workdir",
        ),
        pytest.param(
            ("--workdir=@/untrained", LINES, OUTPUT),
            ("has no valid checkpoint",),
            id="no checkpoint",
        ),
        pytest.param(
            ("--workdir=@/swapped", LINES, OUTPUT),
            ("tokenizer.json",),
            id="no tokenizer",
        ),
        pytest.param(
            (RUN, LINES, OUTPUT, "--config.foo=1"),
            ("config.foo is not a key",),
            id="unknown key",
        ),
        pytest.param((LINES, OUTPUT), ("--workdir is missing",), id="no run"),
    ],
)
def test_abuses(place, arguments, words):
    arguments = [argument.replace("@", str(place)) for argument in arguments]
    with unharmed(place):
        refused(
            script("attention_report", *arguments, cwd=place),
            *(word.replace("@", str(place)) for word in words),
        )
