"""Scripts whose standard streams are closed or full, whose user has no home, or
whose locale is not UTF-8.
"""

import errno
import json
import os
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.forked import begun
from transformer_jax import console

# Close the streams with these numbers, or send them to a full disk, like a shell, and
# run a script.
PROGRAM = """
import os, pwd, runpy, sys
numbers, full = sys.argv[1], sys.argv[2] == "full"
for number in map(int, numbers):
    os.close(number)
    if full:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    else:
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
if not numbers:
    def getpwuid(uid):
        raise KeyError(uid)
    pwd.getpwuid = getpwuid
    del os.environ["HOME"]
    os.environ.pop("XDG_CACHE_HOME", None)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def with_streams(tmp_path):
    """Return a function that runs a script with closed or full streams."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(
        numbers: str, how: str, name: str, *arguments: str
    ) -> subprocess.CompletedProcess:
        path = str(ROOT / "scripts" / f"{name}.py")
        with begun(
            tmp_path / "program.py", numbers, how, path, *arguments, stdin=b"ek at\n"
        ) as running:
            return running.end()

    return run


@pytest.mark.parametrize(
    ("numbers", "how"),
    [
        ("012", "closed"),
        ("12", "full"),
        pytest.param("1", "closed", marks=pytest.mark.slow),
        pytest.param("2", "full", marks=pytest.mark.slow),
    ],
)
def test_training_needs_no_streams(with_streams, recipe, tmp_path, numbers, how):
    done = with_streams(
        numbers, how, "train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
    )
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert ("trained to step 4" in done.stderr.decode()) == (numbers == "1")
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize(("numbers", "how"), [("02", "closed"), ("2", "full")])
def test_results_come_without_messages(with_streams, trained, numbers, how):
    done = with_streams(numbers, how, "evaluate", f"--workdir={trained}")
    assert done.returncode == 0
    assert json.loads(done.stdout)["step"] == 4


@pytest.mark.parametrize("name", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("how", "words"),
    [("closed", "Bad file descriptor"), ("full", "No space left on device")],
)
def test_results_that_cannot_be_written_are_an_error(
    with_streams, trained, name, how, words
):
    done = with_streams("1", how, name, f"--workdir={trained}")
    assert done.returncode == 2, done.stderr.decode()
    assert (
        done.stderr.decode()
        .splitlines()[-1]
        .startswith(f"error: stdout cannot be written: {words}. Results go")
    )


def test_input_that_cannot_be_read_is_an_error(with_streams, trained):
    done = with_streams("0", "closed", "predict", f"--workdir={trained}")
    assert (done.returncode, done.stdout) == (2, b"")
    # libtpu may have written lines before
    assert (
        done.stderr.decode()
        .splitlines()[-1]
        .startswith(
            "error: --input=- cannot be read: Bad file descriptor; name a text file"
        )
    )


def test_a_user_without_home_and_name_can_train(with_streams, recipe, tmp_path):
    done = with_streams(
        "", "", "train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_user_without_home_and_name_has_results(with_streams, trained, name):
    done = with_streams("", "", name, f"--workdir={trained}")
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.splitlines()) == 1


def test_a_locale_without_utf8(tmp_path):
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
    }
    command = [sys.executable, ROOT / "scripts" / "predict.py", "--workdir=ñandú"]
    done = subprocess.run(
        command, env=environment, capture_output=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert done.stderr.decode().startswith(
        "error: --workdir=ñandú is not the folder of a run"
    )


def test_an_error_of_stdout_says_so():
    with (
        pytest.raises(console.StreamError, match="stdout cannot be written: No space"),
        console.named(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
