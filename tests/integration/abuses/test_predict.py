"""Invalid uses of predict.py.

Each ends with one error message and leaves all files unchanged.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.abusing import refused, unharmed
from helpers.forked import script
from helpers.processes import STORES_NO_PROGRAMS

LINES, RUN = "--input=@/lines.txt", "--workdir=@/run"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # The output.
        pytest.param(
            (RUN, LINES, "--output=@/lines.txt"),
            ("is also the input",),
            id="output is the input",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/./run/../lines.txt"),
            ("is also the input",),
            id="by another path",
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
            (RUN, "--input=@/link.txt", "--output=@/lines.txt"),
            ("is also the input",),
            id="link to it",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/folder"),
            ("folder is a folder: name",),
            id="output is a folder",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/lines.txt/out"),
            ("there is no folder",),
            id="a file as a folder",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/none/out"),
            ("there is no folder", "create it"),
            id="no folder",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/run"),
            ("run is a folder: name",),
            id="output is the workdir",
        ),
        pytest.param(
            (RUN, LINES, "--output="),
            ("--output= is empty", "name a file"),
            id="no name",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/nowhere.txt"),
            ("there is no folder", "/none"),
            id="a dangling link",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/loop.txt"),
            ("loop.txt is a link to itself",),
            id="a loop",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/" + "x" * 300), ("x" * 300,), id="too long a name"
        ),
        pytest.param(
            (RUN, LINES, "--output=@/run/config.json"),
            ("is a file of the run",),
            id="the run's config",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/run/checkpoints/4/manifest.json"),
            ("is a file of the run",),
            id="a checkpoint",
        ),
        pytest.param(
            (RUN, LINES, "--output=@/run/tokenizer.json"),
            ("is a file of the run",),
            id="the tokenizer",
        ),
        # The input.
        pytest.param(
            (RUN, "--input=@/none.txt"),
            ("--input=@/none.txt cannot be read",),
            id="no input",
        ),
        pytest.param(
            (RUN, "--input=@/folder"),
            ("--input=@/folder cannot be read",),
            id="input is a folder",
        ),
        pytest.param(
            (RUN, "--input=@/loop.txt"),
            ("--input=@/loop.txt cannot be read",),
            id="input is a loop",
        ),
        pytest.param(
            (RUN, "--input="), ("--input= cannot be read",), id="input without a name"
        ),
        pytest.param(
            (RUN, "--input=@/latin1.txt"),
            ("latin1.txt:2 is not UTF-8", "0xe9"),
            id="Latin-1",
        ),
        pytest.param(
            (RUN, "--input=@/utf16.txt"),
            ("utf16.txt is not UTF-8 but looks like UTF-16",),
            id="UTF-16",
        ),
        pytest.param(
            (RUN, "--input=@/lines.txt.gz"),
            ("lines.txt.gz contains gzip data instead of",),
            id="compressed",
        ),
        # The run.
        pytest.param((LINES,), ("--workdir is missing", "--help"), id="no workdir"),
        pytest.param(
            ("--workdir=@/none", LINES),
            ("@/none is not the folder of a run",),
            id="workdir is not there",
        ),
        pytest.param(
            ("--workdir=@/lines.txt", LINES),
            ("lines.txt is not the folder of a run",),
            id="workdir a file",
        ),
        pytest.param(
            ("--workdir=@/loop.txt", LINES),
            ("loop.txt cannot be used: Too many",),
            id="workdir a loop",
        ),
        pytest.param(
            ("--workdir=@/bare", LINES),
            ("bare is not the folder of a run",),
            id="an empty workdir",
        ),
        pytest.param(
            ("--workdir=@/run/checkpoints", LINES),
            ("is not the folder of a run",),
            id="a folder of the run",
        ),
        pytest.param(
            ("--workdir=@/torn", LINES),
            ("torn, config.json: it is damaged",),
            id="torn config.json",
        ),
        pytest.param(
            ("--workdir=@/list", LINES),
            ("it does not specify a task",),
            id="config.json is a list",
        ),
        pytest.param(
            ("--workdir=@/task", LINES),
            ("config.task = 'translation' is not a task",),
            id="another task",
        ),
        pytest.param(
            ("--workdir=@/untrained", LINES),
            ("no valid checkpoint", "train there first"),
            id="no checkpoint",
        ),
        pytest.param(
            ("--workdir=@/damaged", LINES),
            ("has no valid checkpoint",),
            id="damaged checkpoints",
        ),
        pytest.param(
            ("--workdir=@/wordless", LINES), ("tokenizer.json",), id="no tokenizer"
        ),
        pytest.param(
            ("--workdir=@/swapped", LINES),
            ("tokenizer.json",),
            id="no tokenizer in tokenizer.json",
        ),
        # The options.
        pytest.param(
            (RUN, LINES, "--ouput=@/new"),
            ("'ouput'", "output", "--help"),
            id="a misspelt option",
        ),
        pytest.param(
            (RUN, "@/lines.txt"), ("is not an option", "--name=value"), id="no option"
        ),
        pytest.param(
            (RUN, LINES, "--score=maybe"),
            ("--score=maybe",),
            id="neither true nor false",
        ),
        pytest.param(
            (RUN, LINES, "--num_processes=2"),
            ("--coordinator_address is missing",),
            id="half a cluster",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.beam_size=0"),
            ("beam_size = 0: must be at least 1",),
            id="0",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.beam_size=2.5"),
            ("beam_size = '2.5': must be of type int",),
            id="beam 2.5",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.beam_size=" + "9" * 30),
            ("beam_size = 999", "must"),
            id="a beam of 10³⁰",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.temperature=nan"),
            ("temperature = nan: must be finite",),
            id="nan",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.length_penalty=inf"),
            ("length_penalty = inf: must be finite",),
            id="inf",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.n_best=9"),
            ("n_best = 9", "beam_size"),
            id="more than the beam",
        ),
        pytest.param(
            (RUN, LINES, "--config.beam_size=2"),
            ("did you mean decoding.beam_size",),
            id="no section",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding.foo=2"),
            ("the keys of config.decoding are",),
            id="unknown key",
        ),
        pytest.param(
            (RUN, LINES, "--config.foo.bar=2"),
            ("config.foo.bar", "the sections are"),
            id="unknown section",
        ),
        pytest.param(
            (RUN, LINES, "--config.=3"),
            ("--config.: write it as --config.SECTION.KEY=VALUE",),
            id="a dot",
        ),
        pytest.param(
            (RUN, LINES, "--config.decoding=3"),
            ("config.decoding is a section",),
            id="a section",
        ),
        pytest.param(
            (RUN, LINES, "--config.model.norm=pre"),
            ("parameters of another model",),
            id="another model",
        ),
        pytest.param(
            (RUN, LINES, "--config.evaluation.checkpoint=ema"),
            ("keeps no moving average",),
            id="no moving average",
        ),
        pytest.param(
            (RUN, LINES, "--config.mesh.data=7"),
            ("mesh", "7"),
            id="more devices than there are",
        ),
    ],
)
def test_abuses(place, arguments, words):
    arguments = [argument.replace("@", str(place)) for argument in arguments]
    with unharmed(place):
        refused(
            script("predict", *arguments, cwd=place),
            *(word.replace("@", str(place)) for word in words),
        )


def command(place: Path, **options) -> subprocess.CompletedProcess:
    """Run predict.py in a process of its own, for settings that must exist when the
    process starts.

    `limits` is a command that sets limits. A `preexec_fn` would fork this process,
    which JAX warns of.
    """
    words = [
        *options.pop("limits", []),
        sys.executable,
        str(ROOT / "scripts" / "predict.py"),
        f"--workdir={place / 'run'}",
    ]
    words += options.pop("arguments", [])
    return subprocess.run(
        words,
        stderr=subprocess.PIPE,
        timeout=300,
        check=False,
        **{"stdout": subprocess.PIPE} | options,
    )


def test_the_shell_may_make_the_input_the_output(place):
    with unharmed(place):
        with (place / "lines.txt").open() as lines:
            refused(
                command(
                    place, arguments=[f"--output={place / 'lines.txt'}"], stdin=lines
                ),
                "is also the input",
            )
        with (place / "lines.txt").open("a") as lines:
            done = command(
                place, arguments=[f"--input={place / 'lines.txt'}"], stdout=lines
            )
            assert done.returncode == 2
            assert b"error: --output=- is also the input" in done.stderr


def test_a_full_disk_leaves_the_old_output(place, tmp_path):
    (tmp_path / "out").write_bytes(b"old\n" * 5000)
    (tmp_path / "in").write_bytes(b"ek at\n" * 500)
    with unharmed(place, tmp_path):
        done = command(
            place,
            arguments=[
                f"--input={tmp_path / 'in'}",
                f"--output={tmp_path / 'out'}",
                "--score",
            ],
            limits=["prlimit", "--fsize=100"],
            env=os.environ | STORES_NO_PROGRAMS,
        )
        refused(
            done,
            f"{tmp_path / 'out'} cannot be written: File too large",
            "is unchanged",
        )


def test_a_platform_that_is_not_here(place):
    for platform in ("cuda", "foo"):
        done = command(
            place,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"JAX_PLATFORMS": platform},
        )
        refused(
            done,
            f"JAX_PLATFORMS={platform}: JAX finds no such device on this machine",
            "Unset the variable",
        )


def test_a_link_stays_and_its_file_is_replaced(place, tmp_path):
    (tmp_path / "out").write_text("old")
    (tmp_path / "out").chmod(0o640)
    (tmp_path / "link").symlink_to("out")
    done = script(
        "predict",
        f"--workdir={place / 'run'}",
        f"--output={tmp_path / 'link'}",
        stdin=b"ek\nut\n",
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len((tmp_path / "out").read_text().splitlines()) == 2
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]
    assert (tmp_path / "link").is_symlink()


def test_a_wide_beam_is_warned_of_and_long_work_tells_of_itself(place):
    done = script(
        "predict",
        f"--workdir={place / 'run'}",
        "--config.decoding.beam_size=60",
        stdin=b"ek\n",
    )
    assert done.returncode == 0
    assert (
        b"config.decoding.beam_size = 60: the search takes 60 times the work of greedy"
        b" search" in done.stderr
    )
